//! NVRTC, where the environment names it.

use mla_check::nvrtc::{Nvrtc, Search, VARIABLE};
use std::io::Write;

/// The compiler that the environment names; nothing is searched for.
pub fn nvrtc(test: &str) -> Option<Nvrtc> {
    let Some(named) = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) else {
        assert!(
            std::env::var_os("MLA_CHECK_REQUIRE_NVRTC").is_none_or(|v| v != "1"),
            "MLA_CHECK_REQUIRE_NVRTC=1, but {VARIABLE} is not set"
        );
        // Not by println!: that is shown of failed tests only.
        let _ = writeln!(std::io::stderr(), "{test}: NOT RUN, {VARIABLE} is not set");
        return None;
    };
    let search = Search { named: Some(named.into()), ..Search::default() };
    Some(Nvrtc::find(&search).unwrap_or_else(|e| panic!("{e}")))
}
