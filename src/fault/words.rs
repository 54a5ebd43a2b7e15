/*!
Names of faults of weights, tensors, rope, positions and of the engine's inside, as a table: what each takes, what it does, what it
makes.
*/

use super::Counted;
use super::damage::Damage;
use super::spoil::Spoil;
use crate::engine::cpu::Seams;
use crate::engine::cpu::slips::{Lost, Merging, Norming, Paging, Part, Sight, Turning};
use mla_reference::Stage;

/// What stands behind the equals sign.
#[derive(Clone, Copy)]
pub(super) struct Value<'a>(pub Option<&'a str>);

impl Value<'_> {
    fn word(self) -> Option<String> {
        self.0.map(str::to_string)
    }
    fn number(self) -> Option<f64> {
        self.0?.parse().ok().filter(|v: &f64| v.is_finite())
    }
    fn index(self) -> Option<usize> {
        self.0?.parse::<u32>().ok().map(|n| n as usize)
    }
    fn whole(self) -> Option<isize> {
        self.number().filter(|n| n.fract() == 0.0 && n.abs() < 1e6).map(|n| n as isize)
    }
    fn two(self) -> Option<(usize, usize)> {
        let (a, b) = self.0?.split_once(',')?;
        Some((Value(Some(a)).index()?, Value(Some(b)).index()?))
    }
    /// Nothing may stand there.
    fn none<T>(self, of: T) -> Option<T> {
        self.0.is_none().then_some(of)
    }
}

/// What stands behind the at sign, and what a name makes of it.
pub(super) enum Make {
    /// A weight must be named.
    Weight(fn(Value) -> Option<Spoil>),
    /// None may be.
    Weights(fn(Value) -> Option<Spoil>),
    /// A tensor may be named; else this one.
    Tensor(Stage, fn(Value) -> Option<Damage>),
    /// q or k_pe may be; else both.
    Rope(fn(Value) -> Option<Turning>),
    /// None may be.
    Positions(fn(Value) -> Option<Counted>),
    /// None may be.
    Inside(fn(Value) -> Option<Seams>),
    /// A normed tensor must be.
    Norm(fn(Value) -> Option<Norming>),
    /// None may be.
    Stack(fn(Value) -> Option<usize>),
}

/// A name: how it is written, what it does, what it makes.
pub(super) struct Word {
    pub form: &'static str,
    pub text: &'static str,
    pub make: Make,
}

const fn word(form: &'static str, text: &'static str, make: Make) -> Word {
    Word { form, text, make }
}

pub(super) fn seam(set: impl FnOnce(&mut Seams)) -> Seams {
    let mut seams = Seams::default();
    set(&mut seams);
    seams
}

/// The table.
pub(super) static WORDS: &[Word] = &[
    word(
        "weight-heads=A,B@WEIGHT",
        "heads A and B of WEIGHT exchanged",
        Make::Weight(|v| v.two().map(|(a, b)| Spoil::Heads(a, b))),
    ),
    word(
        "transposed@WEIGHT",
        "the bytes of each head of WEIGHT read with the other shape",
        Make::Weight(|v| v.none(Spoil::Transposed)),
    ),
    word(
        "kv-b-halves",
        "kv_b, which lies head by head, taken as all keys, then all values",
        Make::Weights(|v| v.none(Spoil::Halves)),
    ),
    word(
        "kv-b-values-first",
        "kv_b taken as if each head had its values first",
        Make::Weights(|v| v.none(Spoil::ValuesFirst)),
    ),
    word("weight-gain=F@WEIGHT", "WEIGHT times F", Make::Weight(|v| v.number().map(Spoil::Gain))),
    word(
        "tail-gain=F@WEIGHT",
        "rows of WEIGHT after its last whole block of 128 times F",
        Make::Weight(|v| v.number().map(Spoil::TailGain)),
    ),
    word("requantised@WEIGHT", "WEIGHT through q8_0 once more", Make::Weight(|v| v.none(Spoil::Requantised))),
    word(
        "zero-half@WEIGHT",
        "the second half of WEIGHT's rows zero",
        Make::Weight(|v| v.none(Spoil::ZeroHalf)),
    ),
    word(
        "row-shift=N@WEIGHT",
        "rows of WEIGHT read N rows late",
        Make::Weight(|v| v.index().map(Spoil::RowShift)),
    ),
    word(
        "rope-rows@WEIGHT",
        "rope rows of WEIGHT in half-split order",
        Make::Weight(|v| v.none(Spoil::RopeRows)),
    ),
    word("norm-plus-one@WEIGHT", "one added to a norm's WEIGHT", Make::Weight(|v| v.none(Spoil::PlusOne))),
    word("norm-left-out@WEIGHT", "a norm's WEIGHT one throughout", Make::Weight(|v| v.none(Spoil::LeftOut))),
    word(
        "drift=S@WEIGHT",
        "every value of WEIGHT off by a random share up to S",
        Make::Weight(|v| v.number().map(Spoil::Drift)),
    ),
    word(
        "stale-weight@WEIGHT",
        "WEIGHT of the nearest other layer",
        Make::Weight(|v| v.none(Spoil::OtherLayer)),
    ),
    word(
        "cut-at=N",
        "a stacked qkv_a cut N rows late: kv_a is read from there on; implies --qkv-a stacked",
        Make::Stack(|v| v.index()),
    ),
    word(
        "zero-rows=N[@TENSOR]",
        "the last N rows of TENSOR zero",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(Damage::ZeroRows)),
    ),
    word(
        "stale-rows=N[@TENSOR]",
        "N rows of TENSOR hold the rows before them",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(Damage::StaleRows)),
    ),
    word(
        "swap-rows=A,B[@TENSOR]",
        "rows A and B of TENSOR exchanged",
        Make::Tensor(Stage::AttnOut, |v| v.two().map(|(a, b)| Damage::Rows(a, b))),
    ),
    word(
        "zero-head=H[@TENSOR]",
        "head H of TENSOR zero",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(Damage::ZeroHead)),
    ),
    word(
        "head-shift=N[@TENSOR]",
        "each head of TENSOR is the one N later",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(Damage::HeadShift)),
    ),
    word(
        "heads-reversed[@TENSOR]",
        "heads of TENSOR in reverse order",
        Make::Tensor(Stage::AttnOut, |v| v.none(Damage::HeadsReversed)),
    ),
    word(
        "heads-first[@TENSOR]",
        "TENSOR stored head by head, read row by row",
        Make::Tensor(Stage::Lse, |v| v.none(Damage::HeadsFirst)),
    ),
    word(
        "zero-columns=N[@TENSOR]",
        "the last N columns of each head of TENSOR zero",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(Damage::ZeroColumns)),
    ),
    word(
        "stride=N[@TENSOR]",
        "rows of TENSOR read with a stride N elements too long (or short)",
        Make::Tensor(Stage::AttnOut, |v| v.whole().map(Damage::Stride)),
    ),
    word(
        "padded[@TENSOR]",
        "heads of TENSOR padded to the key's width and cut late",
        Make::Tensor(Stage::AttnOut, |v| v.none(Damage::Padded)),
    ),
    word(
        "rope-first[@TENSOR]",
        "cache rows with rope first",
        Make::Tensor(Stage::Cache, |v| v.none(Damage::RopeFirst)),
    ),
    word(
        "paired-rope[@TENSOR]",
        "rope columns of TENSOR stored in half-split order",
        Make::Tensor(Stage::KPe, |v| v.none(Damage::Paired)),
    ),
    word(
        "stale-rope[@TENSOR]",
        "rope columns of TENSOR are those of the row before",
        Make::Tensor(Stage::KPe, |v| v.none(Damage::StaleRope)),
    ),
    word(
        "noise=S[@TENSOR]",
        "every element of TENSOR off by a random share up to S",
        Make::Tensor(Stage::AttnOut, |v| v.number().map(Damage::Noise)),
    ),
    word(
        "fewer-bits=N[@TENSOR]",
        "TENSOR rounded to N bits of the significand",
        Make::Tensor(Stage::AttnOut, |v| v.index().map(|n| Damage::Bits(n as u32))),
    ),
    word(
        "lost-token",
        "cache rows of each request's last new token never written",
        Make::Tensor(Stage::Cache, |v| v.none(Damage::LostToken)),
    ),
    word(
        "late-slots",
        "cache rows of new tokens written one slot late",
        Make::Tensor(Stage::Cache, |v| v.none(Damage::LateSlots)),
    ),
    word(
        "overwritten-slot",
        "the first request's first slot holds the last request's last token",
        Make::Tensor(Stage::Cache, |v| v.none(Damage::Overwritten)),
    ),
    word(
        "stale-page=P[@TENSOR]",
        "page P of each request holds another's (TENSOR: cache, k, v)",
        Make::Tensor(Stage::Cache, |v| v.index().map(Damage::StalePage)),
    ),
    word(
        "zero-page=P[@TENSOR]",
        "page P of each request zero (TENSOR: cache, k, v)",
        Make::Tensor(Stage::Cache, |v| v.index().map(Damage::ZeroPage)),
    ),
    word(
        "rope=WHAT[@TENSOR]",
        "q and k_pe (or TENSOR alone) rotated otherwise; WHAT: skipped, twice, backwards, other-pairs, base-N, magnitude-F",
        Make::Rope(|v| {
            let text = v.word()?;
            let number = |lead: &str| Value(text.strip_prefix(lead)).number().filter(|n| *n > 0.0);
            match text.as_str() {
                "skipped" => Some(Turning::Skipped),
                "twice" => Some(Turning::Twice),
                "backwards" => Some(Turning::Backwards),
                "other-pairs" => Some(Turning::OtherPairs),
                _ => number("base-")
                    .map(Turning::Base)
                    .or_else(|| number("magnitude-").map(Turning::Magnitude)),
            }
        }),
    ),
    word(
        "positions=WHAT",
        "positions counted otherwise; WHAT: within (without context), batch (over the whole batch), zero, table-N (none above N)",
        Make::Positions(|v| match v.word()?.as_str() {
            "within" => Some(Counted::Within),
            "batch" => Some(Counted::Batch),
            "zero" => Some(Counted::Zero),
            other => Value(other.strip_prefix("table-")).index().map(|n| Counted::Upto(n as u64)),
        }),
    ),
    word(
        "mask=N",
        "each row sees N keys more than the causal mask allows (or fewer)",
        Make::Inside(|v| v.whole().map(|n| seam(|s| s.sight = Some(Sight::Off(n as i64))))),
    ),
    word(
        "no-mask",
        "each row sees all keys of its request",
        Make::Inside(|v| v.none(seam(|s| s.sight = Some(Sight::All)))),
    ),
    word(
        "lose=WHAT",
        "keys left out; WHAT: context, new, first-key, first-page, last-page, last-tile",
        Make::Inside(|v| {
            let lost = match v.word()?.as_str() {
                "context" => Lost::Context,
                "new" => Lost::New,
                "first-key" => Lost::FirstKey,
                "first-page" => Lost::FirstPage,
                "last-page" => Lost::LastPage,
                "last-tile" => Lost::LastTile,
                _ => return None,
            };
            Some(seam(|s| s.lost = Some(lost)))
        }),
    ),
    word(
        "own-page=A,B",
        "page A of each request read from its page B",
        Make::Inside(|v| v.two().map(|(a, b)| seam(|s| s.paging = Some(Paging::Own(a, b))))),
    ),
    word(
        "pages=WHAT",
        "the page table: contiguous (not followed), slots (taken for a table of slots)",
        Make::Inside(|v| {
            let paging = match v.word()?.as_str() {
                "contiguous" => Paging::Contiguous,
                "slots" => Paging::TableOfSlots,
                _ => return None,
            };
            Some(seam(|s| s.paging = Some(paging)))
        }),
    ),
    word(
        "merge=WHAT",
        "parts merged otherwise; WHAT: base2 (exp2 of natural logarithms), average, reversed (each with another's lse)",
        Make::Inside(|v| {
            let merging = match v.word()?.as_str() {
                "base2" => Merging::Base2,
                "average" => Merging::Average,
                "reversed" => Merging::Reversed,
                _ => return None,
            };
            Some(seam(|s| s.merging = Some(merging)))
        }),
    ),
    word(
        "lost-split=S",
        "split S left out of the merge",
        Make::Inside(|v| v.index().map(|n| seam(|s| s.merging = Some(Merging::Lost(n))))),
    ),
    word(
        "split-twice=S",
        "split S merged twice",
        Make::Inside(|v| v.index().map(|n| seam(|s| s.merging = Some(Merging::Twice(n))))),
    ),
    word(
        "scores-without=WHAT",
        "the rope or nope part left out of the scores",
        Make::Inside(|v| {
            let part = match v.word()?.as_str() {
                "rope" => Part::Rope,
                "nope" => Part::Nope,
                _ => return None,
            };
            Some(seam(|s| s.scores = Some(part)))
        }),
    ),
    word(
        "next-head=WHAT",
        "each head attends with k (or v) of the next head, in the fused form",
        Make::Inside(|v| {
            let values = match v.word()?.as_str() {
                "k" => false,
                "v" => true,
                _ => return None,
            };
            Some(seam(|s| s.next_head = Some(values)))
        }),
    ),
    word(
        "empty-lse",
        "a part without keys has lse 0, not minus infinity",
        Make::Inside(|v| v.none(seam(|s| s.empty_lse = true))),
    ),
    word(
        "no-last-rescale",
        "no rescaling when the running maximum grows in the last tile",
        Make::Inside(|v| v.none(seam(|s| s.no_last_rescale = true))),
    ),
    word(
        "value-view=N",
        "values read from column N of cache rows on, in the absorbed form",
        Make::Inside(|v| v.index().map(|n| seam(|s| s.value_view = n))),
    ),
    word(
        "norm=WHAT@TENSOR",
        "a norm is wrong; WHAT: skipped, no-weight, plus-one, wide (over latent and rope)",
        Make::Norm(|v| match v.word()?.as_str() {
            "skipped" => Some(Norming::Skipped),
            "no-weight" => Some(Norming::NoWeight),
            "plus-one" => Some(Norming::PlusOne),
            "wide" => Some(Norming::Wide),
            _ => None,
        }),
    ),
];
