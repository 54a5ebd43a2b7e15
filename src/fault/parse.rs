/*! Parsing `--fault NAME[=SIZE][@TENSOR]`, and the list of names. */

use super::text::{self, PREFIX};
use super::words::{WORDS, Word};
use super::{Fault, Kind};
use mla_reference::{Axis, Stage, Weight};

/// Names beside `TENSOR-element`, with what they do; more of them in [`WORDS`].
const NAMES: &[(&str, &str)] = &[
    ("TENSOR-element[=RMS]", "one element of a weight or tensor, by RMS of its rms (default 0.25)"),
    ("softmax-scale=F", "the softmax scale times F"),
    ("output-gain=F[@TENSOR]", "every element of TENSOR (default attn_out) times F"),
    ("head-gain=F[@TENSOR]", "one head of TENSOR (default attn_out) times F"),
    ("eps=F[@TENSOR]", "eps of the norms (or of TENSOR's) times F"),
    ("rope-offset=N[@TENSOR]", "positions of q (or @k_pe) moved by N"),
    ("swap-heads=A,B[@TENSOR]", "heads A and B of TENSOR (default attn_out) exchanged"),
    ("drop-token=S", "key position S left out of attention"),
    ("foreign-page=P", "page P of the page table leads to another request's page when keys are read"),
    ("merge-base", "splits merged with the wrong base of the logarithm"),
    ("no-rescale", "no rescaling when the running maximum grows"),
    ("phantom-output", "o_proj reads another buffer than attention wrote"),
    ("skipped-row[@TENSOR]", "the last row of TENSOR (default attn_out) is never written"),
    (
        "shard-zero[@WEIGHT]",
        "every rank holds rank 0's shard of WEIGHT (default: of all that are sharded); needs --tp",
    ),
    ("lost-rank=R", "the part of rank R is missing from the sum over ranks; needs --tp"),
    (
        "slots-permuted",
        "a stacked qkv_a laid as kv_a, q_a (a file's order) and read as q_a, kv_a; implies --qkv-a stacked",
    ),
    (
        "equal-chunks",
        "a stacked qkv_a cut in equal chunks: kv_a read from its middle on; implies --qkv-a stacked",
    ),
    (
        "kernel:NAME",
        "a text of a kernel file altered before it is compiled, by a name below; needs --engine ptx or cuda, and NVRTC",
    ),
];

/// Why a fault can't be made.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum FaultError {
    /// No such name.
    #[error("'{0}' is not a fault\n  where: --fault\n  do: choose one of {names}", names = list())]
    Unknown(String),
    /// No such fault inside a kernel.
    #[error("'{0}' is no fault inside a kernel\n  where: --fault {PREFIX}{0}\n  do: choose one of {names}", names = inside())]
    Inside(String),
    /// The value is missing or makes no sense.
    #[error("{0}\n  where: --fault {1}\n  do: write it as {2}")]
    Value(String, String, &'static str),
    /// Nothing in this run for it to act on.
    #[error("{0}\n  where: --fault {1}\n  do: {2}")]
    Nowhere(String, String, String),
}

/// All names as they are written, with what they do.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    NAMES.iter().copied().chain(WORDS.iter().map(|w| (w.form, w.text)))
}

fn list() -> String {
    names().map(|(n, _)| n).collect::<Vec<_>>().join(", ")
}

fn inside() -> String {
    text::all().iter().map(|m| m.name).collect::<Vec<_>>().join(", ")
}

impl Fault {
    /// Parses a fault; `seed` draws the element.
    pub fn parse(text: &str, seed: u64) -> Result<Fault, FaultError> {
        if let Some(name) = text.strip_prefix(PREFIX) {
            let found = text::by_name(name).ok_or_else(|| FaultError::Inside(name.to_string()))?;
            let kind = Kind::Kernel(found);
            return Ok(Fault { text: text.to_string(), kind, stage: None, size: 0.25, seed });
        }
        let (head, tensor) = match text.split_once('@') {
            Some((h, t)) => (h, Some(t)),
            None => (text, None),
        };
        let (name, value) = match head.split_once('=') {
            Some((n, v)) => (n, Some(v)),
            None => (head, None),
        };
        let form = |name: &str| names().find(|(n, _)| n.starts_with(name)).map_or("NAME", |(n, _)| n);
        let bad = |why: String| FaultError::Value(why, text.to_string(), form(name));
        if let Some(word) = Word::find(name) {
            let (kind, stage) =
                word.kind(value, tensor).map_err(|e| FaultError::Value(e, text.to_string(), word.form))?;
            return Ok(Fault { text: text.to_string(), kind, stage, size: 0.25, seed });
        }
        let sharded = tensor.filter(|_| name == "shard-zero");
        let sharded =
            match sharded.map(|t| Weight::from_name(t).filter(|w| w.row().axes.contains(&Axis::Head))) {
                Some(None) => {
                    return Err(bad(format!("'{}' is no weight with heads", tensor.unwrap_or_default())));
                }
                of => of.flatten(),
            };
        let stage = match tensor.filter(|_| name != "shard-zero") {
            None => None,
            Some(t) => {
                Some(Stage::from_name(t).ok_or_else(|| bad(format!("'{t}' is not a tensor of the table")))?)
            }
        };
        let number = || -> Result<f64, FaultError> {
            let v = value.ok_or_else(|| bad("a size is missing".into()))?;
            let x: f64 = v.parse().map_err(|_| bad(format!("'{v}' is not a number")))?;
            if x.is_finite() { Ok(x) } else { Err(bad(format!("'{v}' is not finite"))) }
        };
        let index = |what: &str| {
            let x = number()?;
            let whole = (0.0..=f64::from(u32::MAX)).contains(&x) && x.fract() == 0.0;
            if whole { Ok(x as usize) } else { Err(bad(format!("{x} is not a {what}"))) }
        };
        let mut fault = Fault { text: text.to_string(), kind: Kind::MergeBase, stage, size: 0.25, seed };
        if let Some(target) = name.strip_suffix("-element") {
            if tensor.is_some() {
                return Err(bad("the tensor is part of this name".into()));
            }
            if value.is_some() {
                fault.size = number()?;
            }
            let weight = match target {
                "k_b" => Some(Weight::WUk),
                "v_b" => Some(Weight::WUv),
                other => Weight::from_name(other),
            };
            fault.kind = match (weight, Stage::from_name(target)) {
                (Some(w), _) => Kind::WeightElement(w),
                (None, Some(s)) => {
                    fault.stage = Some(s);
                    Kind::Element(s)
                }
                (None, None) => return Err(FaultError::Unknown(text.to_string())),
            };
            return Ok(fault);
        }
        let alone = [
            "softmax-scale",
            "drop-token",
            "foreign-page",
            "merge-base",
            "no-rescale",
            "phantom-output",
            "lost-rank",
            "slots-permuted",
            "equal-chunks",
        ]
        .contains(&name);
        if alone && tensor.is_some() {
            return Err(bad(format!("{name} takes no tensor")));
        }
        let normed = [None, Some(Stage::AttnIn), Some(Stage::QANormed), Some(Stage::KvCNormed)];
        if name == "eps" && !normed.contains(&stage) {
            return Err(bad("only attn_in, q_a_normed and kv_c_normed have an eps".into()));
        }
        let attention = Some(stage.unwrap_or(Stage::AttnOut));
        (fault.kind, fault.stage) = match name {
            "softmax-scale" => (Kind::SoftmaxScale(number()?), None),
            "output-gain" => (Kind::OutputGain(number()?), attention),
            "head-gain" => (Kind::HeadGain(number()?), attention),
            "eps" => (Kind::Eps(number()?), stage),
            "rope-offset" => (Kind::RopeOffset(number()?), Some(stage.unwrap_or(Stage::Q))),
            "swap-heads" => {
                let v = value.ok_or_else(|| bad("two heads are missing".into()))?;
                let two = v.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                let (a, b) = two.ok_or_else(|| bad(format!("'{v}' is not two heads")))?;
                (Kind::SwapHeads(a, b), attention)
            }
            "drop-token" => (Kind::DropToken(index("key position")?), None),
            "foreign-page" => (Kind::ForeignPage(index("page")?), None),
            "merge-base" => (Kind::MergeBase, None),
            "no-rescale" => (Kind::NoRescale, None),
            "phantom-output" => (Kind::PhantomOutput, Some(Stage::AttnOut)),
            "skipped-row" => (Kind::SkippedRow, attention),
            "shard-zero" => (Kind::ShardZero(sharded), None),
            "lost-rank" => (Kind::LostRank(index("rank")?), None),
            "slots-permuted" => (Kind::SlotsPermuted, None),
            "equal-chunks" => (Kind::EqualChunks, None),
            _ => return Err(FaultError::Unknown(text.to_string())),
        };
        if matches!(fault.kind, Kind::RopeOffset(_)) && !matches!(fault.stage, Some(Stage::Q | Stage::KPe)) {
            return Err(bad("only q and k_pe are rotated".into()));
        }
        Ok(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sizes_and_tensors() {
        let p = |t: &str| Fault::parse(t, 7).unwrap();
        assert_eq!(p("k_b-element").kind, Kind::WeightElement(Weight::WUk));
        assert_eq!(p("w_uk-element=0.5").size, 0.5);
        assert_eq!(p("kv_c_normed-element").kind, Kind::Element(Stage::KvCNormed));
        assert_eq!(p("output-gain=1.01@out").stage, Some(Stage::Out));
        assert_eq!(p("rope-offset=1").stage, Some(Stage::Q));
        assert_eq!(p("swap-heads=0,3").kind, Kind::SwapHeads(0, 3));
        assert_eq!(p("drop-token=5").kind, Kind::DropToken(5));
        assert_eq!(p("foreign-page=2").kind, Kind::ForeignPage(2));
        assert_eq!(p("shard-zero").kind, Kind::ShardZero(None));
        assert_eq!(p("shard-zero@w_o").kind, Kind::ShardZero(Some(Weight::WO)));
        assert_eq!(p("lost-rank=3").kind, Kind::LostRank(3));
        assert_eq!((p("slots-permuted").kind, p("slots-permuted").stacks()), (Kind::SlotsPermuted, true));
        assert_eq!(
            p("transposed@w_uk").kind,
            Kind::Spoil(crate::fault::Spoil::Transposed, Some(Weight::WUk))
        );
        assert_eq!(p("rope=skipped").stage, None);
        assert!(p("rope=skipped@q").needs_seams() && !p("rope=skipped").needs_seams());
        assert_eq!(p("lost-token").stage, Some(Stage::Cache));
        assert!(p("cut-at=3").stacks() && p("mask=-1").needs_seams());
        assert_eq!((p("equal-chunks").stacks(), p("merge-base").stacks()), (true, false));
        let first = &text::all()[0];
        assert_eq!(p(&format!("kernel:{}", first.name)).kind, Kind::Kernel(first));
        for w in Weight::ALL {
            assert_eq!(p(&format!("{w}-element")).kind, Kind::WeightElement(*w));
        }
        for s in Stage::ALL {
            assert_eq!(p(&format!("{s}-element")).kind, Kind::Element(*s));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for t in [
            "",
            "nope",
            "x-element",
            "softmax-scale",
            "softmax-scale=inf",
            "output-gain=1@x",
            "swap-heads=1",
            "drop-token=-1",
            "foreign-page=0.5",
            "foreign-page=0@k",
            "rope-offset=1@v",
            "softmax-scale=2@out",
            "eps=2@out",
            "k-element@v",
            "slots-permuted@q_a",
            "shard-zero@w_kv_a",
            "shard-zero@q",
            "lost-rank",
            "lost-rank=1@out",
            "kernel:",
            "kernel:nope",
            "kernel:fused-no-mask@out",
            "transposed",
            "transposed@q",
            "kv-b-halves@w_uk",
            "weight-heads=1@w_uk",
            "zero-rows",
            "zero-rows=1@x",
            "heads-reversed=2",
            "rope=sideways",
            "rope=skipped@v",
            "positions=table-x",
            "mask=0.5",
            "lose=sleep",
            "norm=skipped",
            "norm=skipped@q",
            "no-mask@q",
        ] {
            assert!(Fault::parse(t, 0).is_err(), "{t}");
        }
    }
}
