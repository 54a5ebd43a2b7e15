//! The kernels as an engine, and broken copies of them: the same on the PTX machine and on a GPU.

use mla_check::check::{self, EngineKind, Options};
use mla_check::engine::kernels::library::Library;
use mla_check::engine::stack::QkvA;
use mla_check::judge::{Verdict, origins};
use mla_check::model::Model;
use mla_check::report::LayerReport;
use mla_numeric::DType;
use mla_reference::{Form, Regime};
use std::path::Path;

/// Models with heads of DeepSeek and of GLM-5.
pub const FILES: [&str; 2] = ["dsv3.Q4_K_M-00001-of-00003.gguf", "glm5dims.Q4_K_M.gguf"];

/// A text of a kernel file and what stands in its place: (file, from, to).
pub type Change = (&'static str, &'static str, &'static str);

/// A broken copy of the kernels.
pub struct Planted {
    /// Name.
    pub name: &'static str,
    /// Form that is run.
    pub form: Form,
    /// What is broken.
    pub changes: &'static [Change],
    /// Tensors that may be the first at fault.
    pub first: &'static [&'static str],
    /// What the evidence says, among other things.
    pub says: &'static str,
}

/// Faults that every device shows.
pub const PLANTED: [Planted; 4] = [
    // The founding fault: the result goes to another buffer than the one that is read.
    Planted {
        name: "phantom_buffer",
        form: Form::Absorbed,
        changes: &[
            (
                "absorbed.cu",
                "template <int ROWS, int LOADERS,",
                "__device__ u16 phantom[1 << 22];\ntemplate <int ROWS, int LOADERS,",
            ),
            ("absorbed.cu", "Out* to = (Out*)p.o +", "Out* to = (Out*)phantom +"),
        ],
        first: &["part_o"],
        says: "never written",
    },
    Planted {
        name: "skipped_row",
        form: Form::Absorbed,
        changes: &[(
            "norm.cu",
            "    float sum = 0.f;",
            "    if (blockIdx.x == 5) return;\n    float sum = 0.f;",
        )],
        first: &["attn_in"],
        says: "never",
    },
    Planted {
        name: "wrong_page",
        form: Form::Absorbed,
        changes: &[("absorbed.cu", "u32(pages[entry])", "u32(pages[entry ^ (position >= 64)])")],
        first: &["part_o"],
        says: "",
    },
    Planted {
        name: "dropped_rescale",
        form: Form::Fused,
        changes: &[("fused.cu", "o[m][i][e] *= factor[e / 2];", "o[m][i][e] *= 1.f;")],
        first: &["part_o", "attn_out"],
        says: "",
    },
];

/// What the judge says of an engine with a fixture's first layer.
pub fn report(engine: EngineKind, file: &str, change: impl FnOnce(&mut Options)) -> LayerReport {
    // A binary that was carried elsewhere runs in a checkout's root.
    let here = Path::new("fixtures/models").join(file);
    let path = if here.exists() { here } else { Path::new(env!("CARGO_MANIFEST_DIR")).join(here) };
    let model = Model::open(&path).unwrap_or_else(|e| panic!("{e}"));
    let mut options = Options { engine, ..Options::default() };
    change(&mut options);
    check::layer(&model, 0, &options, &|_| ()).unwrap_or_else(|e| panic!("{e}"))
}

/// Rounding is all that a report may find.
pub fn clean(report: &LayerReport) {
    let worst: Vec<_> = origins(&report.tensors).map(|u| (u.title(), &u.evidence)).collect();
    let good = matches!(report.verdict, Verdict::Rounding | Verdict::Exact);
    assert!(good, "{:?} {worst:?} {:?}", report.verdict, report.probes);
}

/// Ranks of tensor parallelism with a stacked projection, in both forms: rounding.
#[allow(dead_code)] // too long for the PTX machine
pub fn ranks(engine: EngineKind) {
    for (file, tp) in [(FILES[0], 2), (FILES[1], 2), (FILES[1], 4)] {
        clean(&report(engine, file, |o| (o.tp, o.qkv_a) = (tp, QkvA::Stacked)));
    }
}

/// Requests that each go one way, contexts in chunks: rounding.
#[allow(dead_code)] // too long for the PTX machine
pub fn routed(engine: EngineKind) {
    for (file, chunk, tp) in [(FILES[0], None, 1), (FILES[0], Some(7), 2), (FILES[1], Some(64), 4)] {
        clean(&report(engine, file, |o| (o.route, o.context_chunk, o.tp) = (Some(5), chunk, tp)));
    }
}

/// What a small run says of a copy of some kernel files with texts replaced.
pub fn altered(engine: EngineKind, form: Form, changes: &[Change]) -> LayerReport {
    altered_in(engine, DType::Bf16, &[form], changes)
}

/// The same in a dtype.
pub fn altered_in(engine: EngineKind, dtype: DType, forms: &[Form], changes: &[Change]) -> LayerReport {
    let folder = tempfile::tempdir().unwrap();
    let own = Library::built_in_for(dtype).unwrap();
    for (name, from, to) in changes {
        let path = folder.path().join(name);
        let text = || own.files().find(|(_, f)| f.source.name == *name).unwrap().1.source.text.clone();
        let text = std::fs::read_to_string(&path).unwrap_or_else(|_| text());
        assert!(text.contains(from), "{name} has no {from:?}");
        std::fs::write(path, text.replacen(from, to, 1)).unwrap();
    }
    report(engine, FILES[0], |o| {
        o.kernels = Some(folder.path().into());
        o.dtype = dtype;
        o.forms = forms.to_vec();
        o.regimes = vec![Regime::Random];
        o.batch = "0+37,200+1,70+3".parse().unwrap();
        o.splits = Some(3);
    })
}

/// The first unit that is at fault, and what is said of it.
pub fn first(report: &LayerReport) -> (String, String) {
    let unit = origins(&report.tensors).next().expect("nothing was found");
    (unit.tensor.to_string(), unit.evidence.join("; "))
}

/// A planted fault is found where it was planted.
pub fn found(engine: EngineKind, planted: &Planted) {
    let (tensor, evidence) = first(&altered(engine, planted.form, planted.changes));
    assert!(planted.first.contains(&tensor.as_str()), "{}: {tensor}", planted.name);
    assert!(evidence.contains(planted.says), "{}: {evidence}", planted.name);
}
