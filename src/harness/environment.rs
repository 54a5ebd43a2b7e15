/*! What a run of the matrix is told by variables: `cargo test` takes no options of ours. */

use super::gate::{REQUIRE_GPU, REQUIRE_NVRTC, is_on};
use std::ffi::OsString;
use std::path::PathBuf;

/// Files and folders of the user's own models, separated as PATH is.
pub const MODELS: &str = "MLA_CHECK_MODELS";
/// Layers of these, as `run --layer` takes them; the first with MLA attention where it is not set.
pub const LAYERS: &str = "MLA_CHECK_LAYERS";
/// The folder that every case writes its JSON report to.
pub const REPORTS: &str = "MLA_CHECK_REPORTS";
/// The least number of GPU cases that must have run.
pub const FLOOR: &str = "MLA_CHECK_GPU_FLOOR";

/// The variables. One that is empty counts as not set.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// [`MODELS`].
    pub models: Option<OsString>,
    /// [`LAYERS`].
    pub layers: Option<String>,
    /// [`REPORTS`].
    pub reports: Option<PathBuf>,
    /// [`FLOOR`], as it was written.
    pub floor: Option<String>,
    /// [`REQUIRE_GPU`]
    pub require_gpu: bool,
    /// [`REQUIRE_NVRTC`]
    pub require_nvrtc: bool,
    /// Whether cargo-nextest runs this process for one test.
    pub nextest: bool,
}

impl Environment {
    /// Of this process.
    pub fn read() -> Environment {
        let get = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        let text = |name| get(name).map(|v| v.to_string_lossy().into_owned());
        Environment {
            models: get(MODELS),
            layers: text(LAYERS),
            reports: get(REPORTS).map(PathBuf::from),
            floor: text(FLOOR),
            require_gpu: is_on(REQUIRE_GPU),
            require_nvrtc: is_on(REQUIRE_NVRTC),
            nextest: is_on("NEXTEST"),
        }
    }

    /// The floor, where one was asked for.
    ///
    /// # Errors
    /// Not a number; or nobody would count: what, where, what to do.
    pub fn floor(&self) -> Result<Option<usize>, String> {
        let Some(text) = &self.floor else { return Ok(None) };
        let place = format!("{FLOOR}={}", text.escape_debug());
        let number = text.parse().map_err(|_| {
            format!("the floor of GPU cases is not a number\n  where: {place}\n  do: write the least number of GPU cases that must run")
        })?;
        if self.nextest && self.reports.is_none() {
            return Err(format!(
                "cargo-nextest runs every case in a process of its own, so none of them can count the others\n  where: {place}\n  do: set {REPORTS}=DIR too, and count with `mla-check merge DIR --gpu-floor {number}`"
            ));
        }
        Ok(Some(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_that_nobody_would_count_is_an_error() {
        let of = |floor: &str, nextest, reports: Option<&str>| {
            let (floor, reports) = (Some(floor.to_string()), reports.map(PathBuf::from));
            Environment { floor, nextest, reports, ..Environment::default() }.floor()
        };
        assert_eq!(Environment::default().floor(), Ok(None));
        assert_eq!(of("3", false, None), Ok(Some(3)));
        assert_eq!(of("3", true, Some("r")), Ok(Some(3)));
        assert!(of("3", true, None).unwrap_err().contains("merge DIR --gpu-floor 3"));
        for bad in ["-1", "x", "1.5"] {
            assert!(of(bad, false, None).unwrap_err().contains("is not a number"), "{bad}");
        }
    }
}
