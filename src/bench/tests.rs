use super::timed::passed_on;
use super::*;
use crate::device::ptx::PtxMachine;
use crate::device::{Buffer, Error, Launch, Limits, Mark, Module, Owner, Pattern, Problem};
use crate::nvrtc::{Compiled, Target};
use std::path::Path;

/// The PTX machine with a clock: half a millisecond from any mark to the next one.
struct Clocked {
    machine: PtxMachine,
    owner: Owner,
    marks: u32,
}

impl Clocked {
    fn new() -> Clocked {
        let machine = PtxMachine::new(Target::compute(120)).unwrap();
        Clocked { machine, owner: Owner::unique(), marks: 0 }
    }
}

impl Device for Clocked {
    passed_on!(machine);

    fn allocate(&mut self, bytes: u64, what: &str) -> Result<Buffer, Error> {
        self.machine.allocate(bytes, what)
    }
    fn free(&mut self, buffer: Buffer) -> Result<(), Error> {
        self.machine.free(buffer)
    }
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), Error> {
        self.machine.launch(launch)
    }
    fn mark(&mut self) -> Result<Mark, Error> {
        self.marks += 1;
        Ok(Mark::new(self.owner, self.marks))
    }
    fn elapsed(&mut self, from: Mark, to: Mark) -> Result<f64, Error> {
        let [Some(from), Some(to)] = [from, to].map(|m| m.id(self.owner)) else {
            return Err(Error::new(Problem::Mark, "test"));
        };
        Ok(f64::from(to - from) * 0.5)
    }
}

const CEILINGS: f64 = 1e9;

fn report(shapes: &[Shape], stages: Option<&[&str]>) -> Report {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/glm5dims.Q4_K_M.gguf");
    let model = Model::open(&file).unwrap();
    let options = Options { page_size: 16, ..Options::default() };
    let stages = stages.map(|s| s.iter().map(|n| n.to_string()).collect());
    let protocol = Protocol { repeats: 3, flush: 4096 };
    let asked = Asked { model: &model, layer: 0, options: &options, stages, protocol, judge: true };
    let ceilings = Ceilings {
        copy_bytes_a_second: CEILINGS,
        product_operations_a_second: Some(1000.0 * CEILINGS),
        product_by: "a test".into(),
    };
    let mut report = Report {
        schema: SCHEMA,
        version: "test",
        device: "a machine".into(),
        model: "glm5dims".into(),
        geometry: model.geometry,
        dtype: "bf16",
        kernels: Vec::new(),
        compilers: Vec::new(),
        repeats: 3,
        ceilings,
        shapes: Vec::new(),
    };
    for s in shapes {
        let ran = shape(Clocked::new(), &asked, s, &report.ceilings, &|_| ()).unwrap();
        report.shapes.push(ran.shape);
        report.kernels = ran.kernels;
    }
    report
}

/// Every stage of a decode is there once, with the kernel that computed it, its time, and what that makes of its work.
#[test]
fn a_decode_is_timed_stage_by_stage_and_judged() {
    let report = report(&[Shape::decode(6, 40, Form::Absorbed)], None);
    let of = &report.shapes[0];
    let names: Vec<&str> = of.stages.iter().map(|s| s.stage.as_str()).collect();
    let expected =
        "attn_in q_a q_a_normed q_raw q kv_a kv_c_normed k_pe cache q_latent o_latent attn_out out";
    assert_eq!(names.join(" "), expected);
    for s in &of.stages {
        assert_eq!(s.launches.len(), 1, "{}", s.stage);
        let every = [s.cold.median, s.cold.least, s.cold.most, s.warm.median];
        assert_eq!(every, [500.0; 4], "{}", s.stage);
    }
    let out = &of.stages[12];
    assert_eq!(out.launches[0].entry, "product");
    let g = &report.geometry;
    let (k, n) = (g.values(), g.hidden);
    assert_eq!(out.operations, 2 * 6 * (n * k) as u64);
    assert_eq!(out.bytes, 2 * (6 * k + n * k + 6 * n) as u64);
    // At 10⁹ bytes a second the work takes bytes / 10⁹ seconds; the clock says half a millisecond.
    assert_eq!(out.binds, Some(Binds::Memory));
    let share = out.share.unwrap();
    assert!((share - out.bytes as f64 / 1e9 / 5e-4).abs() < 1e-9 * share, "{share}");
    let judged = of.judged.as_ref().unwrap();
    assert_eq!((judged.verdict, judged.evidence.len()), (Verdict::Rounding, 0), "{judged:?}");
    assert_eq!(report.verdict(), Some(Verdict::Rounding));
    assert!(judged.drawn.contains(" of 6 requests"), "{}", judged.drawn);
    assert!(report.kernels.iter().all(|k| k.built_in) && !report.kernels.is_empty());
}

/// Splits are two stages; a weight is timed where it is asked for, and nothing that is not.
#[test]
fn what_is_asked_for_is_timed_and_nothing_else() {
    let asked = ["part_o", "o_latent", "w_q_a"];
    let report = report(&[Shape::decode(2, 600, Form::Absorbed)], Some(&asked));
    let of = &report.shapes[0];
    assert_eq!(of.splits, 2);
    let entries: Vec<(&str, &str)> =
        of.stages.iter().map(|s| (s.stage.as_str(), s.launches[0].entry.as_str())).collect();
    let parts = entries.iter().find(|e| e.0 == "part_o").unwrap().1;
    assert!(parts.starts_with("absorbed_part"), "{parts}");
    assert_eq!(entries.iter().map(|e| e.0).collect::<Vec<_>>(), ["w_q_a", "part_o", "o_latent"]);
    assert_eq!(entries[2].1, "merge");
    let w = &of.stages[0];
    let g = &report.geometry;
    // Q4_K: 144 bytes of 256 elements, and two bytes of each written.
    let elements = (g.q_rank * g.hidden) as u64;
    assert_eq!((w.bytes, w.operations), (elements / 256 * 144 + 2 * elements, 0));
}

#[test]
fn tables_say_what_was_measured() {
    let report = report(&[Shape::prefill(70, Form::Fused)], Some(&["k", "attn_out"]));
    let text = text::terminal(&report);
    for part in [
        "a machine\nglm5dims, bf16\ncopy 1 GB/s\nbf16 matrix product 1 TFLOP/s, by a test\n",
        "\nprefill 70, fused\nstage     kernel",
        "product_transposed + key_rope",
        "1000 to 1000",
        "judged: rounding (",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let markdown = text::markdown(&report);
    assert!(
        markdown.contains("| stage | kernel | cold us |") && markdown.contains("\n|---|---|---:|"),
        "{markdown}"
    );
    let json = serde_json::to_value(&report).unwrap();
    let k = &json["shapes"][0]["stages"][0];
    assert_eq!((&k["stage"], &k["launches"][1]["entry"]), (&"k".into(), &"key_rope".into()));
    assert_eq!(k["cold"]["median"], 1000.0);
    let none = Report {
        ceilings: Ceilings {
            product_operations_a_second: None,
            product_by: "no libcublas was found".into(),
            ..report.ceilings.clone()
        },
        ..report
    };
    let text = text::terminal(&none);
    assert!(text.contains("ceiling of products: not measured (no libcublas was found)"), "{text}");
}

/// Two bytes move for each that is copied.
#[test]
fn a_copy_counts_reads_and_writes() {
    let mut device = Clocked::new();
    let speed = ceilings::copy(&mut device, 4096).unwrap();
    assert!((speed - 2.0 * 4096.0 / 5e-4).abs() < 1.0, "{speed}");
}
