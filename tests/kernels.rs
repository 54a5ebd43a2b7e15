/*!
The program's kernels: committed PTX belongs to its source, they compile for every target without spills, and broken copies of
them are found on the PTX machine where they are broken. That they are clean themselves: `tests/harness.rs`.

What needs NVRTC is skipped by name where `MLA_CHECK_NVRTC` is not set, and fails with `MLA_CHECK_REQUIRE_NVRTC=1`.
To write committed PTX anew: set both it and `MLA_CHECK_WRITE_PTX=1`, and run `cargo test --test kernels committed`; the table in
docs/kernels.md likewise with `MLA_CHECK_WRITE_DOCS=1` and `cargo test --test kernels documented`.
*/

#[path = "common/nvrtc.rs"]
mod environment;
#[path = "common/planted.rs"]
mod planted;
#[path = "common/strided.rs"]
mod strided;

use environment::nvrtc;
use mla_check::bench::resources::{self, GEOMETRIES, TARGETS};
use mla_check::check::EngineKind;
use mla_check::device::Limits;
use mla_check::device::ptx::PtxMachine;
use mla_check::engine::kernels::code::{COMMITTED, committed_name, options, target as target_of};
use mla_check::engine::kernels::library::{File, Library};
use mla_check::judge::Verdict;
use mla_check::nvrtc::stamp::{self, Stamp};
use mla_check::nvrtc::{PINNED, Target};
use mla_numeric::DType;
use mla_reference::Form;
use planted::{Change, FILES, PLANTED, altered, altered_in, clean, first, found, report};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

const TARGET: Target = Target::compute(120);
const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
/// A kernel file and the scalars that it is compiled for.
type Compilation<'l> = (&'l File, Vec<(&'static str, i64)>);

/// Every kernel file for every geometry that it depends on, by the name of its committed PTX.
fn compilations(library: &Library) -> BTreeMap<String, Compilation<'_>> {
    let all = GEOMETRIES.iter().map(|g| resources::scalars(g, TARGET));
    let of = |file| all.clone().map(move |g| (committed_name(file, &g, TARGET), (file, g)));
    library.files().flat_map(|(_, file)| of(file)).collect()
}

#[test]
fn committed_ptx_belongs_to_its_sources_and_the_compiler_gives_it_again() {
    let library = Library::built_in().unwrap();
    let all = compilations(&library);
    let write = std::env::var_os("MLA_CHECK_WRITE_PTX").is_some_and(|v| v == "1");
    let compiler = nvrtc("committed_ptx_belongs_to_its_sources_and_the_compiler_gives_it_again (compiling)");
    for (name, (file, geometry)) in &all {
        let (options, target) = (options(file, geometry).unwrap(), target_of(file, TARGET));
        let stamp = Stamp::of(&file.source, target, &options, PINNED);
        let again = compiler.as_ref().map(|n| n.compile(&file.source, target, &options).unwrap().ptx);
        if let (true, Some(ptx)) = (write, &again) {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx").join(name);
            std::fs::write(path, stamp.head(ptx)).unwrap();
            continue;
        }
        let text = COMMITTED.iter().find(|(n, _)| n == name);
        let text = text.unwrap_or_else(|| panic!("{name} is not committed")).1;
        let ptx = stamp.check(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(!ptx.lines().any(|l| l.trim_start().starts_with(".file") && l.contains('/')), "{name}");
        if let Some(again) = &again {
            stamp::same_code(again, ptx).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
    assert!(write || COMMITTED.len() == all.len());
}

/// Bytes of local memory that a kernel may use: none, but where it was measured to be the faster way. The roles of 64 rows
/// share all registers of a multiprocessor (200 and 152 of each thread) and lack ten; heads of 192 and 128 lack two.
fn spill(entry: &str, target: Target) -> u32 {
    match (entry, target.number) {
        ("absorbed_64" | "absorbed_part_64", _) => 136,
        ("fused" | "fused_part", 90) => 8,
        _ => 0,
    }
}

/// Hardly any spills, no block beyond the target's limits, no word of complaint.
#[test]
fn every_kernel_compiles_for_every_target_within_its_limits() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_for_every_target_within_its_limits") else { return };
    let targets = ["sm_90", "sm_100", "sm_103", "sm_120", "sm_121"].map(|t| t.parse::<Target>().unwrap());
    let libraries = DTYPES.map(|d| Library::built_in_for(d).unwrap());
    let all: Vec<_> = libraries.iter().flat_map(compilations).map(|(_, c)| c).collect();
    // The other dtypes on two of them: it takes time, and what differs is the type of an operand.
    let of = |c: &Compilation, t: &Target| c.0.dtype == DType::Bf16 || [90, 120].contains(&t.number);
    let jobs: Vec<_> =
        all.iter().flat_map(|c| targets.iter().map(move |t| (c, *t))).filter(|(c, t)| of(c, t)).collect();
    jobs.par_iter().for_each(|((file, geometry), target)| {
        let target = &target_of(file, *target);
        let limits = Limits::of(*target).unwrap();
        let geometry = resources::scalars(&geometry[..geometry.len() - 1], *target);
        let code = nvrtc.compile(&file.source, *target, &options(file, &geometry).unwrap()).unwrap();
        assert_eq!(code.diagnostics(), "", "{} {target}", file.source.name);
        for k in &file.header.kernels {
            let place = format!("{} for {target} in {}", k.entry, file.dtype);
            let found = code.kernel(&k.entry).unwrap_or_else(|| panic!("{place} is missing"));
            let local = found.frame_bytes.max(found.spill_store_bytes.unwrap_or(u32::MAX));
            assert!(local <= spill(&k.entry, *target), "{place}: {local} bytes of local memory");
            let number = |e: &str| file.header.value(e, &geometry).unwrap() as u32;
            let shared = k.shared.as_deref().map_or(0, number);
            let exceeded = limits.exceeded(found, number(&k.threads), shared);
            assert!(exceeded.is_empty(), "{place}: {exceeded:?}");
        }
    });
}

/// Between these lines of docs/kernels.md stands what `mla-check bench --resources --markdown` prints.
const TABLE: [&str; 2] = ["<!-- resources -->\n", "<!-- end of resources -->\n"];

#[test]
fn documented_resources_are_what_the_command_writes() {
    let Some(nvrtc) = nvrtc("documented_resources_are_what_the_command_writes") else { return };
    let libraries = DTYPES.map(|d| Library::built_in_for(d).unwrap());
    let rows = resources::of(&libraries, &nvrtc, &TARGETS).unwrap();
    let table = resources::markdown(&rows);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/kernels.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(TABLE[0]).unwrap();
    let (found, after) = rest.split_once(TABLE[1]).unwrap();
    if std::env::var_os("MLA_CHECK_WRITE_DOCS").is_some_and(|v| v == "1") {
        std::fs::write(&path, [before, TABLE[0], &table, TABLE[1], after].concat()).unwrap();
        return;
    }
    // Another compiler gives other figures: the text names the pinned one.
    assert_eq!(nvrtc.version(), PINNED);
    let apart = found.lines().zip(table.lines()).find(|(a, b)| a != b);
    assert!(found == table, "docs/kernels.md is not what the command writes: {apart:?}");
}

#[test]
fn kernels_with_other_tiles_are_clean_under_the_contract_of_their_header() {
    let changes = [
        ("fused.cu", "BN = 64 ", "BN = 32 "),
        ("fused.cu", "BM = 128 ", "BM = 64 "),
        ("product.cu", "BM = 128 ", "BM = 64 "),
        ("norm.cu", "THREADS = 256", "THREADS = 64"),
    ];
    let Some(_) = nvrtc("kernels_with_other_tiles_are_clean_under_the_contract_of_their_header") else {
        return;
    };
    let report = altered(EngineKind::Ptx, Form::Fused, &changes);
    assert_eq!(report.contract.softmax.tile, 32);
    clean(&report);
}

#[test]
fn broken_kernels_are_found_where_they_are_broken() {
    // Another text has no committed PTX.
    let Some(_) = nvrtc("broken_kernels_are_found_where_they_are_broken") else { return };
    PLANTED.par_iter().for_each(|planted| found(EngineKind::Ptx, planted));
}

#[test]
fn rows_that_do_not_lie_together_give_the_same_bits() {
    strided::attention(&mut PtxMachine::new(TARGET).unwrap());
}

/// Both forms, in parts and not, with a page's end and keys of several tiles.
#[test]
fn kernels_are_clean_in_other_dtypes() {
    let Some(_) = nvrtc("kernels_are_clean_in_other_dtypes") else { return };
    [DType::F16, DType::F32].par_iter().for_each(|dtype| {
        let report = report(EngineKind::Ptx, FILES[1], |o| {
            (o.dtype, o.splits) = (*dtype, Some(2));
            o.batch = "0+5,70+1".parse().unwrap();
        });
        let c = &report.contract;
        assert_eq!((c.weights, c.activations, c.partials), (*dtype, *dtype, DType::F32));
        assert_eq!(c.softmax.p, (*dtype == DType::F16).then_some(DType::F16));
        clean(&report);
    });
}

/// What rounds to another dtype, or as no contract says, is found where it does.
#[test]
fn kernels_that_round_otherwise_are_found() {
    let Some(_) = nvrtc("kernels_that_round_otherwise_are_found") else { return };
    let norm = "y[i] = narrow(widen(x[i]) * scale * p.gamma[i]);";
    let cut =
        "y[i] = narrow(__uint_as_float(__float_as_uint(widen(x[i]) * scale * p.gamma[i]) & 0xffff0000u));";
    let planted: [(DType, Form, Change, &str); 5] = [
        (DType::F16, Form::Absorbed, ("norm.cu", norm, cut), "attn_in"),
        (DType::F32, Form::Absorbed, ("norm.cu", norm, cut), "attn_in"),
        (
            DType::F16,
            Form::Fused,
            (
                "product.cu",
                "pack(sum[m][n][2 * e], sum[m][n][2 * e + 1])",
                "pack(sum[m][n][2 * e] * 1.001f, sum[m][n][2 * e + 1])",
            ),
            "q_a",
        ),
        (
            DType::F32,
            Form::Fused,
            (
                "product_f32.cu",
                "+ col] = sum[m][n];",
                "+ col] = __uint_as_float(__float_as_uint(sum[m][n]) & 0xffffe000u);",
            ),
            "q_a",
        ),
        (
            DType::F32,
            Form::Absorbed,
            ("absorbed_f32.cu", "rows.score<ROPE>(rope, memory + lane * PITCH + LATENT);", ""),
            "part_o",
        ),
    ];
    planted.par_iter().for_each(|(dtype, form, change, tensor)| {
        let report = altered_in(EngineKind::Ptx, *dtype, &[*form], &[*change]);
        assert_eq!(&first(&report).0, tensor, "{dtype} {change:?}");
    });
}

/// Both in one run, each under the tile that its own file declares: a wrong one accuses that form and no other.
#[test]
fn each_form_is_judged_by_its_own_tile() {
    let Some(_) = nvrtc("each_form_is_judged_by_its_own_tile") else { return };
    let wrong = ("absorbed.cu", "softmax = { tile = \"BN\"", "softmax = { tile = 16");
    let right = ("absorbed.cu", "BN = 32  ", "BN = 32   ");
    for (change, tile) in [(right, 32), (wrong, 16)] {
        let report = altered_in(EngineKind::Ptx, DType::Bf16, &Form::ALL, &[change]);
        let tiles = Form::ALL.map(|f| report.contract.of_form(Some(f)).softmax.tile);
        assert_eq!(tiles, [64, tile]);
        let odd = |f: Form| report.tensors.iter().any(|u| u.form == Some(f) && u.verdict > Verdict::Rounding);
        assert_eq!(Form::ALL.map(odd), [false, tile == 16], "{:?}", report.verdict);
    }
}

/// What no value shows: the wait for copies is gone.
#[test]
fn a_missing_wait_is_found_by_the_machine() {
    let Some(_) = nvrtc("a_missing_wait_is_found_by_the_machine") else { return };
    let report = altered(EngineKind::Ptx, Form::Fused, &[("fused.cu", "        wait<0>();\n", "")]);
    let (tensor, evidence) = first(&report);
    assert!(["part_o", "attn_out"].contains(&tensor.as_str()), "{tensor}");
    assert!(evidence.contains("fused.cu"), "{evidence}");
}
