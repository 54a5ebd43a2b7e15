/*!
Tests that need a GPU: run, skipped by name, or failed, as machine and environment say.

That is decided before tests are listed. A test that finds out by itself that it can't run looks like one that passed to
runners that see its process alone (cargo-nextest); one that is listed as ignored, with the reason beside its name, does not.
*/

use crate::device::cuda::Installed;
use crate::nvrtc::Nvrtc;
use libtest_mimic::{Completion, Failed, Trial};

/// Set to 1: no GPU is a failure, never a skip.
pub const REQUIRE_GPU: &str = "MLA_CHECK_REQUIRE_GPU";
/// Set to 1: no compiler is a failure, never a skip.
pub const REQUIRE_NVRTC: &str = "MLA_CHECK_REQUIRE_NVRTC";

/// Whether a variable is set to 1.
pub fn is_on(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|v| v == "1")
}

/// What becomes of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It runs.
    Runs,
    /// Listed as skipped, for this reason.
    Skipped(String),
    /// Failed without being run: what was required is not there.
    Required(String),
}

impl Standing {
    /// Of a test that needs a GPU: what is lacking, if anything, and whether it was required.
    pub fn of(lacking: Option<String>, required: bool) -> Standing {
        Standing::by(lacking, required, REQUIRE_GPU)
    }

    /// Of a test whose kernels have to be compiled.
    pub fn of_compiled(lacking: Option<String>, required: bool) -> Standing {
        Standing::by(lacking, required, REQUIRE_NVRTC)
    }

    fn by(lacking: Option<String>, required: bool, variable: &str) -> Standing {
        match lacking {
            None => Standing::Runs,
            Some(why) if required => Standing::Required(format!("{variable}=1, but {why}")),
            Some(why) => Standing::Skipped(why),
        }
    }

    /// The test, as runners see it.
    pub fn trial(
        self,
        name: impl Into<String>,
        test: impl FnOnce() -> Result<(), Failed> + Send + 'static,
    ) -> Trial {
        match self {
            Standing::Runs => Trial::test(name, test),
            Standing::Required(why) => Trial::test(name, move || Err(Failed::from(why))),
            // Marked as ignored, so that no runner counts it as passed; the kind is what every list shows.
            Standing::Skipped(why) => {
                let kind = format!("skipped: {why}");
                Trial::ignorable_test(name, move || Ok(Completion::ignored_with(why)))
                    .with_kind(kind)
                    .with_ignored_flag(true)
            }
        }
    }
}

/// What this machine lacks to run kernels on a GPU, in a sentence: the driver, a GPU, or the compiler. Never panics; the
/// compiler is looked for only where there is a GPU.
pub fn lacking_gpu() -> Option<String> {
    let gpu = Installed::look().err().map(|e| e.problem().to_string());
    gpu.or_else(lacking_compiler)
}

/// What this machine lacks to compile kernels, in a sentence.
pub fn lacking_compiler() -> Option<String> {
    Nvrtc::here().err().map(|e| e.problem().to_string())
}
