/*!
What a tensor that does not fit its original is instead: named only where it then fits.

Each suspicion is the original's values arranged or scaled in another way ([`Rows`] over [`Rows`]). It is tried on rows spread over
the tensor, and believed if, on all rows, the blocks that do not fit are a tenth of those before at most; so a lucky match of a
few rows names nothing.
*/

use super::allowed::Allowed;
use super::fit::{Fit, fit};
use crate::checkpoint::Scales;
use mla_reference::product::Rows;
use mla_reference::product::quantised::TensorScale;
use mla_reference::rows::dense;
use mla_reference::{Geometry, Weight};
use rayon::prelude::*;

/// Rows that a suspicion is tried on first.
const SAMPLE: usize = 96;
/// Part of the blocks below which nothing but their place is said.
const FEW: f64 = 0.005;
/// Correlation from which a factor is one.
const SURE: f64 = 0.9;

/// A tensor with its original in the same arrangement.
pub struct Pair<'a> {
    /// What it holds; of an unsplit kv_b, w_uk.
    pub weight: Weight,
    /// Whether it is the unsplit kv_b.
    pub kv_b: bool,
    /// The file's values.
    pub y: &'a dyn Rows,
    /// The original's.
    pub x: &'a dyn Rows,
    /// What the file's type allows.
    pub rule: Allowed,
    /// Whether the original is stored as plain values.
    pub plain: bool,
    /// The original's scale of the whole tensor.
    pub scale: Option<Scales>,
    /// Blocks of the original's scales, where it has some.
    pub block: Option<(usize, usize)>,
}

/// The original in other arrangements, by name.
type Arranged<'a> = Vec<(String, Box<dyn Rows + 'a>)>;

/// Other values that could stand there, by name; made when they are tried, since some are large.
pub type Others<'a> = Vec<(String, Box<dyn Fn() -> Option<Box<dyn Rows + 'a>> + 'a>)>;

/// What was found, in words.
pub fn cause(p: &Pair, g: &Geometry, first: &Fit, others: Others) -> String {
    let tried = |x: &dyn Rows| {
        let every = p.y.rows().div_ceil(SAMPLE) | 1;
        let some = fit(p.y, x, p.rule, p.plain, every);
        if some.not_finite > 0 || some.correlation < 0.3 {
            return false;
        }
        let all = fit(p.y, x, p.rule, p.plain, 1);
        all.off() * 10 <= first.off() && !all.other_size
    };
    if first.not_finite > 0 {
        return format!("{} values are not finite", first.not_finite);
    }
    // A few blocks are damage, not another arrangement.
    if !first.other_size && (first.off() as f64) < FEW * first.blocks as f64 {
        return String::new();
    }
    for (what, x) in arranged(p, g) {
        if tried(x.as_ref()) {
            return what;
        }
    }
    for (what, make) in others {
        if let Some(x) = make()
            && (x.rows(), x.cols()) == (p.y.rows(), p.y.cols())
            && tried(x.as_ref())
        {
            return what;
        }
    }
    if first.correlation.abs() > SURE && first.factor != 0.0 {
        let scaled = Times { inner: p.x, by: first.factor };
        if tried(&scaled) {
            return factor(first.factor, p.scale);
        }
    }
    if let Some(what) = scale_blocks(p, g).or_else(|| rows_elsewhere(p)) {
        return what;
    }
    if first.correlation.abs() < 0.1 {
        return "nothing of the original, in no arrangement that is tried here: a tensor of another model?"
            .into();
    }
    String::new()
}

/// What a constant factor means.
fn factor(k: f64, scale: Option<Scales>) -> String {
    let near = |a: f64| (k / a - 1.0).abs() < 0.02;
    if near(-1.0) {
        return "the original's values with the sign turned".into();
    }
    let times = format!("the original's values times {k:.4e}");
    let Some(Scales { value, does }) = scale else { return times };
    let (missing, inverted, name, wrongly) = match does {
        TensorScale::Multiplies => (1.0 / value, 1.0 / (value * value), "a factor", "divided by"),
        TensorScale::Divides => (value, value * value, "a divisor", "multiplied by"),
    };
    if near(inverted) {
        format!(
            "{times}: the scale of the whole tensor, {value:.4e}, is {name} there, and the values were {wrongly} it"
        )
    } else if near(missing) {
        format!("{times}: the scale of the whole tensor, {value:.4e}, was left out")
    } else {
        times
    }
}

/// The original arranged in other ways.
fn arranged<'a>(p: &'a Pair, g: &Geometry) -> Arranged<'a> {
    let mut all: Arranged<'a> = Vec::new();
    let rows = p.x.rows();
    let mut order = |what: &str, of: &dyn Fn(usize) -> usize| {
        let order: Vec<usize> = (0..rows).map(of).collect();
        if order.iter().all(|r| *r < rows) {
            all.push((what.to_string(), Box::new(Order { inner: Box::new(p.x), order })));
        }
    };
    let (nope, rope, latent, value) = (g.nope, g.rope, g.latent, g.value);
    // Even rows first, and back.
    let halves = |i: usize| if i < rope / 2 { 2 * i } else { 2 * (i - rope / 2) + 1 };
    let adjacent = |i: usize| if i.is_multiple_of(2) { i / 2 } else { rope / 2 + i / 2 };
    const HALVES: &str =
        "rope rows are in half-split order (even ones first), the original's are in adjacent pairs";
    const ADJACENT: &str = "rope rows are in adjacent pairs, the original's are in half-split order";
    let group = match p.weight {
        _ if p.kv_b => nope + value,
        Weight::WQB | Weight::WQ => nope + rope,
        Weight::WKvA => latent + rope,
        Weight::WUk => latent,
        Weight::WUv => value,
        _ => rows,
    };
    let before = match p.weight {
        Weight::WQB | Weight::WQ => Some(nope),
        Weight::WKvA => Some(latent),
        _ => None,
    };
    if let Some(before) = before {
        let within = |r: usize, f: &dyn Fn(usize) -> usize| {
            let (h, i) = (r / group, r % group);
            h * group + if i < before { i } else { before + f(i - before) }
        };
        order(HALVES, &|r| within(r, &halves));
        order(ADJACENT, &|r| within(r, &adjacent));
        order("rope rows come first, in the original they are the last", &|r| {
            let (h, i) = (r / group, r % group);
            h * group + if i < rope { before + i } else { i - rope }
        });
    }
    if p.kv_b {
        order("value rows come before key rows in each head, in the original key rows are first", &|r| {
            let (h, i) = (r / group, r % group);
            h * group + if i < value { nope + i } else { i - value }
        });
    }
    if group < rows
        && rows.is_multiple_of(group)
        && let Some(heads) = heads_by_rows(p, group)
    {
        let what = moved(&heads);
        order(&what, &|r| heads[r / group] * group + r % group);
    }
    if p.weight == Weight::WO
        && let Some(heads) = heads_by_columns(p, value)
    {
        all.push((moved(&heads), Box::new(Columns { inner: p.x, heads, width: value })));
    }
    if p.x.rows() == p.x.cols() {
        let data = dense(p.x, 0..rows, true).into_raw_vec_and_offset().0;
        all.push(("it is transposed".into(), Box::new(Owned { data, cols: rows })));
    }
    if p.weight == Weight::WUk && !p.kv_b {
        // [H, L, N] as [H, N, L], the bytes as kv_b has them.
        let mut data = Vec::with_capacity(rows * nope);
        for h in 0..g.heads {
            data.extend(dense(p.x, h * latent..(h + 1) * latent, true).into_raw_vec_and_offset().0);
        }
        let what = "its heads are not transposed: they hold kv_b's key rows as they are";
        all.push((what.into(), Box::new(Owned { data, cols: nope })));
    }
    all
}

/// "head 0 is head 1 of the original, …"
fn moved(heads: &[usize]) -> String {
    let mut which: Vec<String> =
        heads.iter().enumerate().filter(|(h, o)| *h != **o).map(|(h, o)| format!("{h} is {o}")).collect();
    let more = which.len().saturating_sub(4);
    which.truncate(4);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("heads are permuted: {} of the original{more}", which.join(", "))
}

/// The most alike head of the original for each head, by some rows; None where that is no other permutation.
fn heads_by_rows(p: &Pair, group: usize) -> Option<Vec<usize>> {
    let heads = p.y.rows() / group;
    let offsets: Vec<usize> = (0..group).step_by(group.div_ceil(12) | 1).collect();
    let read = |w: &dyn Rows, h: usize| {
        let mut line = vec![0.0; w.cols()];
        let mut all = Vec::with_capacity(offsets.len() * line.len());
        for o in &offsets {
            w.decode(h * group + o, 0, &mut line);
            all.extend_from_slice(&line);
        }
        all
    };
    permutation(&each(heads, |h| read(p.y, h)), &each(heads, |h| read(p.x, h)))
}

/// The same where heads are runs of columns.
fn heads_by_columns(p: &Pair, width: usize) -> Option<Vec<usize>> {
    let heads = p.y.cols() / width;
    let rows: Vec<usize> = (0..p.y.rows()).step_by(p.y.rows().div_ceil(24) | 1).collect();
    let read = |w: &dyn Rows| {
        let mut all = vec![Vec::new(); heads];
        let mut line = vec![0.0; w.cols()];
        for r in &rows {
            w.decode(*r, 0, &mut line);
            for (one, part) in all.iter_mut().zip(line.chunks(width)) {
                one.extend_from_slice(part);
            }
        }
        all
    };
    permutation(&read(p.y), &read(p.x))
}

fn each<T: Send>(n: usize, f: impl Fn(usize) -> T + Send + Sync) -> Vec<T> {
    (0..n).into_par_iter().map(f).collect()
}

fn permutation(ys: &[Vec<f64>], xs: &[Vec<f64>]) -> Option<Vec<usize>> {
    let best: Vec<usize> = each(ys.len(), |h| {
        let like = |x: &Vec<f64>| correlation(&ys[h], x);
        (0..xs.len()).max_by(|a, b| like(&xs[*a]).total_cmp(&like(&xs[*b]))).unwrap_or(h)
    });
    let mut seen = vec![false; xs.len()];
    best.iter().for_each(|h| seen[*h] = true);
    let identity = best.iter().enumerate().all(|(h, o)| h == *o);
    (!identity && seen.iter().all(|s| *s)).then_some(best)
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let size = (dot(a, a) * dot(b, b)).sqrt();
    if size > 0.0 { dot(a, b) / size } else { 0.0 }
}

/// Blocks of the original's scales in which all values are off by one factor.
fn scale_blocks(p: &Pair, g: &Geometry) -> Option<String> {
    let (height, _) = p.block?;
    let (mut a, mut b) = (vec![0.0; p.x.cols()], vec![0.0; p.x.cols()]);
    let mut off: Vec<(usize, f64)> = Vec::new();
    let mut other = false;
    for (i, first) in (0..p.x.rows()).step_by(height).enumerate() {
        let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
        for row in first..p.x.rows().min(first + height) {
            p.x.decode(row, 0, &mut a);
            p.y.decode(row, 0, &mut b);
            for (a, b) in a.iter().zip(&b) {
                (xx, xy, yy) = (xx + a * a, xy + a * b, yy + b * b);
            }
        }
        let k = if xx > 0.0 { xy / xx } else { 1.0 };
        if (k - 1.0).abs() > 0.1 {
            // Columns have scales of their own: correlation of the whole need not be near 1.
            other |= yy > 0.0 && xy.abs() < 0.3 * (xx * yy).sqrt();
            off.push((i, k));
        }
    }
    let (&(first, k), &(last, _)) = off.first().zip(off.last())?;
    if other || off.len() != last - first + 1 {
        return None;
    }
    let (from, to) = (first * height, p.x.rows().min((last + 1) * height) - 1);
    let rope = if p.weight == Weight::WKvA && from == g.latent { ", which are the rope rows" } else { "" };
    let how =
        if k.abs() < 1e-12 { "are zero".into() } else { format!("are the original's times {k:.3e} or so") };
    let scales = if first == last { format!("row {first}") } else { format!("rows {first} to {last}") };
    Some(format!(
        "rows {from} to {to}{rope} {how}: {scales} of the original's scales, {height} rows each, was lost or taken from elsewhere"
    ))
}

/// Rows that are the original's, but other ones.
fn rows_elsewhere(p: &Pair) -> Option<String> {
    let n = p.y.rows();
    if n < 4 {
        return None;
    }
    let sample: Vec<usize> = (0..n).step_by(n.div_ceil(24) | 1).collect();
    let read = |w: &dyn Rows, r: usize| {
        let mut line = vec![0.0; w.cols()];
        w.decode(r, 0, &mut line);
        line
    };
    let ys: Vec<Vec<f64>> = sample.iter().map(|r| read(p.y, *r)).collect();
    let likes: Vec<Vec<f64>> = each(n, |r| {
        let x = read(p.x, r);
        ys.iter().map(|y| correlation(y, &x)).collect()
    });
    let mut found = Vec::new();
    for (i, row) in sample.iter().enumerate() {
        let (best, like) = (0..n).map(|r| (r, likes[r][i])).max_by(|a, b| a.1.total_cmp(&b.1))?;
        if best != *row && like > SURE {
            found.push(format!("{row} is {best}"));
        }
    }
    let many = found.len() * 4 >= sample.len();
    found.truncate(4);
    many.then(|| format!("rows are in another order: {} of the original", found.join(", ")))
}

/// Values times a factor.
struct Times<'a> {
    inner: &'a dyn Rows,
    by: f64,
}

impl Rows for Times<'_> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(row, k0, out);
        out.iter_mut().for_each(|v| *v *= self.by);
    }
}

/// Rows in another order.
pub(super) struct Order<'a> {
    pub(super) inner: Box<dyn Rows + 'a>,
    pub(super) order: Vec<usize>,
}

impl Rows for Order<'_> {
    fn rows(&self) -> usize {
        self.order.len()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        self.inner.decode(self.order[row], k0, out);
    }
}

/// Runs of columns in another order; whole rows only.
struct Columns<'a> {
    inner: &'a dyn Rows,
    heads: Vec<usize>,
    width: usize,
}

impl Rows for Columns<'_> {
    fn rows(&self) -> usize {
        self.inner.rows()
    }
    fn cols(&self) -> usize {
        self.inner.cols()
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        let mut line = vec![0.0; self.cols()];
        self.inner.decode(row, 0, &mut line);
        for (i, o) in out.iter_mut().enumerate() {
            let c = k0 + i;
            *o = line[self.heads[c / self.width] * self.width + c % self.width];
        }
    }
}

/// A matrix that stands in memory.
struct Owned {
    data: Vec<f64>,
    cols: usize,
}

impl Rows for Owned {
    fn rows(&self) -> usize {
        self.data.len() / self.cols.max(1)
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn decode(&self, row: usize, k0: usize, out: &mut [f64]) {
        out.copy_from_slice(&self.data[row * self.cols + k0..][..out.len()]);
    }
}
