/*!
The program's kernels: committed PTX belongs to its source, they compile for every target without spills, and the engine
that runs them on the PTX machine is judged clean, while broken copies of them are found where they are broken.

What needs NVRTC is skipped by name where `MLA_CHECK_NVRTC` is not set, and fails with `MLA_CHECK_REQUIRE_NVRTC=1`.
To write committed PTX anew: set both it and `MLA_CHECK_WRITE_PTX=1`, and run `cargo test --test kernels committed`.
*/

#[path = "common/compiler.rs"]
mod compiler;

use compiler::nvrtc;
use mla_check::check::{self, EngineKind, Options};
use mla_check::device::Limits;
use mla_check::engine::kernels::code::{COMMITTED, committed_name, options};
use mla_check::engine::kernels::library::{File, Library};
use mla_check::judge::{Verdict, origins};
use mla_check::model::Model;
use mla_check::nvrtc::stamp::{self, Stamp};
use mla_check::nvrtc::{PINNED, Target};
use mla_check::report::LayerReport;
use mla_reference::{Form, Regime};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

const TARGET: Target = Target::compute(120);
/// Heads of DeepSeek and of GLM-5: what PTX is committed for.
const GEOMETRIES: [[(&str, i64); 4]; 2] = [
    [("NOPE", 128), ("ROPE", 64), ("VALUE", 128), ("LATENT", 512)],
    [("NOPE", 192), ("ROPE", 64), ("VALUE", 256), ("LATENT", 512)],
];
const FILES: [&str; 2] = ["dsv3.Q4_K_M-00001-of-00003.gguf", "glm5dims.Q4_K_M.gguf"];

/// Every kernel file for every geometry that it depends on, by the name of its committed PTX.
fn compilations(library: &Library) -> BTreeMap<String, (&File, &'static [(&'static str, i64)])> {
    let of = |file| GEOMETRIES.iter().map(move |g| (committed_name(file, g, TARGET), (file, g.as_slice())));
    library.files().flat_map(|(_, file)| of(file)).collect()
}

#[test]
fn committed_ptx_belongs_to_its_sources_and_the_compiler_gives_it_again() {
    let library = Library::built_in().unwrap();
    let all = compilations(&library);
    let write = std::env::var_os("MLA_CHECK_WRITE_PTX").is_some_and(|v| v == "1");
    let compiler = nvrtc("committed_ptx_belongs_to_its_sources_and_the_compiler_gives_it_again (compiling)");
    for (name, (file, geometry)) in &all {
        let options = options(file, geometry).unwrap();
        let stamp = Stamp::of(&file.source, TARGET, &options, PINNED);
        let again = compiler.as_ref().map(|n| n.compile(&file.source, TARGET, &options).unwrap().ptx);
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

/// No spills, no local memory, no block beyond the target's limits, no word of complaint.
#[test]
fn every_kernel_compiles_for_every_target_within_its_limits() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles_for_every_target_within_its_limits") else { return };
    let targets = ["sm_90", "sm_100", "sm_103", "sm_120", "sm_121"].map(|t| t.parse::<Target>().unwrap());
    let library = Library::built_in().unwrap();
    let all = compilations(&library);
    let jobs: Vec<_> = all.values().flat_map(|c| targets.iter().map(move |t| (c, *t))).collect();
    jobs.par_iter().for_each(|((file, geometry), target)| {
        let code = nvrtc.compile(&file.source, *target, &options(file, geometry).unwrap()).unwrap();
        assert_eq!(code.diagnostics(), "", "{} {target}", file.source.name);
        let limits = Limits::of(*target).unwrap();
        for k in &file.header.kernels {
            let place = format!("{} for {target}", k.entry);
            let found = code.kernel(&k.entry).unwrap_or_else(|| panic!("{place} is missing"));
            let local = (found.frame_bytes, found.spill_store_bytes, found.spill_load_bytes);
            assert_eq!(local, (0, Some(0), Some(0)), "{place}");
            let number = |e: &str| file.header.value(e, geometry).unwrap() as u32;
            let shared = k.shared.as_deref().map_or(0, number);
            let exceeded = limits.exceeded(found, number(&k.threads), shared);
            assert!(exceeded.is_empty(), "{place}: {exceeded:?}");
        }
    });
}

fn run(file: usize, change: impl FnOnce(&mut Options)) -> LayerReport {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(FILES[file]);
    let model = Model::open(&path).unwrap();
    let mut options = Options { engine: EngineKind::Ptx, ..Options::default() };
    change(&mut options);
    check::layer(&model, 0, &options, &|_| ()).unwrap_or_else(|e| panic!("{e}"))
}

fn clean(report: &LayerReport) {
    let worst: Vec<_> = origins(&report.tensors).map(|u| (u.title(), &u.evidence)).collect();
    let good = matches!(report.verdict, Verdict::Rounding | Verdict::Exact);
    assert!(good, "{:?} {worst:?} {:?}", report.verdict, report.probes);
}

#[test]
fn deepseek_v3_heads_are_clean_on_the_ptx_machine() {
    clean(&run(0, |_| ()));
}

#[test]
fn glm_5_heads_are_clean_on_the_ptx_machine() {
    clean(&run(1, |_| ()));
}

/// What a small run says of a copy of some kernel files with texts replaced: (file, from, to).
fn altered(form: Form, changes: &[(&str, &str, &str)]) -> Option<LayerReport> {
    // Another text has no committed PTX.
    nvrtc("a kernel that is altered")?;
    let folder = tempfile::tempdir().unwrap();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for (name, from, to) in changes {
        let path = folder.path().join(name);
        let text =
            std::fs::read_to_string(&path).or_else(|_| std::fs::read_to_string(own.join(name))).unwrap();
        assert!(text.contains(from), "{name} has no {from:?}");
        std::fs::write(path, text.replacen(from, to, 1)).unwrap();
    }
    Some(run(0, |o| {
        o.kernels = Some(folder.path().into());
        o.forms = vec![form];
        o.regimes = vec![Regime::Random];
        o.batch = "0+37,200+1,70+3".parse().unwrap();
    }))
}

/// The first unit that is at fault, and what is said of it.
fn first(report: &LayerReport) -> (String, String) {
    let unit = origins(&report.tensors).next().expect("nothing was found");
    (unit.tensor.to_string(), unit.evidence.join("; "))
}

#[test]
fn kernels_with_other_tiles_are_clean_under_the_contract_of_their_header() {
    let changes = [
        ("fused.cu", "BN = 32 ", "BN = 64 "),
        ("fused.cu", "WARPS = 8 ", "WARPS = 4 "),
        ("product.cu", "BM = 128 ", "BM = 64 "),
        ("norm.cu", "THREADS = 256", "THREADS = 64"),
    ];
    let Some(report) = altered(Form::Fused, &changes) else { return };
    assert_eq!(report.contract.softmax.tile, 64);
    clean(&report);
}

/// The founding fault: the result goes to another buffer than the one that is read.
#[test]
fn a_phantom_buffer_is_found_in_the_tensor_that_nobody_wrote() {
    let to = "__device__ u16 phantom[1 << 20];\ntemplate <int ROWS, class Out>";
    let changes = [
        ("absorbed.cu", "template <int ROWS, class Out>", to),
        ("absorbed.cu", "Out* to = (Out*)p.o +", "Out* to = (Out*)phantom +"),
    ];
    let Some(report) = altered(Form::Absorbed, &changes) else { return };
    let (tensor, evidence) = first(&report);
    assert_eq!(tensor, "part_o");
    assert!(evidence.contains("never written"), "{evidence}");
}

#[test]
fn a_skipped_row_is_found_where_it_is_skipped() {
    let to = "    if (blockIdx.x == 5) return;\n    float sum = 0.f;";
    let Some(report) = altered(Form::Absorbed, &[("norm.cu", "    float sum = 0.f;", to)]) else { return };
    let (tensor, evidence) = first(&report);
    assert_eq!(tensor, "attn_in");
    assert!(evidence.contains("never"), "{evidence}");
}

#[test]
fn a_wrong_page_is_found_in_the_attention_that_reads_it() {
    let (from, to) = ("pages[position / p.page_size]", "pages[position / p.page_size ^ (position >= 64)]");
    let Some(report) = altered(Form::Absorbed, &[("absorbed.cu", from, to)]) else { return };
    assert_eq!(first(&report).0, "part_o");
}

#[test]
fn a_dropped_rescale_is_found_in_the_attention_that_drops_it() {
    let changes = [("fused.cu", "o[i][e] *= factor[e / 2];", "o[i][e] *= 1.f;")];
    let Some(report) = altered(Form::Fused, &changes) else { return };
    assert!(["part_o", "attn_out"].contains(&first(&report).0.as_str()), "{:?}", first(&report));
}

/// What no value shows: the wait for copies is gone.
#[test]
fn a_missing_wait_is_found_by_the_machine() {
    let Some(report) = altered(Form::Fused, &[("fused.cu", "        wait<0>();\n", "")]) else { return };
    let (tensor, evidence) = first(&report);
    assert!(["part_o", "attn_out"].contains(&tensor.as_str()), "{tensor}");
    assert!(evidence.contains("fused.cu"), "{evidence}");
}
