/*!
Right values under another layout of memory: rows with another stride, padded heads, heads first, columns that nobody wrote, fewer
bits than the dtype has.

A layout is put back as it is in [`super::order`]: every value that stands somewhere is judged where it belongs, bit for bit; what
stands nowhere takes the reference's. Values of fewer bits are only excused by as much as those bits are apart.
*/

use super::super::evidence::Evidence;
use super::Hypothesis;
use super::change::Change;
use super::scene::Scene;
use crate::report::finding::ranges;
use crate::trace::Tensor;

const FAMILY: &str = "layout";
/// Strides around the row's own length that are tried.
const REACH: usize = 512;
/// Elements of a row that a stride is recognised by.
const PROBE: usize = 24;
/// How near float32 values of one element are, as a share.
const CLOSE: f64 = 1e-4;
/// Least bits that values are said to be rounded to: of fewer almost anything would be near.
const FEWEST: u32 = 3;
/// Share of the phase's elements that must stand somewhere.
const HELD: f64 = 0.5;

/// What moves values: strides, padding, heads first.
pub(super) fn moved<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    if scene.odd_share() < 1e-3 || scene.rows.len() < 2 {
        return Vec::new();
    }
    [strides(scene), padded(scene), heads_first(scene)].into_iter().flatten().collect()
}

/// What loses values: columns, bits.
pub(super) fn lost<'a>(scene: &Scene<'a>) -> Vec<Hypothesis<'a>> {
    [columns(scene), bits(scene)].into_iter().flatten().collect()
}

/// Whether the engine's value at one place is not the reference's at another. Of float32, whose last bits nobody predicts, values
/// agree within [`CLOSE`].
fn differs(scene: &Scene, (r, c): (usize, usize), (row, col): (usize, usize)) -> bool {
    let (t, x) = (scene.tensor, &scene.rounded);
    if !Evidence::wide(t.dtype) {
        return t.bits(r, c) != x.bits(row, col);
    }
    let (a, b) = (t.get(r, c), x.get(row, col));
    !(a.is_nan() && b.is_nan() || a == b || (a - b).abs() <= CLOSE * a.abs().max(b.abs()))
}

/// The engine's values put where `to` says that they belong: (row, column) → the same, None where they belong nowhere.
fn put_back<'a>(
    scene: &Scene<'a>,
    (name, text): (String, String),
    to: impl Fn(usize, usize) -> Option<(usize, usize)>,
) -> Option<Hypothesis<'a>> {
    let t = scene.tensor;
    let mut out: Tensor = scene.rounded.clone();
    let (mut held, mut bad) = (0usize, 0usize);
    for &r in &scene.rows {
        for c in 0..t.cols {
            if let Some((row, col)) = to(r, c) {
                let bits = t.bits(r, c);
                held += 1;
                bad += usize::from(differs(scene, (r, c), (row, col)));
                out.set_bits(row, col, bits);
            }
        }
    }
    let all = scene.rows.len() * t.cols;
    if (held as f64) < HELD * all as f64 {
        return None;
    }
    let share = bad as f64 / held.max(1) as f64;
    Some(Hypothesis::new(FAMILY, name, text, Change::tensors(vec![(scene.id, out)], share)))
}

/// Rows that begin at another place of memory than row times width.
fn strides<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let (t, cols) = (scene.tensor, scene.tensor.cols);
    let row = scene.rows.iter().copied().find(|r| *r > 0 && scene.odd_row(*r) > 0)?;
    let flat = |i: usize| (i / cols < t.rows).then(|| (i / cols, i % cols));
    let step = cols.div_ceil(PROBE).max(1);
    let fits = |stride: &usize| {
        let probes = (0..cols).step_by(step).filter_map(|c| Some((c, flat(row * stride + c)?)));
        let (same, all) = probes.fold((0, 0), |(same, all), (c, (r, k))| {
            (same + usize::from(t.bits(row, c) == scene.rounded.bits(r, k)), all + 1)
        });
        all >= 4 && same * 10 >= all * 9
    };
    let stride = (cols.saturating_sub(REACH).max(1)..=cols + REACH).filter(|s| *s != cols).find(fits)?;
    let (by, way) = if stride > cols { (stride - cols, "long") } else { (cols - stride, "short") };
    let name = format!("rows with stride {stride}");
    let text =
        format!("rows of {} are read with a stride of {stride} elements, {by} too {way}", scene.id.stage);
    put_back(scene, (name, text), |r, c| flat(r * stride + c))
}

/// Heads padded with zeros to another width, of which as many columns are taken as there should be.
fn padded<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let (g, width) = (&scene.spec().geometry, scene.width);
    if scene.heads < 2 {
        return None;
    }
    for wide in [g.key(), g.latent, g.cache(), width.next_power_of_two()] {
        let place = |c: usize| (c % wide < width).then(|| c / wide * width + c % wide);
        let zero = |r: &usize| {
            (0..scene.tensor.cols).filter(|c| place(*c).is_none()).all(|c| scene.tensor.get(*r, c) == 0.0)
        };
        if wide > width && scene.rows.iter().all(zero) {
            let name = format!("heads padded to {wide}");
            let text = format!(
                "heads of {} are padded with zeros from {width} to {wide} columns, and the padding was not taken out",
                scene.id.stage
            );
            return put_back(scene, (name, text), |r, c| place(c).map(|c| (r, c)));
        }
    }
    None
}

/// Stored as [head, row, …], read as [row, head, …].
fn heads_first<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let (heads, width, rows) = (scene.heads, scene.width, scene.tensor.rows);
    if heads < 2 {
        return None;
    }
    let text = format!("{} is stored head by head and read row by row", scene.id.stage);
    put_back(scene, ("stored head by head".into(), text), |r, c| {
        let cell = r * heads + c / width;
        Some((cell % rows, cell / rows * width + c % width))
    })
}

/// Columns that are zero in every row.
fn columns<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let t = scene.tensor;
    if scene.rows.len() < 2 {
        return None;
    }
    let empty = |c: &usize| {
        let zero = |r: &usize| t.get(*r, *c) == 0.0;
        scene.rows.iter().all(zero) && scene.rows.iter().any(|r| scene.rounded.get(*r, *c) != 0.0)
    };
    let wrong: Vec<usize> = (0..t.cols).filter(empty).collect();
    if wrong.is_empty() || wrong.len() == t.cols {
        return None;
    }
    // Heads that are zero throughout are said to be that ([`super::rows`]).
    let in_head = |h: usize| wrong.iter().filter(|c| **c / scene.width == h).count();
    if (0..scene.heads).all(|h| in_head(h) == 0 || in_head(h) == scene.width) {
        return None;
    }
    let mut tensor = scene.copy_of();
    for &r in &scene.rows {
        wrong.iter().for_each(|c| tensor.set_bits(r, *c, scene.rounded.bits(r, *c)));
    }
    let first: Vec<usize> =
        wrong.iter().filter(|c| *c / scene.width == wrong[0] / scene.width).copied().collect();
    let of_head: Vec<usize> = first.iter().map(|c| c % scene.width).collect();
    let everywhere = of_head.len() * scene.heads == wrong.len();
    let which = match (scene.heads > 1, everywhere) {
        (true, true) => format!("columns {} of each head", ranges(&of_head)),
        _ => format!("columns {}", ranges(&wrong)),
    };
    let text = format!("{which} are zero in every row: never computed");
    let change = Change { tensors: vec![(scene.id, tensor)], counted: Some(0.0), ..Change::default() };
    Some(Hypothesis::new(FAMILY, "columns zero", text, change))
}

/// Bits of a value's significand, the leading one among them.
fn significant(v: f64) -> u32 {
    if v == 0.0 || !v.is_finite() {
        return 0;
    }
    let fraction = v.to_bits() & ((1 << 52) - 1);
    if fraction == 0 { 1 } else { 53 - fraction.trailing_zeros() }
}

/// Values that were rounded to fewer bits than their dtype has.
fn bits<'a>(scene: &Scene<'a>) -> Option<Hypothesis<'a>> {
    let t = scene.tensor;
    let elements = || scene.rows.iter().flat_map(|r| (0..t.cols).map(move |c| (*r, c)));
    let most = |of: &Tensor| elements().map(|(r, c)| significant(of.get(r, c))).max().unwrap_or(0);
    let (own, right) = (most(t), most(&scene.rounded));
    // A few values have few bits by chance; many have not.
    if own < FEWEST || own >= right || elements().count() < 64 {
        return None;
    }
    let mut tensor = scene.copy_of();
    for (r, c) in elements() {
        let (o, x) = (t.get(r, c), scene.rounded.get(r, c));
        let (_, exponent) = libm::frexp(o.abs().max(x.abs()));
        // Half a unit of the bits that are left, and one of the dtype's for what was rounded before.
        let near = libm::ldexp(0.5, exponent - own as i32) + libm::ldexp(1.0, exponent - right as i32);
        if (o - x).abs() <= near {
            tensor.set_bits(r, c, scene.rounded.bits(r, c));
        }
    }
    let text = format!(
        "{} is rounded to {own} bits of the significand, its dtype and the reference have {right}",
        scene.id.stage
    );
    let change = Change { tensors: vec![(scene.id, tensor)], counted: Some(0.0), ..Change::default() };
    Some(Hypothesis::new("precision", format!("rounded to {own} bits"), text, change))
}

#[cfg(test)]
mod tests {
    use super::significant;

    #[test]
    fn bits_of_a_significand() {
        for (v, n) in [(0.0, 0), (1.0, 1), (-4.0, 1), (1.5, 2), (0.625, 3), (1.0078125, 8), (f64::NAN, 0)] {
            assert_eq!(significant(v), n, "{v}");
        }
    }
}
