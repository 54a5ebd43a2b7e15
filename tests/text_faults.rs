/*!
Every fault inside a kernel, on the PTX machine, in the small run that makes it act: it is caught, the first wrong tensor is
the one that the row says, with the cause or the finding that it says; and the same run without it is clean.
*/

#[path = "common/texts.rs"]
mod texts;

use libtest_mimic::{Arguments, Failed, Trial};
use mla_check::check::EngineKind;
use mla_check::fault::text::{Mutation, Shows, all};
use mla_check::harness::gate::{REQUIRE_NVRTC, Standing, is_on};
use mla_check::nvrtc::Nvrtc;
use std::collections::BTreeMap;
use std::process::ExitCode;
use texts::{accused, missed, run};

fn main() -> ExitCode {
    // Kernels of these widths, and altered ones, are compiled here.
    let lacking = Nvrtc::here().err().map(|e| e.problem().to_string());
    let required = is_on(REQUIRE_NVRTC);
    let standing = || Standing::of_compiled(lacking.clone(), required);
    let runs: BTreeMap<&str, Shows> = all().iter().map(|m| (m.shows.name, m.shows)).collect();
    let twins = runs.into_values().map(|s| standing().trial(format!("clean::{}", s.name), move || clean(&s)));
    let name = |m: &Mutation| format!("{}::{}", m.kernel.trim_end_matches(".cu"), m.name);
    let faults = all().iter().map(|m| standing().trial(name(m), move || caught(m)));
    let trials: Vec<Trial> = twins.chain(faults).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn caught(m: &'static Mutation) -> Result<(), Failed> {
    failed(missed(m, &run(EngineKind::Ptx, &m.shows, Some(m))?))
}

fn clean(shows: &Shows) -> Result<(), Failed> {
    failed(accused(&run(EngineKind::Ptx, shows, None)?))
}

fn failed(all: Vec<String>) -> Result<(), Failed> {
    if all.is_empty() { Ok(()) } else { Err(Failed::from(all.join("\n  "))) }
}
