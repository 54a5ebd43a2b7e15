/*!
What the program's kernels take of a multiprocessor: registers, shared memory, spills, and how many blocks fit.

Compiled here for any target, with no GPU: figures are those of the machine code and of the compiler's log.
*/

use crate::device::Limits;
use crate::engine::EngineError;
use crate::engine::kernels::code::{self, options};
use crate::engine::kernels::header::{Entry, Names};
use crate::engine::kernels::library::{File, Library};
use crate::nvrtc::{Nvrtc, Resources, Target};
use mla_numeric::DType;
use rayon::prelude::*;
use serde::Serialize;

/// Widths of heads that files are compiled for, where they depend on any: DeepSeek's and Kimi's, GLM's.
pub const GEOMETRIES: [[(&str, i64); 4]; 2] = [
    [("NOPE", 128), ("ROPE", 64), ("VALUE", 128), ("LATENT", 512)],
    [("NOPE", 192), ("ROPE", 64), ("VALUE", 256), ("LATENT", 512)],
];

/// The widths, and what a block of a target has of shared memory: of an unknown one what all have.
pub fn scalars<'g>(geometry: Names<'g>, target: Target) -> Vec<(&'g str, i64)> {
    let shared = Limits::of(target).map_or(99 * 1024, |l| l.shared_per_block);
    geometry.iter().copied().chain([("SHARED", shared.into())]).collect()
}

/// The targets of the tables.
pub const TARGETS: [Target; 2] = [Target::sm(90), Target::sm(120)];

/// What an entry point takes on a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// Target.
    pub target: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub static_shared: u32,
    /// Bytes of dynamic shared memory of a block; none where a launch decides.
    pub dynamic_shared: Option<u32>,
    /// Bytes of a thread's local memory: spills and arrays.
    pub local: u32,
    /// Bytes of spill stores and loads; none where the compiler's log was not there.
    pub spilled: Option<[u32; 2]>,
    /// Blocks that fit on a multiprocessor; 0: the kernel can't run there. None where a launch or an unknown limit decides.
    pub blocks: Option<u32>,
}

/// An entry point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Kernel file.
    pub file: String,
    /// Entry point.
    pub entry: String,
    /// Dtypes of which all that follows is true.
    pub dtypes: Vec<DType>,
    /// What it is compiled for: `nope192 rope64 value256`; empty where it takes every geometry.
    pub geometry: String,
    /// Threads of a block; none where a launch decides.
    pub threads: Option<u32>,
    /// By target.
    pub targets: Vec<Taken>,
}

/// Compiles every file of libraries, each of a dtype, for every geometry that it depends on. Entries that take the same in
/// several dtypes are one row.
///
/// # Errors
/// What NVRTC says; headers that are wrong: what, where, what to do.
pub fn of(libraries: &[Library], nvrtc: &Nvrtc, targets: &[Target]) -> Result<Vec<Row>, EngineError> {
    let mut jobs: Vec<(&File, Names)> = Vec::new();
    for file in libraries.iter().flat_map(|l| l.files().map(|f| f.1)) {
        let mut known: Vec<String> = Vec::new();
        for geometry in &GEOMETRIES {
            let named = named(file, geometry);
            if !known.contains(&named) {
                known.push(named);
                jobs.push((file, geometry));
            }
        }
    }
    let rows = jobs.par_iter().map(|(file, geometry)| rows(file, geometry, nvrtc, targets));
    Ok(together(rows.collect::<Result<Vec<_>, _>>()?.concat()))
}

/// Rows that differ in their dtype alone as one, where the first of them stands; rows of an entry beside each other.
fn together(rows: Vec<Row>) -> Vec<Row> {
    let mut all: Vec<Row> = Vec::new();
    for row in rows {
        let same = |r: &Row| Row { dtypes: row.dtypes.clone(), ..r.clone() } == row;
        if let Some(known) = all.iter_mut().find(|r| same(r)) {
            known.dtypes.extend(row.dtypes);
            continue;
        }
        let like = |r: &Row| (&r.entry, &r.geometry) == (&row.entry, &row.geometry);
        let at = all.iter().rposition(like).map_or(all.len(), |i| i + 1);
        all.insert(at, row);
    }
    all
}

/// The widths that a file is compiled for.
fn named(file: &File, geometry: Names) -> String {
    let asked = file.header.geometry.iter().filter_map(|n| geometry.iter().find(|(g, _)| g == n));
    asked.map(|(n, v)| format!("{}{v}", n.to_lowercase())).collect::<Vec<_>>().join(" ")
}

fn rows(file: &File, geometry: Names, nvrtc: &Nvrtc, targets: &[Target]) -> Result<Vec<Row>, EngineError> {
    let wrong = |e: String| {
        let name = &file.source.name;
        EngineError::Broke(format!(
            "{e}\n  where: {name}\n  do: correct its header; docs/kernels.md has the fields"
        ))
    };
    let compile = |target: Target| {
        let scalars = scalars(geometry, target);
        let options = options(file, &scalars).map_err(wrong)?;
        match nvrtc.compile(&file.source, code::target(file, target), &options) {
            Ok(code) => Ok((target, scalars, code)),
            Err(e) if e.is_unavailable() => Err(EngineError::Unavailable(e.to_string())),
            Err(e) => Err(EngineError::Broke(e.to_string())),
        }
    };
    let compiled = targets.iter().map(|t| compile(*t)).collect::<Result<Vec<_>, _>>()?;
    let row = |entry: &Entry| {
        let number = |e: &str, all: Names| file.header.value(e, all).ok().and_then(|v| u32::try_from(v).ok());
        let threads = number(&entry.threads, geometry);
        let mut taken = Vec::new();
        for (target, scalars, code) in &compiled {
            let dynamic = entry.shared.as_deref().map_or(Some(0), |e| number(e, scalars));
            let found = code.kernel(&entry.entry);
            let found = found.ok_or_else(|| wrong(format!("the code has no kernel {}", entry.entry)))?;
            taken.push(Taken {
                target: target.to_string(),
                registers: found.registers,
                static_shared: found.static_shared_bytes,
                dynamic_shared: dynamic,
                local: found.frame_bytes,
                spilled: found.spill_store_bytes.zip(found.spill_load_bytes).map(|(s, l)| [s, l]),
                blocks: Limits::of(*target)
                    .zip(threads.zip(dynamic))
                    .map(|(limits, (threads, dynamic))| blocks(&limits, found, threads, dynamic)),
            });
        }
        Ok(Row {
            file: file.source.name.clone(),
            entry: entry.entry.clone(),
            dtypes: vec![file.dtype],
            geometry: named(file, geometry),
            threads,
            targets: taken,
        })
    };
    file.header.kernels.iter().map(row).collect()
}

/// Blocks of a multiprocessor at most, whatever they take (CUDA Programming Guide, "Compute Capabilities", technical
/// specifications).
fn most_blocks(number: u32) -> u32 {
    if matches!(number, 89 | 120 | 121) { 24 } else { 32 }
}

/// Blocks that fit on a multiprocessor at once.
pub fn blocks(limits: &Limits, kernel: &Resources, threads: u32, dynamic_shared: u32) -> u32 {
    if !limits.exceeded(kernel, threads, dynamic_shared).is_empty() {
        return 0;
    }
    let warps = threads.div_ceil(32).max(1);
    // Registers are given to warps 256 at a time, shared memory to blocks 128 bytes at a time.
    let registers = warps * (kernel.registers * 32).next_multiple_of(256);
    let shared = (kernel.static_shared_bytes + dynamic_shared + limits.shared_reserved).next_multiple_of(128);
    let by = [
        limits.threads_per_sm / (warps * 32),
        limits.registers_per_sm / registers.max(1),
        limits.shared_per_sm / shared.max(1),
        most_blocks(limits.number),
    ];
    by.into_iter().min().unwrap_or(0)
}

fn cells(t: &Taken) -> [String; 4] {
    let shared = match (t.static_shared, t.dynamic_shared) {
        (s, Some(d)) => (s + d).to_string(),
        (s, None) => format!("{s} + launch"),
    };
    let spilled = match t.spilled {
        Some([0, 0]) if t.local == 0 => "0".into(),
        Some([stores, loads]) => format!("{stores}/{loads}, frame {}", t.local),
        None if t.local == 0 => "0".into(),
        None => format!("frame {}", t.local),
    };
    [t.registers.to_string(), shared, spilled, t.blocks.map_or("-".into(), |b| b.to_string())]
}

const OF_TARGET: [&str; 4] = ["registers", "shared", "spilled", "blocks"];

fn table(rows: &[Row]) -> (Vec<String>, Vec<Vec<String>>) {
    let mut head: Vec<String> = ["kernel", "dtype", "geometry", "threads"].map(String::from).into();
    if let Some(row) = rows.first() {
        let names = row.targets.iter().flat_map(|t| OF_TARGET.map(|c| format!("{} {c}", t.target)));
        head.extend(names);
    }
    let line = |r: &Row| {
        let threads = r.threads.map_or("-".into(), |t| t.to_string());
        let geometry = if r.geometry.is_empty() { "any".into() } else { r.geometry.clone() };
        let dtypes = r.dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" ");
        [r.entry.clone(), dtypes, geometry, threads]
            .into_iter()
            .chain(r.targets.iter().flat_map(cells))
            .collect()
    };
    (head, rows.iter().map(line).collect())
}

/// For a document.
pub fn markdown(rows: &[Row]) -> String {
    let (head, lines) = table(rows);
    let rule: String = (0..head.len()).map(|c| if c < 3 { "---|" } else { "---:|" }).collect();
    let mut out = format!("| {} |\n|{rule}\n", head.join(" | "));
    lines.iter().for_each(|l| out += &format!("| {} |\n", l.join(" | ")));
    out
}

/// For a terminal.
pub fn terminal(rows: &[Row]) -> String {
    let (head, lines) = table(rows);
    let all: Vec<&Vec<String>> = std::iter::once(&head).chain(&lines).collect();
    let width = |c: usize| all.iter().map(|l| l[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for line in all {
        let cells = line
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(c, (cell, w))| if c < 3 { format!("{cell:<w$}") } else { format!("{cell:>w$}") });
        out += cells.collect::<Vec<_>>().join("  ").trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(registers: u32, shared: u32) -> Resources {
        Resources {
            kernel: "k".into(),
            registers,
            frame_bytes: 0,
            spill_store_bytes: Some(0),
            spill_load_bytes: Some(0),
            static_shared_bytes: shared,
            threads_bound: None,
            parameters: Vec::new(),
            parameter_bytes: 0,
            code_bytes: 0,
        }
    }

    /// By hand, from the limits of the guide's tables.
    #[test]
    fn blocks_are_what_the_scarcest_thing_allows() {
        let (h200, rtx) = (Limits::of(Target::sm(90)).unwrap(), Limits::of(Target::sm(120)).unwrap());
        // 2,048 threads; 65,536 registers; 233,472 bytes, 1,024 of each block's the system's; 32 blocks.
        assert_eq!(blocks(&h200, &kernel(32, 0), 256, 0), 8);
        assert_eq!(blocks(&h200, &kernel(128, 0), 256, 0), 2);
        assert_eq!(blocks(&h200, &kernel(129, 0), 256, 0), 1);
        assert_eq!(blocks(&h200, &kernel(32, 0), 256, 76_000), 3);
        assert_eq!(blocks(&h200, &kernel(32, 0), 256, 115_712), 2);
        assert_eq!(blocks(&h200, &kernel(32, 0), 256, 115_713), 1);
        assert_eq!(blocks(&h200, &kernel(32, 0), 32, 0), 32);
        assert_eq!(blocks(&rtx, &kernel(32, 0), 32, 0), 24);
        assert_eq!(blocks(&rtx, &kernel(32, 0), 256, 0), 6);
        assert_eq!(blocks(&rtx, &kernel(32, 0), 256, 101_377), 0);
    }

    #[test]
    fn spills_are_shown_whatever_says_so() {
        let taken = |local, spilled| Taken {
            target: "sm_90".into(),
            registers: 40,
            static_shared: 16,
            dynamic_shared: Some(1024),
            local,
            spilled,
            blocks: Some(2),
        };
        assert_eq!(cells(&taken(0, Some([0, 0]))), ["40", "1040", "0", "2"]);
        assert_eq!(cells(&taken(8, Some([4, 12])))[2], "4/12, frame 8");
        assert_eq!(cells(&taken(8, None))[2], "frame 8");
        let row = Row {
            file: "f.cu".into(),
            entry: "f".into(),
            dtypes: vec![DType::Bf16],
            geometry: String::new(),
            threads: None,
            targets: vec![Taken { dynamic_shared: None, blocks: None, ..taken(0, None) }],
        };
        // What takes the same is one row; what does not stands beside it.
        let other = Row { dtypes: vec![DType::F16], ..row.clone() };
        let wide = Row { dtypes: vec![DType::F32], threads: Some(64), ..row.clone() };
        let next = Row { entry: "g".into(), ..row.clone() };
        let rows = together(vec![row, next, other, wide]);
        let names: Vec<(&str, usize)> = rows.iter().map(|r| (r.entry.as_str(), r.dtypes.len())).collect();
        assert_eq!(names, [("f", 2), ("f", 1), ("g", 1)]);
        let text = markdown(&rows[..1]);
        assert_eq!(
            text.lines().last(),
            Some("| f | bf16 f16 | any | - | 40 | 16 + launch | 0 | - |"),
            "{text}"
        );
        assert!(
            text.starts_with("| kernel | dtype | geometry | threads | sm_90 registers | sm_90 shared |"),
            "{text}"
        );
    }
}
