/*!
Ranks together: what they delivered as the tensors of one layer.

What every rank has must have the same bits on each of them. Ranks of which that holds are a group and are judged as one layer:
their heads beside each other, everything else once, their parts of `out` as `part_out`, and the sum of these. A rank with other
bits somewhere is a group of its own, or joins those that have the same other bits: its later tensors are computed from its own
copy, and have to be judged from that. So a rank that went astray is found where it did, and accuses none of the others.
*/

use super::Ranks;
use super::gather::{Rank, Shown, tensor_is_whole, weight_is_whole};
use crate::engine::{Sink, SinkError};
use crate::trace::{Tensor, TensorId};
use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::{Axis, Geometry, Plan, Stage, WEIGHTS, Weight, Weights};
use std::collections::{BTreeMap, BTreeSet};

/// Something that should be the same on all ranks and is not: the tensor (None: a weight), and words.
type Differs = (Option<TensorId>, String);

/// All ranks, as they come in.
pub struct Gathered {
    ranks: Ranks,
    all: Vec<Rank>,
    /// Indexes into `all`.
    groups: Vec<Vec<usize>>,
}

/// Ranks that have the same bits of what all ranks have.
pub struct Group<'g> {
    of: &'g Gathered,
    members: &'g [usize],
}

impl Gathered {
    /// Of none yet.
    pub fn new(ranks: Ranks) -> Gathered {
        Gathered { ranks, all: Vec::new(), groups: Vec::new() }
    }

    /// Takes what a rank delivered.
    pub fn push(&mut self, mut rank: Rank) {
        let at = self.all.len();
        if rank.silent() {
            self.all.push(rank);
            return;
        }
        match self.groups.iter().position(|g| apart(&self.all[g[0]], &rank).is_none()) {
            Some(i) => {
                let first = &self.all[self.groups[i][0]];
                for (id, t) in &mut rank.tensors {
                    if tensor_is_whole(id.stage) && first.tensors.contains_key(id) {
                        *t = None;
                    }
                }
                self.groups[i].push(at);
            }
            None => self.groups.push(vec![at]),
        }
        self.all.push(rank);
    }

    /// Groups, the largest first; of equal ones that of the lower rank.
    pub fn groups(&self) -> Vec<Group<'_>> {
        let mut all: Vec<Group> = self.groups.iter().map(|members| Group { of: self, members }).collect();
        all.sort_by_key(|g| std::cmp::Reverse(g.members.len()));
        all
    }

    /// Ranks that delivered nothing.
    pub fn silent(&self) -> Vec<usize> {
        self.all.iter().filter(|r| r.silent()).map(|r| r.number).collect()
    }

    /// What should be the same on all ranks and is not, in words.
    pub fn differ(&self) -> Vec<String> {
        self.groups().iter().filter_map(Group::differs).map(|(_, text)| text).collect()
    }

    /// Ranks in order.
    pub fn ranks(&self) -> &[Rank] {
        &self.all
    }
}

/// The first thing that two ranks should have the same bits of and have not, and in what they differ.
fn apart(a: &Rank, b: &Rank) -> Option<Differs> {
    let than = format!("than rank {}", a.number);
    let mut weights = WEIGHTS.iter().map(|r| r.weight).filter(|w| weight_is_whole(*w));
    let other = weights.find(|w| {
        let matrices = a.weights.get(w).zip(b.weights.get(w)).is_some_and(|(x, y)| x != y);
        let bits = |v: &Vec<f64>| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let norms = a.norms.get(w).zip(b.norms.get(w)).is_some_and(|(x, y)| bits(x) != bits(y));
        matrices || norms
    });
    if let Some(w) = other {
        return Some((None, format!("rank {} holds another {w} {than}", b.number)));
    }
    let whole = a.tensors.iter().filter(|(id, _)| tensor_is_whole(id.stage));
    let mut pairs = whole.filter_map(|(id, x)| Some((id, x.as_ref()?, b.tensors.get(id)?.as_ref()?)));
    pairs.find(|(_, x, y)| (x.dtype, &x.shape, &x.bytes) != (y.dtype, &y.shape, &y.bytes)).map(
        |(id, x, y)| {
            let what = if (x.dtype, &x.shape) == (y.dtype, &y.shape) {
                let n = x.dtype.bytes();
                let pairs = || x.bytes.chunks(n).zip(y.bytes.chunks(n));
                let off = pairs().filter(|(p, q)| p != q).count();
                let at = pairs().position(|(p, q)| p != q).unwrap_or(0);
                let (row, col) = (at / x.cols.max(1), at % x.cols.max(1));
                format!("{off} of {} elements, first at row {row}, column {col}", x.len())
            } else {
                format!("{} {:?}, not {} {:?}", y.dtype, y.shape, x.dtype, x.shape)
            };
            (Some(*id), format!("rank {} holds other bits {than}: {what}", b.number))
        },
    )
}

impl Group<'_> {
    /// Its ranks, ascending.
    pub fn ranks(&self) -> Vec<usize> {
        self.members().map(|r| r.number).collect()
    }

    /// Whether these are all ranks that there are.
    pub fn is_all(&self) -> bool {
        self.members.len() == self.of.ranks.of
    }

    /// In what its first rank differs from that of the largest group; None of that one itself.
    fn differs(&self) -> Option<Differs> {
        let first = |g: &Group| g.members.first().copied();
        let main = self.of.groups().first().and_then(first)?;
        let own = first(self).filter(|own| *own != main)?;
        apart(&self.of.all[main], &self.of.all[own])
    }

    /// The heads of its ranks.
    pub fn heads(&self) -> super::heads::Heads {
        self.of.ranks.heads_of(&self.ranks())
    }

    fn members(&self) -> impl Iterator<Item = &Rank> {
        self.members.iter().map(|i| &self.of.all[*i])
    }

    /// Feeds what its ranks delivered to a sink, as the tensors of one layer: weights, then tensors in the order of the table.
    ///
    /// `file`: the file's weights with the group's heads; `dtype`: the contract's for matrices; `plan` has as many ranks as
    /// the group; `lost`: a rank whose part is left out of the sum, on purpose.
    ///
    /// # Errors
    /// The sink's.
    pub fn feed(
        &self,
        file: &dyn Weights,
        (dtype, g, plan): (DType, &Geometry, &Plan),
        lost: Option<usize>,
        sink: &mut dyn Sink,
    ) -> Result<(), SinkError> {
        for w in WEIGHTS.iter().map(|r| r.weight).filter(|w| w.exists(g)) {
            if w.is_norm() {
                if let Some(values) = self.members().find_map(|r| r.norms.get(&w)) {
                    sink.norm(w, values)?;
                }
            } else if let Some(inner) = file.matrix(w)
                && let Some(rows) = self.weight(w, inner, dtype)
            {
                sink.weight(w, &rows)?;
            }
        }
        for rank in self.members() {
            for (id, what) in &rank.evidence {
                sink.evidence(renamed(*id, plan), &format!("rank {}: {what}", rank.number))?;
            }
        }
        let delivered = self.members().flat_map(|r| r.tensors.keys());
        let order: BTreeSet<_> = delivered.map(|id| (id.form, id.stage)).collect();
        for (form, stage) in order {
            self.tensor(TensorId { stage, form }, g, plan, lost, sink)?;
        }
        match self.differs() {
            Some((Some(id), text)) => sink.evidence(id, &text),
            _ => Ok(()),
        }
    }

    fn tensor(
        &self,
        id: TensorId,
        g: &Geometry,
        plan: &Plan,
        lost: Option<usize>,
        sink: &mut dyn Sink,
    ) -> Result<(), SinkError> {
        let lack: Vec<usize> =
            self.members().filter(|r| !r.tensors.contains_key(&id)).map(|r| r.number).collect();
        let to = renamed(id, plan);
        for rank in &lack {
            sink.evidence(to, &format!("rank {rank} never delivered it"))?;
        }
        let parts: Vec<&Tensor> = self.members().filter_map(|r| r.tensors.get(&id)?.as_ref()).collect();
        let Some(&first) = parts.first() else { return Ok(()) };
        if tensor_is_whole(id.stage) {
            return sink.tensor(id, &mut first.clone()).map(drop);
        }
        if !lack.is_empty() {
            return Ok(());
        }
        let wanted = match to.stage {
            Stage::PartOut => Some((plan.rows(Stage::Out, id.form), g.hidden)),
            _ => None,
        };
        let form = |t: &Tensor| (t.dtype, t.rows, t.cols, t.bytes.len());
        let whole = first.bytes.len() == first.len() * first.dtype.bytes()
            && wanted.is_none_or(|w| w == (first.rows, first.cols));
        if !whole || parts.iter().any(|t| form(t) != form(first)) {
            let shapes: Vec<String> = parts.iter().map(|t| format!("{} {:?}", t.dtype, t.shape)).collect();
            return sink.evidence(to, &format!("ranks delivered it as {}", shapes.join(", ")));
        }
        if to.stage != Stage::PartOut {
            return sink.tensor(to, &mut beside(&parts, id, g, plan)).map(drop);
        }
        let mut part_out = below(&parts, to, g, plan);
        sink.tensor(to, &mut part_out)?;
        let lost = lost.and_then(|r| self.ranks().iter().position(|own| *own == r));
        sink.tensor(id, &mut reduce(&part_out, id, g, plan, lost)).map(drop)
    }

    /// A weight put together; None where a rank never showed it.
    fn weight<'f>(&self, weight: Weight, inner: &'f dyn Rows, dtype: DType) -> Option<Overlaid<'f>> {
        let shown: Vec<&Shown> = self.members().map(|r| r.weights.get(&weight)).collect::<Option<_>>()?;
        let first = *shown.first()?;
        let mut out = Overlaid {
            inner,
            dtype,
            shape: (first.rows, first.cols),
            fits: shown.iter().all(|s| s.fits),
            rows: BTreeMap::new(),
        };
        if weight_is_whole(weight) {
            out.rows = first.differs.clone();
            return Some(out);
        }
        if weight.row().axes.first() == Some(&Axis::Head) {
            out.shape.0 = shown.iter().map(|s| s.rows).sum();
            let mut at = 0;
            for s in shown {
                out.rows.extend(s.differs.iter().map(|(r, bits)| (at + r, bits.clone())));
                at += s.rows;
            }
            return Some(out);
        }
        out.shape.1 = shown.iter().map(|s| s.cols).sum();
        let (mut at, mut line) = (0, vec![0.0; inner.cols()]);
        for s in shown {
            for (r, bits) in &s.differs {
                let row = out.rows.entry(*r).or_insert_with(|| {
                    inner.decode(*r, 0, &mut line);
                    dtype.encode(&line)
                });
                let from = at * dtype.bytes();
                if let Some(own) = row.get_mut(from..from + bits.len()) {
                    own.copy_from_slice(bits);
                }
            }
            at += s.cols;
        }
        Some(out)
    }
}

/// A rank's `out` is its part of the sum, where there is one.
fn renamed(id: TensorId, plan: &Plan) -> TensorId {
    let part = id.stage == Stage::Out && plan.ranks > 1;
    if part { TensorId { stage: Stage::PartOut, ..id } } else { id }
}

/// Heads beside each other: a tensor of more columns.
fn beside(parts: &[&Tensor], id: TensorId, g: &Geometry, plan: &Plan) -> Tensor {
    let Some(first) = parts.first() else { return Tensor::zeros(id, plan, g, DType::F32) };
    let mut out = Tensor::zeros(id, plan, g, first.dtype);
    let mut shape = first.shape.clone();
    if let Some(at) = first.axes.iter().position(|a| *a == Axis::Head) {
        shape[at] = parts.iter().map(|t| t.shape.get(at).copied().unwrap_or(0)).sum();
    }
    (out.axes, out.shape, out.rows) = (first.axes.clone(), shape, first.rows);
    out.cols = parts.iter().map(|t| t.cols).sum();
    let width = |t: &Tensor| t.cols * t.dtype.bytes();
    out.bytes = (0..first.rows)
        .flat_map(|r| parts.iter().flat_map(move |t| &t.bytes[r * width(t)..(r + 1) * width(t)]))
        .copied()
        .collect();
    out
}

/// Ranks below each other: `part_out`.
fn below(parts: &[&Tensor], id: TensorId, g: &Geometry, plan: &Plan) -> Tensor {
    let dtype = parts.first().map_or(DType::F32, |t| t.dtype);
    let bytes: Vec<u8> = parts.iter().flat_map(|t| &t.bytes).copied().collect();
    Tensor { bytes, ..Tensor::zeros(id, plan, g, dtype) }
}

/// `out` of the ranks' parts: summed in float32 in the order of ranks, rounded once. Where ranks are devices, their own sum
/// takes the place of this one.
pub fn reduce(parts: &Tensor, id: TensorId, g: &Geometry, plan: &Plan, lost: Option<usize>) -> Tensor {
    let mut out = Tensor::zeros(id, plan, g, parts.dtype);
    let (rows, cols) = (out.rows, out.cols);
    let (mut row, mut sum) = (vec![0.0; cols], vec![0f32; cols]);
    for r in 0..rows {
        sum.fill(0.0);
        for rank in (0..plan.ranks).filter(|rank| Some(*rank) != lost) {
            parts.read(rank * rows + r, 0..cols, &mut row);
            sum.iter_mut().zip(&row).for_each(|(s, v)| *s += *v as f32);
        }
        row.iter_mut().zip(&sum).for_each(|(v, s)| *v = f64::from(*s));
        out.write(r, 0, &row);
    }
    out
}

/// The file's weight with the rows that ranks hold otherwise.
struct Overlaid<'f> {
    inner: &'f dyn Rows,
    dtype: DType,
    shape: (usize, usize),
    /// Whether ranks showed their shares in the shapes of the file's.
    fits: bool,
    /// Bits of whole rows.
    rows: BTreeMap<usize, Vec<u8>>,
}

impl Rows for Overlaid<'_> {
    fn rows(&self) -> usize {
        self.shape.0
    }
    fn cols(&self) -> usize {
        self.shape.1
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let n = self.dtype.bytes();
        match self.rows.get(&row).and_then(|bits| bits.get(k0 * n..(k0 + out.len()) * n)) {
            _ if !self.fits => out.fill(f64::NAN),
            Some(bits) => self.dtype.decode(bits, out),
            None => {
                self.inner.decode(row, k0, out);
                self.dtype.round_slice(out);
            }
        }
    }
}
