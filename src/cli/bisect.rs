/*! `run --record-signature` and `--signature`: one fault among others, for `git bisect run`. */

use super::out::{Failure, Output};
use super::run::RunArgs;
use crate::judge::Verdict;
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

    /// The engine broke before there was anything to judge.
    pub(super) fn broke(self, why: Failure, out: &mut Output) -> Result<u8, Failure> {
        let Failure::Broke(said) = &why else { return Err(why) };
        if let Some(path) = &self.record {
            Signature::of_break(self.case, said).write(path).map_err(Failure::Input)?;
        }
        match &self.recorded {
            Some((signature, _)) if self.bisect && signature.is_break(said) => {
                out.error(&why.to_string());
                Ok(Verdict::Fault.exit(true))
            }
            _ => Err(why),
        }
    }

    /// Something was judged; `partly`: until the engine broke.
    pub(super) fn judged(self, report: &mut Report, partly: bool) -> Result<(), Failure> {
        if let Some((signature, path)) = &self.recorded {
            report.signature = signature.compare(report, path);
        }
        let Some(path) = &self.record else { return Ok(()) };
        match Signature::of(self.case, report) {
            Some(signature) => signature.write(path).map_err(Failure::Input),
            // What broke is said in its place.
            None if partly => Ok(()),
            None => Err(Failure::Input(format!(
                "there is no fault to record: nothing is wrong here\n  where: --record-signature {}\n  do: record where the fault shows; a larger --batch or another --form may be what it needs",
                path.display()
            ))),
        }
    }
}
