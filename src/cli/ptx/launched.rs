/*! `ptx --launch`: a case run on the PTX machine, its findings and outputs. */

use crate::cli::out::Failure;
use crate::cli::text::escape;
use crate::device::case::{Case, Ran};
use crate::device::ptx::{Found, PtxMachine};
use crate::device::{Device, Error, Problem};
use crate::nvrtc::Compiled;
use serde::Serialize;
use std::path::Path;

/// A launch and what was found.
#[derive(Serialize)]
pub struct Launched {
    device: String,
    #[serde(flatten)]
    ran: Ran,
    thread_instructions: u64,
    findings: Vec<FindingReport>,
}

#[derive(Serialize)]
struct FindingReport {
    kind: &'static str,
    kernel: String,
    code: String,
    ptx_line: u32,
    source_file: Option<String>,
    source_line: Option<u32>,
    block: [u32; 3],
    warp: u32,
    lanes: u32,
    count: u64,
    detail: String,
}

/// Reads a case.
pub fn read(path: &Path) -> Result<Case, Failure> {
    let place = escape(&path.display().to_string());
    let text = std::fs::read_to_string(path).map_err(|e| {
        Failure::Input(format!(
            "cannot read the case: {e}\n  where: {place}\n  do: give a TOML file that describes a launch; docs/ptx.md has the form"
        ))
    })?;
    let folder = path.parent().unwrap_or(Path::new("."));
    Case::parse(&text, &place, folder).map_err(|e| shown(&e))
}

/// Runs a case.
pub fn run(case: &Case, code: &Compiled) -> Result<Launched, Failure> {
    let mut machine = PtxMachine::new(code.target).map_err(|e| shown(&e))?;
    let module = machine.load(code).map_err(|e| failure(&e))?;
    let ran = case.run(&mut machine, module).map_err(|e| failure(&e))?;
    let findings = machine.take_findings().into_iter().map(finding).collect();
    let thread_instructions = machine.counts().thread_instructions;
    Ok(Launched { device: machine.describe(), ran, thread_instructions, findings })
}

/// Only the machine itself breaks an engine; the rest is in the case or the code.
fn failure(e: &Error) -> Failure {
    match e.problem() {
        Problem::Call { .. } => Failure::Broke(e.to_string()),
        _ => shown(e),
    }
}

/// Errors quote files: their lines stay, what a terminal would obey does not.
fn shown(e: &impl std::fmt::Display) -> Failure {
    Failure::Input(e.to_string().lines().map(escape).collect::<Vec<_>>().join("\n"))
}

fn finding(f: Found) -> FindingReport {
    let Found { code, finding: f } = f;
    // NVRTC puts the folder it runs in before the name of a source that it was given as text.
    let file = f.source_file.rsplit('/').next().unwrap_or_default();
    FindingReport {
        kind: f.kind.name(),
        kernel: f.kernel,
        code,
        ptx_line: f.line,
        source_file: (!file.is_empty()).then(|| file.to_owned()),
        source_line: (f.source_line != 0).then_some(f.source_line),
        block: f.block,
        warp: f.warp,
        lanes: f.lanes,
        count: f.count,
        detail: f.detail,
    }
}

impl Launched {
    /// Whether nothing was found.
    pub fn clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Lines of text.
    pub fn text(&self) -> Vec<String> {
        let Ran { kernel, grid, block, dynamic_shared, outputs } = &self.ran;
        let mut lines = vec![format!(
            "launch of {} on {}: grid {grid:?}, block {block:?}, {dynamic_shared} bytes of dynamic shared memory; {} instructions of threads",
            escape(kernel),
            self.device,
            self.thread_instructions
        )];
        for f in &self.findings {
            // 0 is no line: what was never stored has no instruction.
            let at = match (f.ptx_line, f.source_line, &f.source_file) {
                (0, ..) => String::new(),
                (line, None, _) => format!(", PTX line {line}"),
                (line, Some(source), None) => format!(", PTX line {line}, source line {source}"),
                (line, Some(source), Some(file)) => {
                    format!(", PTX line {line}, source line {source} of {file}")
                }
            };
            let who = match f.ptx_line {
                0 => String::new(),
                _ => format!(
                    ", block {:?}, warp {}, lanes {:#010x}, {} times",
                    f.block, f.warp, f.lanes, f.count
                ),
            };
            let text = format!("finding: {} in {}{at}{who}: {}", f.kind, f.kernel, f.detail);
            lines.push(format!("  {}", escape(&text)));
        }
        lines.push(match self.findings.len() {
            0 => "  no findings".into(),
            n => format!("  {n} findings"),
        });
        for o in outputs {
            let more = if o.is_whole() { "" } else { ", ..." };
            lines.push(format!(
                "  output {}: {} bytes, digest {}: {}{more}",
                escape(&o.name),
                o.bytes,
                o.digest,
                o.first.join(", ")
            ));
        }
        lines
    }
}
