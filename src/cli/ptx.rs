/*!
`mla-check ptx`: a kernel file compiled for a target without a GPU, and what its kernels take of the target's limits; its
PTX, or a PTX file, as the PTX machine reads it; and one launch on that machine.
*/

mod launched;
mod look;

use super::out::{Failure, Output};
use super::text::{escape, size, wrap};
use crate::device::Limits;
use crate::device::case::Case;
use crate::engine::kernels::header::Header;
use crate::nvrtc::{
    Compiled, Error, Kind, Nvrtc, Options, Problem, Resources, Search, Source, Target, includes,
};
use clap::Args;
use launched::Launched;
use look::Look;
use mla_ptx::Module;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Options of `ptx`.
#[derive(Args)]
#[command(
    after_help = "CUDA C++ needs NVRTC, NVIDIA's compiler library: pip install 'nvidia-cuda-nvrtc==13.0.*'. PTX needs nothing, and neither needs a GPU.\n\nExit codes: 0 clean; 1 a PTX file has an instruction that the PTX machine does not run, or --launch found something; 2 unreadable file or case, or a launch that can't be made.\n\nExample: mla-check ptx kernels/attention.cu --target sm_120\nExample: mla-check ptx attention.ptx --launch case.toml"
)]
pub struct PtxArgs {
    /// Kernel file: CUDA C++, or PTX where its name ends in .ptx
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Architecture to compile for: sm_120 (the default), sm_90a, or compute_120 for PTX only; repeatable
    #[arg(long = "target", value_name = "TARGET")]
    targets: Vec<Target>,
    /// A macro
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = definition)]
    defines: Vec<(String, String)>,
    /// Most registers of a thread, where the kernel has no launch bounds
    #[arg(long, value_name = "N")]
    max_registers: Option<u32>,
    /// Let the compiler fuse products and sums on its own
    #[arg(long)]
    fmad: bool,
    /// Write the PTX of the (only) target to a file
    #[arg(long, value_name = "OUT.ptx")]
    save: Option<PathBuf>,
    /// NVRTC: libnvrtc.so or its folder, instead of MLA_CHECK_NVRTC
    #[arg(long, value_name = "PATH")]
    nvrtc: Option<PathBuf>,
    /// Run one launch on the PTX machine; docs/ptx.md has the file's form
    #[arg(long, value_name = "CASE.toml")]
    launch: Option<PathBuf>,
}

fn definition(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').unwrap_or((text, "1"));
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    let rest = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.starts_with(first) && name.chars().all(rest) {
        Ok((name.into(), value.into()))
    } else {
        Err(format!("{name:?} is no name of a macro"))
    }
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    version: &'static str,
    file: String,
    nvrtc: Option<String>,
    library: Option<String>,
    warnings: Vec<String>,
    targets: Vec<TargetReport>,
}

#[derive(Serialize)]
struct TargetReport {
    target: String,
    ptx_bytes: usize,
    cubin_bytes: Option<usize>,
    limits: Option<Limits>,
    kernels: Vec<Resources>,
    diagnostics: String,
    notices: Vec<String>,
    ptx: Look,
    launch: Option<Launched>,
}

/// Runs the command.
pub fn main(args: &PtxArgs, out: &mut Output) -> Result<u8, Failure> {
    let is_ptx = args.file.extension().is_some_and(|e| e.eq_ignore_ascii_case("ptx"));
    let report = if is_ptx { of_ptx(args)? } else { of_source(args, out)? };
    // Of a source file the question is what it compiles to: that the machine can't run all of it is only said.
    let asked = is_ptx || args.launch.is_some();
    let clean = report
        .targets
        .iter()
        .all(|t| (!asked || t.ptx.runs()) && t.launch.as_ref().is_none_or(Launched::clean));
    if out.json() {
        out.print_json(&report)?;
    } else {
        for warning in &report.warnings {
            out.warn(warning);
        }
        if !out.quiet() {
            out.print(&text(&report, out.width()))?;
        }
    }
    Ok(u8::from(!clean))
}

fn of_ptx(args: &PtxArgs) -> Result<Report, Failure> {
    let compiles = !args.targets.is_empty()
        || !args.defines.is_empty()
        || args.max_registers.is_some()
        || args.fmad
        || args.save.is_some()
        || args.nvrtc.is_some();
    if compiles {
        return Err(Failure::Input(
            "a PTX file is not compiled\n  where: --target, -D, --max-registers, --fmad, --save or --nvrtc\n  do: leave them out, or give the CUDA C++ file"
                .into(),
        ));
    }
    let case = args.launch.as_deref().map(launched::read).transpose()?;
    let source = read(&args.file)?;
    let unread = |what: String| {
        let place = escape(&args.file.display().to_string());
        Failure::Input(shown(&format!(
            "{what}\n  where: {place}\n  do: give PTX text as NVRTC or nvcc -ptx writes it"
        )))
    };
    let module = Module::parse_partly(&source.text).map_err(|e| unread(e.to_string()))?;
    // `sm_90a, debug`: the architecture is the first.
    let named = module.target().split([',', ' ']).next().unwrap_or_default();
    let target = named.parse::<Target>().map_err(|e| unread(format!("its .target: {e}")))?;
    let code = Compiled::of_ptx(source.name, Target { kind: Kind::Virtual, ..target }, source.text);
    Ok(Report {
        schema: "mla-check.ptx/1",
        version: env!("CARGO_PKG_VERSION"),
        file: args.file.display().to_string(),
        nvrtc: None,
        library: None,
        warnings: Vec::new(),
        targets: vec![of_target(&code, case.as_ref())?],
    })
}

fn of_source(args: &PtxArgs, out: &mut Output) -> Result<Report, Failure> {
    let default = [Target::sm(120)];
    let targets = if args.targets.is_empty() { &default[..] } else { &args.targets };
    let one = [(args.save.is_some(), "--save writes one file"), (args.launch.is_some(), "--launch runs one")];
    if let Some((_, what)) = one.iter().find(|(given, _)| *given && targets.len() > 1) {
        return Err(Failure::Input(format!(
            "{what}, but there are {} targets\n  where: --target\n  do: name one target, or run once for each",
            targets.len()
        )));
    }
    let case = args.launch.as_deref().map(launched::read).transpose()?;
    let source = read(&args.file)?;
    let mut search = Search::from_environment();
    search.named = args.nvrtc.clone().or(search.named);
    let nvrtc = Nvrtc::find(&search).map_err(|e| match e.is_unavailable() {
        true => Failure::Unavailable(e.to_string()),
        false => Failure::input(e),
    })?;
    let options = Options {
        defines: defines(&source, &args.defines)?,
        fmad: args.fmad,
        max_registers: args.max_registers,
        // Findings name source lines by them.
        line_info: args.launch.is_some(),
        ..Options::default()
    };
    let bar = out.progress(0);
    bar.set_message(format!("compiling {}", source.name));
    let compiled: Result<Vec<Compiled>, Error> =
        nvrtc.compile_all(&source, targets, &options).into_iter().collect();
    bar.finish_and_clear();
    let compiled = compiled.map_err(|e| match e.problem() {
        Problem::Code { .. } => Failure::Broke(shown(&e.to_string())),
        _ if e.is_unavailable() => Failure::Unavailable(shown(&e.to_string())),
        _ => Failure::Input(shown(&e.to_string())),
    })?;
    if let (Some(path), [code]) = (&args.save, &compiled[..]) {
        save(path, &code.ptx)?;
    }
    Ok(Report {
        schema: "mla-check.ptx/1",
        version: env!("CARGO_PKG_VERSION"),
        file: args.file.display().to_string(),
        nvrtc: Some(nvrtc.version().to_string()),
        library: Some(nvrtc.place().into()),
        warnings: nvrtc.notice().iter().map(ToString::to_string).collect(),
        targets: compiled.iter().map(|c| of_target(c, case.as_ref())).collect::<Result<_, _>>()?,
    })
}

fn read(path: &Path) -> Result<Source, Failure> {
    let fail = |what: String| {
        Failure::Input(format!(
            "{what}\n  where: {}\n  do: give a kernel file, CUDA C++ or PTX, in UTF-8",
            escape(&path.display().to_string())
        ))
    };
    let bytes = std::fs::read(path).map_err(|e| fail(format!("cannot read the file: {e}")))?;
    let text = String::from_utf8(bytes)
        .map_err(|e| fail(format!("the file is not UTF-8 from byte {} on", e.utf8_error().valid_up_to())))?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let mut source = Source::new(name, text);
    // What it includes and lies beside it; of the rest the compiler says that it is missing.
    let mut open = includes(&source.text);
    while let Some(include) = open.pop() {
        let beside = path.with_file_name(&include);
        if let (false, Ok(text)) =
            (source.headers.iter().any(|h| h.0 == include), std::fs::read_to_string(beside))
        {
            open.extend(includes(&text));
            source = source.header(include, text);
        }
    }
    Ok(source)
}

/// Macros of the command line, and those that the file's own header has tile sizes for.
fn defines(source: &Source, given: &[(String, String)]) -> Result<Vec<(String, String)>, Failure> {
    let mut all = given.to_vec();
    if !source.text.trim_start().starts_with("/*---") {
        return Ok(all);
    }
    let known = |all: &[(String, String)], name: &String| all.iter().any(|(n, _)| n == name);
    let input = |what: String, fix: &str| {
        Failure::Input(format!("{what}\n  where: {}\n  do: {fix}", escape(&source.name)))
    };
    let header = Header::of(&source.text)
        .map_err(|e| input(e, "correct its header; docs/kernels.md has the fields"))?;
    for (name, value) in header.tile.iter().filter(|(n, _)| !known(given, n)) {
        all.push((name.clone(), value.to_string()));
    }
    let missing: Vec<String> =
        header.geometry.iter().filter(|n| !known(given, n)).map(|n| format!("-D{n}=…")).collect();
    if !missing.is_empty() {
        let fix = format!("pass {}, the layer's figures (inspect shows them)", missing.join(" "));
        return Err(input("its header asks for scalars of a layer".into(), &fix));
    }
    Ok(all)
}

fn save(path: &Path, ptx: &str) -> Result<(), Failure> {
    std::fs::write(path, ptx).map_err(|e| {
        Failure::Input(format!(
            "cannot write the PTX: {e}\n  where: {}\n  do: check that the folder exists and may be written to",
            escape(&path.display().to_string())
        ))
    })
}

fn of_target(code: &Compiled, case: Option<&Case>) -> Result<TargetReport, Failure> {
    let ptx = match Module::parse_partly(&code.ptx) {
        Ok(module) => Look::of(&module),
        Err(e) => Look::unread(e),
    };
    let launch = case.map(|case| launched::run(case, code)).transpose()?;
    // That of the version is said once, for all.
    let notices =
        code.notices.iter().filter(|n| Some(*n) != crate::nvrtc::Notice::of_version(code.version).as_ref());
    Ok(TargetReport {
        target: code.target.to_string(),
        ptx_bytes: code.ptx.len(),
        cubin_bytes: code.cubin.as_ref().map(Vec::len),
        limits: Limits::of(code.target),
        kernels: code.kernels.clone(),
        diagnostics: code.diagnostics(),
        notices: notices.map(ToString::to_string).collect(),
        ptx,
        launch,
    })
}

fn text(r: &Report, width: usize) -> String {
    let mut lines = vec![match (&r.nvrtc, &r.library) {
        (Some(version), Some(library)) => {
            format!("{}  NVRTC {version}, {}", escape(&r.file), escape(library))
        }
        _ => escape(&r.file),
    }];
    for t in &r.targets {
        lines.push(String::new());
        lines.push(match t.cubin_bytes {
            Some(bytes) => {
                format!("{}  machine code {}, PTX {}", t.target, size(bytes as u64), size(t.ptx_bytes as u64))
            }
            None => {
                format!("{}  PTX {}, no machine code and so no figures", t.target, size(t.ptx_bytes as u64))
            }
        });
        match &t.limits {
            Some(l) => lines.push(format!(
                "  allowed: {} threads and {} bytes of shared memory a block, {} registers a thread, {} a block",
                l.threads_per_block, l.shared_per_block, l.registers_per_thread, l.registers_per_sm
            )),
            None => lines.push("  this target's limits are not known here".into()),
        }
        let name = t.kernels.iter().map(|k| k.kernel.chars().count()).max().unwrap_or(0).clamp(6, 40);
        if !t.kernels.is_empty() {
            lines.push(format!(
                "  {:<name$}  {:>9}  {:>6}  {:>13}  {:>13}  {:>12}  {:>12}",
                "kernel",
                "registers",
                "stack",
                "spilled st/ld",
                "static shared",
                "dynamic left",
                "most threads"
            ));
        }
        lines.extend(t.kernels.iter().map(|k| row(k, name, t.limits.as_ref())));
        lines.extend(t.notices.iter().map(|n| format!("  note: {n}")));
        if !t.diagnostics.is_empty() {
            lines.push("  compiler:".into());
            lines.extend(t.diagnostics.lines().map(|l| format!("    {}", escape(l))));
        }
        lines.extend(t.ptx.text());
        if let Some(launch) = &t.launch {
            lines.push(String::new());
            lines.extend(launch.text());
        }
    }
    lines.iter().map(|l| wrap(l, width.max(100), 4) + "\n").collect()
}

/// A kernel's figures, what is left of a block's shared memory, and how many threads a block of it may have: by its launch
/// bounds, and by its registers.
fn row(k: &Resources, name: usize, limits: Option<&Limits>) -> String {
    let spilled = match (k.spill_store_bytes, k.spill_load_bytes) {
        (Some(stores), Some(loads)) => format!("{stores}/{loads}"),
        _ => "unknown".into(),
    };
    let known = |figure: Option<u32>| figure.map_or("unknown".into(), |n| n.to_string());
    let threads = known(limits.map(|l| most_threads(k, l)));
    let left = known(limits.map(|l| l.shared_per_block.saturating_sub(k.static_shared_bytes)));
    format!(
        "  {:<name$}  {:>9}  {:>6}  {spilled:>13}  {:>13}  {left:>12}  {threads:>12}",
        escape(&k.kernel),
        k.registers,
        k.frame_bytes,
        k.static_shared_bytes
    )
}

/// Whole warps within the limits; 0 where not even one is.
fn most_threads(k: &Resources, l: &Limits) -> u32 {
    let most = k.threads_bound.unwrap_or(l.threads_per_block);
    (1..=l.threads_per_block / 32)
        .rev()
        .map(|warps| (warps * 32).min(most))
        .find(|&threads| l.exceeded(k, threads, 0).is_empty())
        .unwrap_or(0)
}

/// A compiler's message quotes the source: its lines stay, what a terminal would obey does not.
fn shown(text: &str) -> String {
    text.lines().map(escape).collect::<Vec<_>>().join("\n")
}
