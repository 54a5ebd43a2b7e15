/*! `mla-check devices`: which engines this machine can run, and what is missing. */

use super::out::{Failure, Output};
use super::text::{size, wrap};
use clap::Args;
use serde::Serialize;

/// Options of `devices`.
#[derive(Args)]
#[command(after_help = "Example: mla-check devices --format json")]
pub struct DevicesArgs {}

/// Every engine: name, whether this version has it, what it does or what is missing.
const ENGINES: [Engine; 4] = [
    engine("reference", true, "float64 on the processor; the truth that the others are judged by"),
    engine("cpu", true, "a GPU kernel's arithmetic, emulated on the processor"),
    engine("ptx", false, "not part of this version; it comes with a later one"),
    engine(
        "cuda",
        false,
        "not part of this version; it comes with a later one. Whether libcuda.so.1 and NVRTC can be found here was not looked at",
    ),
];

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
    engines: &'static [Engine],
}

/// Runs the command.
pub fn main(_args: &DevicesArgs, out: &mut Output) -> Result<u8, Failure> {
    let report = Report {
        schema: "mla-check.devices",
        version: 1,
        architecture: std::env::consts::ARCH,
        threads: rayon::current_num_threads(),
        instruction_sets: instruction_sets(),
        memory_bytes: memory("MemTotal:"),
        memory_available_bytes: memory("MemAvailable:"),
        engines: &ENGINES,
    };
    if out.json() {
        out.print_json(&report)?;
    } else {
        out.print(&text(&report, out.width().min(80)))?;
    }
    Ok(0)
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
        "engines".into(),
    ];
    lines.extend(
        r.engines
            .iter()
            .map(|e| format!("  {:<11}{:<5}{}", e.name, if e.available { "yes" } else { "no" }, e.what)),
    );
    lines.iter().map(|l| wrap(l, width, if l.starts_with("  ") { 18 } else { 11 }) + "\n").collect()
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
