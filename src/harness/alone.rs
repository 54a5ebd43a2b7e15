/*!
GPU cases in processes of their own.

A kernel that reads where nothing is takes the GPU away from its process, and one that hangs can be ended only with its
process. So the binary runs itself again for each such case, told by [`ALONE`] which one, and ends it after a limit
([`super::environment::LIMIT`]). What breaks there is that case's failure, and later cases never hear of it.
*/

use super::environment::LIMIT;
use crate::child::{self, Ended};
use std::io::Write;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Set by the harness for the processes that it starts: the one case that they run.
pub const ALONE: &str = "MLA_CHECK_ALONE";

/// Exit codes of such a process.
const FAILED: u8 = 3;
const UNJUDGED: u8 = 4;

/// What became of a case in a process of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It passed.
    Passed,
    /// It was judged and failed; what it said.
    Failed(String),
    /// It failed before it was judged; what it said.
    Unjudged(String),
    /// Its process came to no result: what, where, what to do, and what the process said.
    Ended(String),
}

/// The case that this process was started for.
pub fn asked() -> Option<String> {
    std::env::var(ALONE).ok().filter(|name| !name.is_empty())
}

/// For a process that was started for a case: its result, to be returned from `main`. `judged`: whether it got so far.
pub fn answer(result: Result<(), String>, judged: bool) -> ExitCode {
    let Err(text) = result else { return ExitCode::SUCCESS };
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::from(if judged { FAILED } else { UNJUDGED })
}

/// Runs a case of this binary in a process of its own. What it says is passed on, except where it is the result.
pub fn run(case: &str, limit: Duration) -> Outcome {
    let started = std::env::current_exe().and_then(|own| {
        let mut command = Command::new(own);
        child::run(command.args(std::env::args_os().skip(1)).env(ALONE, case), limit)
    });
    match started {
        Ok(ended) => outcome(case, limit, &ended),
        Err(e) => Outcome::Ended(format!(
            "no process could be started for the case: {e}\n  where: {case}\n  do: see whether this machine lets programs start others"
        )),
    }
}

fn outcome(case: &str, limit: Duration, ended: &Ended) -> Outcome {
    let said = ended.text();
    match ended.code().map(u8::try_from) {
        Some(Ok(0)) => {
            // Nobody else shows it: kernels that print, warnings.
            let _ = std::io::stderr().write_all(&[&ended.stdout[..], &ended.stderr].concat());
            Outcome::Passed
        }
        Some(Ok(FAILED)) => Outcome::Failed(said),
        Some(Ok(UNJUDGED)) => Outcome::Unjudged(said),
        _ => {
            let seconds = limit.as_secs();
            let said = if said.is_empty() { String::new() } else { format!("\n{said}") };
            Outcome::Ended(match ended.status {
                None => format!(
                    "the case took longer than {seconds} s and was ended; a kernel may hang\n  where: {case}\n  do: run it with `mla-check run --kernel-timeout SECONDS`, which names the kernel; where it only needs longer, set {LIMIT}=SECONDS{said}"
                ),
                Some(_) => format!(
                    "the case's process {} without a result\n  where: {case}\n  do: see what it said, and run it by itself{said}",
                    ended.how()
                ),
            })
        }
    }
}
