/*! `run --record-signature` and `--signature`: one fault among others, for `git bisect run`. */

use super::out::Failure;
use super::run::RunArgs;
use crate::report::Report;
use crate::signature::{Setup, Signature};
use std::path::PathBuf;

/// What a run has to do with a signature.
pub(super) struct Bisecting {
    case: Setup,
    record: Option<PathBuf>,
    /// The recorded one, and its file.
    recorded: Option<(Signature, PathBuf)>,
    bisect: bool,
}

impl Bisecting {
    /// Reads what is to be read and refuses what can't work, before anything is computed.
    pub(super) fn new(args: &RunArgs, case: Setup) -> Result<Bisecting, Failure> {
        let recorded = match &args.signature {
            None => None,
            Some(path) => {
                let read = Signature::read(path).map_err(Failure::Input)?;
                read.fits(&case, path).map_err(Failure::Input)?;
                Some((read, path.clone()))
            }
        };
        if let Some(path) = &args.record_signature
            && path.parent().is_some_and(|p| !p.as_os_str().is_empty() && !p.is_dir())
        {
            return Err(Failure::Input(format!(
                "the signature's folder does not exist\n  where: --record-signature {}\n  do: name a file in a folder that exists",
                path.display()
            )));
        }
        Ok(Bisecting { case, record: args.record_signature.clone(), recorded, bisect: args.bisect })
    }

    /// Compares and records, when all that could be judged has been; `broken`: why the engine stopped, if it did. Says whether that is
    /// the recorded break, which is bad where it is looked for.
    pub(super) fn judged(self, report: &mut Report, broken: Option<&Failure>) -> Result<bool, Failure> {
        let said = match broken {
            Some(Failure::Broke(said)) => Some(said),
            // No commit's doing.
            Some(_) => return Ok(false),
            None => None,
        };
        if let Some((signature, path)) = &self.recorded {
            report.signature = signature.compare(report, path);
        }
        if let Some(path) = &self.record {
            let found = match said {
                Some(said) => Some(Signature::of_break(self.case, said)),
                None => Signature::of(self.case, report),
            };
            let found = found.ok_or_else(|| {
                Failure::Input(format!(
                    "there is no fault to record: nothing is wrong here\n  where: --record-signature {}\n  do: record where the fault shows; a larger --batch or another --form may be what it needs",
                    path.display()
                ))
            })?;
            found.write(path).map_err(Failure::Input)?;
        }
        let recorded = self.recorded.as_ref().zip(said).is_some_and(|((s, _), said)| s.is_break(said));
        Ok(self.bisect && recorded)
    }
}
