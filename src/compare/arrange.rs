/*!
From an array of a dump to a tensor of the table: what its bits are, which axis is which, which part of it counts, and in
which order pairs of rope stand. Values are never changed: a dtype that can't hold one exactly is an error.
*/

use super::map::Entry;
use crate::trace::read::{Array, Stored};
use mla_numeric::DType;
use mla_reference::{Axis, Geometry, Pairing};

/// An axis in a map.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dim {
    /// Length 1, or left out.
    One,
    /// One of ours.
    Axis(Axis),
    /// Two of ours, one after the other.
    Joint(&'static Joint),
}

/// Axes that software lays one after the other, and the table does not.
#[derive(Debug, PartialEq)]
struct Joint {
    name: &'static str,
    parts: [Axis; 2],
}

/// Keys and values of a head, as kv_b has them; the stacked projection of queries and latents.
static JOINTS: [Joint; 2] = [
    Joint { name: "nope+value", parts: [Axis::Nope, Axis::Value] },
    Joint { name: "q_rank+latent+rope", parts: [Axis::QRank, Axis::LatentRope] },
];

impl Joint {
    fn len(&self, g: &Geometry) -> usize {
        self.parts.iter().map(|a| a.len(g).unwrap_or(0)).sum()
    }
}

const AXES: [Axis; 15] = [
    Axis::Token,
    Axis::Key,
    Axis::Page,
    Axis::Slot,
    Axis::Split,
    Axis::Rank,
    Axis::Head,
    Axis::Hidden,
    Axis::QRank,
    Axis::Latent,
    Axis::Nope,
    Axis::Rope,
    Axis::Value,
    Axis::NopeRope,
    Axis::LatentRope,
];

fn dim(name: &str) -> Result<Dim, String> {
    match name.trim() {
        "1" => Ok(Dim::One),
        other => {
            let joint = JOINTS.iter().find(|j| j.name == other).map(Dim::Joint);
            joint.or_else(|| AXES.into_iter().find(|a| a.name() == other).map(Dim::Axis)).ok_or_else(|| {
                let names = AXES.iter().map(|a| a.name()).chain(JOINTS.iter().map(|j| j.name));
                format!(
                    "no axis is called {other:?}; there are {}, and 1",
                    names.collect::<Vec<_>>().join(", ")
                )
            })
        }
    }
}

/// What is wanted of an array.
pub struct Wanted<'a> {
    /// Axes, slowest first.
    pub axes: &'a [Axis],
    /// Their lengths; None: whatever the array has (the first axis alone).
    pub shape: Vec<Option<usize>>,
    /// The model's widths.
    pub g: &'a Geometry,
}

/// The array's bits as a number format, by the map where the file does not say.
pub fn typed(array: Array, wanted: Option<DType>) -> Result<(DType, Array), String> {
    match (array.stored, wanted) {
        (Stored::Float(is), None) => Ok((is, array)),
        (Stored::Float(is), Some(d)) if is == d => Ok((d, array)),
        (Stored::UInt(n) | Stored::Int(n), Some(d)) if n == d.bytes() => Ok((d, array)),
        (Stored::Float(is), Some(d)) => {
            let mut values = vec![0.0; array.len()];
            is.decode(&array.bytes, &mut values);
            let same = |v: &f64| d.round(*v) == *v || v.is_nan();
            if let Some(v) = values.iter().find(|v| !same(v)) {
                return Err(format!("it is stored in {is}, and its value {v:e} is none of {d}'s"));
            }
            let mut bytes = vec![0; array.len() * d.bytes()];
            d.encode_into(&values, &mut bytes);
            Ok((d, Array { stored: Stored::Float(d), bytes, ..array }))
        }
        (is, None) => {
            Err(format!("it is stored as {is}; say in the map what the bits are: dtype = \"bf16\""))
        }
        (is, Some(d)) => Err(format!("it is stored as {is}, which can't be the bits of {d}")),
    }
}

/// An axis of the array as it is walked: length, elements from one index to the next.
#[derive(Clone, Copy)]
struct Walk {
    len: usize,
    stride: usize,
    first: usize,
}

/// The array with the wanted axes in their order; its shape and bytes.
pub fn arrange(array: &Array, entry: &Entry, wanted: &Wanted) -> Result<(Vec<usize>, Vec<u8>), String> {
    let walks = match &entry.axes {
        Some(axes) => by_names(array, axes, entry, wanted)?,
        None if entry.slice.is_empty() => {
            let shape = by_shape(&array.shape, wanted)?;
            return Ok((shape, array.bytes.clone()));
        }
        None => {
            let long: Vec<usize> = (0..array.shape.len()).filter(|i| array.shape[*i] != 1).collect();
            if long.len() != wanted.axes.len() {
                return Err(format!("it has shape {:?}: name its axes, so that it can be cut", array.shape));
            }
            let mut axes = vec!["1".to_string(); array.shape.len()];
            long.iter().zip(wanted.axes).for_each(|(i, a)| axes[*i] = a.name().into());
            by_names(array, &axes, entry, wanted)?
        }
    };
    let shape: Vec<usize> = walks.iter().map(|w| w.len).collect();
    for ((axis, is), should) in wanted.axes.iter().zip(&shape).zip(&wanted.shape) {
        if should.is_some_and(|n| n != *is) {
            return Err(format!(
                "its axis {} has length {is}, the model and the requests ask for {}",
                axis.name(),
                should.unwrap_or(0)
            ));
        }
    }
    Ok((shape, walk(array, &walks)))
}

/// Copies elements in the order of these axes.
fn walk(array: &Array, walks: &[Walk]) -> Vec<u8> {
    let n = array.stored.bytes();
    let total: usize = walks.iter().map(|w| w.len).product();
    let mut out = Vec::with_capacity(total * n);
    let Some((last, outer)) = walks.split_last() else { return array.bytes.clone() };
    let mut index = vec![0usize; outer.len()];
    for _ in 0..total.checked_div(last.len).unwrap_or(0) {
        let at: usize = index.iter().zip(outer).map(|(i, w)| (w.first + i) * w.stride).sum();
        if last.stride == 1 {
            let from = (at + last.first) * n;
            out.extend_from_slice(&array.bytes[from..from + last.len * n]);
        } else {
            for j in 0..last.len {
                let from = (at + (last.first + j) * last.stride) * n;
                out.extend_from_slice(&array.bytes[from..from + n]);
            }
        }
        for (i, w) in index.iter_mut().zip(outer).rev() {
            *i += 1;
            if *i < w.len {
                break;
            }
            *i = 0;
        }
    }
    out
}

/// Walks of the wanted axes, by the names that the map gives to the array's.
fn by_names(array: &Array, names: &[String], entry: &Entry, wanted: &Wanted) -> Result<Vec<Walk>, String> {
    if names.len() != array.shape.len() {
        return Err(format!("it has shape {:?}, the map names {} axes", array.shape, names.len()));
    }
    let mut found: Vec<(Dim, Walk)> = Vec::new();
    let mut stride = 1;
    for (name, &len) in names.iter().zip(&array.shape).rev() {
        let dims = name.split('*').map(dim).collect::<Result<Vec<Dim>, String>>()?;
        let mut rest = len;
        for (i, &d) in dims.iter().enumerate().rev() {
            let own = match (i, length(d, wanted)) {
                (0, _) => rest,
                (_, Some(n)) if n > 0 && rest.is_multiple_of(n) => n,
                _ => return Err(format!("its axis {name} has length {len}, which can't be taken apart")),
            };
            if d == Dim::One && own != 1 {
                return Err(format!("its axis of length {own} is named 1"));
            }
            found.push((d, Walk { len: own, stride, first: 0 }));
            stride *= own;
            rest /= own;
        }
    }
    for (name, (from, to)) in &entry.slice {
        let d = dim(name)?;
        let (_, w) =
            found.iter_mut().find(|f| f.0 == d).ok_or_else(|| format!("slice: it has no axis {name}"))?;
        if from >= to || *to > w.len {
            return Err(format!("slice: {name} has length {}, not {from} to {to}", w.len));
        }
        (w.first, w.len) = (*from, to - from);
    }
    let mut walks = Vec::new();
    for &axis in wanted.axes {
        let at = found.iter().position(|f| f.0 == Dim::Axis(axis));
        // An axis that is cut to the length of a part of it is that part.
        let joint = || {
            found.iter().position(|(d, w)| match (d, axis) {
                (Dim::Joint(j), _) => j.parts.contains(&axis),
                (Dim::Axis(Axis::NopeRope), Axis::Nope | Axis::Rope)
                | (Dim::Axis(Axis::LatentRope), Axis::Latent | Axis::Rope) => {
                    axis.len(wanted.g) == Some(w.len)
                }
                _ => false,
            })
        };
        let w = match at.or_else(joint) {
            Some(at) => {
                let (d, mut w) = found.swap_remove(at);
                if let Dim::Joint(j) = d
                    && w.len == j.len(wanted.g)
                {
                    let [a, b] = j.parts.map(|a| a.len(wanted.g).unwrap_or(0));
                    (w.first, w.len) = if axis == j.parts[0] { (w.first, a) } else { (w.first + a, b) };
                }
                w
            }
            None => return Err(format!("its axes {} lack {}", names.join(", "), axis.name())),
        };
        walks.push(w);
    }
    if let Some((d, w)) = found.iter().find(|(_, w)| w.len != 1) {
        let name = match d {
            Dim::Axis(a) => a.name(),
            Dim::Joint(j) => j.name,
            Dim::One => "1",
        };
        return Err(format!(
            "its axis {name} of length {} is none of this tensor: cut it to one index",
            w.len
        ));
    }
    Ok(walks)
}

fn length(d: Dim, wanted: &Wanted) -> Option<usize> {
    match d {
        Dim::One => Some(1),
        Dim::Joint(j) => Some(j.len(wanted.g)),
        Dim::Axis(a) => a.len(wanted.g).or_else(|| {
            let at = wanted.axes.iter().position(|x| *x == a)?;
            wanted.shape[at]
        }),
    }
}

/// Whether an array without named axes is the tensor with axes joined, or with ones between: then its bytes stand right.
fn by_shape(is: &[usize], wanted: &Wanted) -> Result<Vec<usize>, String> {
    let tail: Vec<usize> = wanted.shape.iter().skip(1).map(|n| n.unwrap_or(0)).collect();
    let products = |of: &[usize]| -> Vec<usize> {
        let mut p = 1usize;
        let each = of.iter().rev().map(|n| {
            p = p.saturating_mul(*n);
            p
        });
        std::iter::once(1).chain(each.collect::<Vec<_>>()).collect()
    };
    let (mine, inner) = (products(is), products(&tail));
    let all = mine.last().copied().unwrap_or(1);
    let row = inner.last().copied().unwrap_or(1);
    let rows = all.checked_div(row).unwrap_or(0);
    let first = wanted.shape.first().copied().flatten();
    let fits = rows * row == all
        && first.is_none_or(|n| n == rows)
        && (is.len() == 1 || mine.contains(&row))
        && mine.iter().all(|p| *p > row || inner.contains(p) || is.len() == 1);
    if fits {
        return Ok(std::iter::once(rows).chain(tail).collect());
    }
    let names: Vec<String> = wanted
        .axes
        .iter()
        .zip(&wanted.shape)
        .map(|(a, n)| format!("{} {}", a.name(), n.map_or("any".into(), |n| n.to_string())))
        .collect();
    Err(format!(
        "it has shape {is:?}, the model and the requests ask for {}; name its axes, or cut it",
        names.join(", ")
    ))
}

/// Puts pairs of rope that stand in another order into the file's, in the last `rope` of `width` columns.
pub fn reorder(bytes: &mut [u8], n: usize, width: usize, rope: usize, from: Pairing, to: Pairing) {
    if from == to || rope < 4 {
        return;
    }
    let half = rope / 2;
    let mut turned = vec![0; rope * n];
    for row in bytes.chunks_exact_mut(width * n) {
        let part = &mut row[(width - rope) * n..];
        for j in 0..half {
            for (k, at) in [j, j + half].into_iter().enumerate() {
                let adjacent = 2 * j + k;
                let (source, target) = if from == Pairing::Half { (at, adjacent) } else { (adjacent, at) };
                turned[target * n..(target + 1) * n].copy_from_slice(&part[source * n..(source + 1) * n]);
            }
        }
        part.copy_from_slice(&turned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: Geometry = Geometry { hidden: 10, heads: 2, q_rank: 0, latent: 5, rope: 4, nope: 3, value: 2 };

    fn counting(shape: &[usize]) -> Array {
        let n: usize = shape.iter().product();
        let bytes = (0..n).flat_map(|i| (i as u16).to_le_bytes()).collect();
        Array { stored: Stored::UInt(2), shape: shape.to_vec(), bytes }
    }

    fn values(bytes: &[u8]) -> Vec<u16> {
        bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    fn take(shape: &[usize], entry: &str, axes: &[Axis], lens: &[usize]) -> Result<Vec<u16>, String> {
        let entry: Entry = toml::from_str(entry).unwrap();
        let wanted = Wanted { axes, shape: lens.iter().map(|n| Some(*n)).collect(), g: &G };
        arrange(&counting(shape), &entry, &wanted).map(|(_, b)| values(&b))
    }

    #[test]
    fn axes_are_permuted_cut_and_taken_apart() {
        use Axis::*;
        let thv = [Token, Head, Value];
        let plain: Vec<u16> = (0..12).collect();
        assert_eq!(take(&[3, 2, 2], "", &thv, &[3, 2, 2]).unwrap(), plain);
        assert_eq!(take(&[1, 3, 4], "", &thv, &[3, 2, 2]).unwrap(), plain);
        assert_eq!(take(&[12], "", &thv, &[3, 2, 2]).unwrap(), plain);
        // [head, token, value]: element (t, h, v) stands at h·6 + t·2 + v.
        let turned = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11];
        assert_eq!(take(&[2, 3, 2], "axes = ['head', 'token', 'value']", &thv, &[3, 2, 2]).unwrap(), turned);
        assert_eq!(take(&[3, 4], "axes = ['token', 'head*value']", &thv, &[3, 2, 2]).unwrap(), plain);
        let cut = take(&[5, 2, 2], "slice = { token = [1, 4] }", &thv, &[3, 2, 2]).unwrap();
        assert_eq!(cut, (4..16).collect::<Vec<u16>>());
        // kv_b: rows of a head are keys, then values.
        let kv_b = "axes = ['head*nope+value', 'latent']";
        let uv = take(&[10, 5], kv_b, &[Head, Value, Latent], &[2, 2, 5]).unwrap();
        assert_eq!((uv[0], uv[9], uv[10]), (15, 24, 40));
        let uk = take(&[10, 5], kv_b, &[Head, Latent, Nope], &[2, 5, 3]).unwrap();
        assert_eq!(uk[..4], [0, 5, 10, 1]);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        use Axis::*;
        let thv = [Token, Head, Value];
        for (shape, entry, words) in [
            (&[2, 3, 2][..], "", "name its axes"),
            (&[4, 2, 2], "", "name its axes"),
            (&[3, 2, 2], "axes = ['token', 'head']", "names 2 axes"),
            (&[3, 2, 2], "axes = ['token', 'heads', 'value']", "no axis is called"),
            (&[3, 2, 2], "axes = ['token', 'rope', 'value']", "lack head"),
            (&[4, 2, 2], "axes = ['token', 'head', 'value']", "length 4"),
            (&[3, 2, 2, 7], "axes = ['token', 'head', 'value', 'split']", "none of this tensor"),
            (&[3, 2, 2], "slice = { token = [1, 9] }", "slice"),
        ] {
            let e = take(shape, entry, &thv, &[3, 2, 2]).unwrap_err();
            assert!(e.contains(words), "{e}");
        }
    }

    #[test]
    fn pairs_are_put_into_the_files_order() {
        let mut b = counting(&[2, 5]).bytes;
        reorder(&mut b, 2, 5, 4, Pairing::Half, Pairing::Adjacent);
        assert_eq!(values(&b), [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]);
        reorder(&mut b, 2, 5, 4, Pairing::Adjacent, Pairing::Half);
        assert_eq!(values(&b), (0..10).collect::<Vec<u16>>());
    }

    #[test]
    fn no_value_is_changed_by_a_dtype() {
        let f32s = |v: &[f32]| Array {
            stored: Stored::Float(DType::F32),
            shape: vec![v.len()],
            bytes: v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let (_, a) = typed(f32s(&[1.0, -2.5]), Some(DType::Bf16)).unwrap();
        assert_eq!(values(&a.bytes), [0x3f80, 0xc020]);
        assert!(typed(f32s(&[1.001]), Some(DType::Bf16)).unwrap_err().contains("none of bf16"));
        assert!(typed(counting(&[2]), None).unwrap_err().contains("dtype"));
        assert_eq!(typed(counting(&[2]), Some(DType::F16)).unwrap().0, DType::F16);
    }
}
