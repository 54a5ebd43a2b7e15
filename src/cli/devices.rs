/*! `mla-check devices`: which engines and GPUs this machine can run, what is missing, and what to install for it. */

mod gpus;

use super::out::{Failure, Output};
use super::text::{size, wrap};
use crate::harness::gate;
use clap::Args;
use gpus::{Compiler, Driver};
use serde::Serialize;

/// Options of `devices`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0; 5 where --gpu or MLA_CHECK_REQUIRE_GPU=1 asks for a GPU that is not there.\n\nExample: mla-check devices --format json"
)]
pub struct DevicesArgs {
    /// Fail unless the GPU of this number, from 0, is there
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
}

/// Every engine: name, whether this version has it, what it does or what is missing.
fn engines(cuda: bool) -> [Engine; 4] {
    [
        engine("reference", true, "float64 on the processor; the truth that the others are judged by"),
        engine("cpu", true, "a GPU kernel's arithmetic, emulated on the processor"),
        engine("ptx", true, "our kernels' PTX on an emulated machine that watches them"),
        engine("cuda", cuda, "our kernels on a GPU; needs driver and NVRTC"),
    ]
}

const fn engine(name: &'static str, available: bool, what: &'static str) -> Engine {
    Engine { name, available, what }
}

#[derive(Serialize)]
struct Engine {
    name: &'static str,
    available: bool,
    what: &'static str,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    version: u32,
    architecture: &'static str,
    threads: usize,
    instruction_sets: Vec<&'static str>,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    driver: Driver,
    nvrtc: Compiler,
    engines: [Engine; 4],
}

/// Runs the command.
pub fn main(args: &DevicesArgs, out: &mut Output) -> Result<u8, Failure> {
    let nvrtc = Compiler::look();
    let driver = Driver::look(&nvrtc);
    let required = gate::is_on(gate::REQUIRE_GPU);
    let asked = args.gpu.or(required.then_some(0));
    let missing = asked.and_then(|ordinal| driver.lacks(ordinal));
    let gpu = nvrtc.is_found() && driver.is_found();
    let report = Report {
        schema: "mla-check.devices",
        version: 2,
        architecture: std::env::consts::ARCH,
        threads: rayon::current_num_threads(),
        instruction_sets: instruction_sets(),
        memory_bytes: memory("MemTotal:"),
        memory_available_bytes: memory("MemAvailable:"),
        driver,
        nvrtc,
        engines: engines(gpu),
    };
    if out.json() {
        out.print_json(&report)?;
    } else if !out.quiet() {
        out.print(&text(&report, out.width().min(80)))?;
    }
    missing.map_or(Ok(0), |e| Err(Failure::Unavailable(e)))
}

fn text(r: &Report, width: usize) -> String {
    let sets = if r.instruction_sets.is_empty() {
        "none of those used".into()
    } else {
        r.instruction_sets.join(" ")
    };
    let memory = match (r.memory_bytes, r.memory_available_bytes) {
        (Some(all), Some(free)) => format!("{}, {} available", size(all), size(free)),
        _ => "unknown".into(),
    };
    let mut lines = vec![
        format!("processor  {}, {} threads, instruction sets: {sets}", r.architecture, r.threads),
        format!("memory     {memory}"),
    ];
    lines.extend(r.driver.text());
    lines.extend(r.nvrtc.text());
    lines.extend(r.driver.gpus_text());
    lines.push("engines".into());
    lines.extend(
        r.engines
            .iter()
            .map(|e| format!("  {:<11}{:<5}{}", e.name, if e.available { "yes" } else { "no" }, e.what)),
    );
    let indent = |l: &str| match () {
        () if l.starts_with("           ") => 11,
        () if l.starts_with("  ") => 18,
        () => 11,
    };
    lines.iter().map(|l| wrap(l, width, indent(l)) + "\n").collect()
}

/// Those that products and decoders have code for.
fn instruction_sets() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let sets = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ];
        sets.into_iter().filter(|s| s.1).map(|s| s.0).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// A figure of Linux's /proc/meminfo, in bytes.
pub(super) fn memory(name: &str) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
