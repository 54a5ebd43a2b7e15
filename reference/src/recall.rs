/*!
Results that were computed before from the same bits: the seam for a cache of the reference.

Only what costs time is asked for: products and attention. What is kept is what was computed, float64 bit for bit, so that
nothing that is made of it can tell the difference. Whoever implements [`Recall`] answers for one stage with given
inputs; this crate knows of no files.
*/

use crate::attention::{Attended, Upper};
use crate::evaluate::Product;
use ndarray::Array2;
use std::ops::Range;

/// Which part of a stage's computation: first row and column of the stage's matrix, and the first key.
pub type Place = (usize, usize, usize);

/// Numbers of one stage with given inputs, by place. Asked by several threads.
pub trait Recall: Sync {
    /// What was kept.
    fn get(&self, place: Place) -> Option<Vec<f64>>;
    /// Keeps some.
    fn put(&self, place: Place, numbers: &[&[f64]]);
}

/// Where an evaluator remembers, if it does.
pub type Memory<'a> = Option<&'a dyn Recall>;

/// Takes numbers one after the other.
struct Taking(std::vec::IntoIter<f64>);

impl Taking {
    fn list(&mut self, n: usize) -> Option<Vec<f64>> {
        let some: Vec<f64> = self.0.by_ref().take(n).collect();
        (some.len() == n).then_some(some)
    }
    fn matrix(&mut self, rows: usize, cols: usize) -> Option<Array2<f64>> {
        Array2::from_shape_vec((rows, cols), self.list(rows * cols)?).ok()
    }
    /// Nothing may be left.
    fn end<T>(mut self, all: T) -> Option<T> {
        self.0.next().is_none().then_some(all)
    }
}

/// A slice of a matrix that owns its memory in order.
fn flat(m: &Array2<f64>) -> &[f64] {
    m.as_slice().unwrap_or(&[])
}

/// A product of `rows` × `cols` results, recalled or made; `sized`: with what bounds ask for.
pub(crate) fn product(
    memory: Memory,
    place: Place,
    (rows, cols, sized): (usize, usize, bool),
    make: impl FnOnce() -> Product,
) -> Product {
    let Some(memory) = memory else { return make() };
    let n = |n: usize| if sized { n } else { 0 };
    let read = |numbers: Vec<f64>| {
        let mut take = Taking(numbers.into_iter());
        let x = take.matrix(rows, cols)?;
        let size = take.matrix(n(rows), n(cols))?;
        let (a_norms, w_norms) = (take.list(n(rows))?, take.list(n(cols))?);
        take.end(Product { x, size, a_norms, w_norms })
    };
    memory.get(place).and_then(read).unwrap_or_else(|| {
        let made = make();
        memory.put(place, &[flat(&made.x), flat(&made.size), &made.a_norms, &made.w_norms]);
        made
    })
}

/// Attention of `rows` queries to a range of keys with values of `width`, recalled or made.
pub(crate) fn attention(
    memory: Memory,
    place: Place,
    (rows, range, width): (usize, Range<usize>, usize),
    make: impl FnOnce() -> Attended,
) -> Attended {
    let Some(memory) = memory else { return make() };
    let keys = range.len();
    let read = |numbers: Vec<f64>| {
        let mut take = Taking(numbers.into_iter());
        let which = take.list(3)?;
        let (x, lse) = (take.matrix(rows, width)?, take.list(rows)?);
        let (s, p, w) = (take.matrix(rows, keys)?, take.matrix(rows, keys)?, take.matrix(rows, keys)?);
        let l = take.list(rows)?;
        let upper = match which[0] != 0.0 {
            true => Some(Upper {
                first: which[1] as usize,
                p: take.matrix(rows, keys)?,
                w: take.matrix(rows, keys)?,
            }),
            false => None,
        };
        let raw = if which[2] != 0.0 { Some(take.matrix(rows, keys)?) } else { None };
        take.end(Attended { range: range.clone(), x, lse, s, p, w, l, upper, raw })
    };
    memory.get(place).and_then(read).unwrap_or_else(|| {
        let made = make();
        let flag = |b: bool| f64::from(u8::from(b));
        let first = made.upper.as_ref().map_or(0, |u| u.first) as f64;
        let which = [flag(made.upper.is_some()), first, flag(made.raw.is_some())];
        let (s, p, w) = (flat(&made.s), flat(&made.p), flat(&made.w));
        let mut numbers: Vec<&[f64]> = vec![&which, flat(&made.x), &made.lse, s, p, w, &made.l];
        if let Some(u) = &made.upper {
            numbers.extend([flat(&u.p), flat(&u.w)]);
        }
        numbers.extend(made.raw.as_ref().map(flat));
        // What does not lie in order is not kept: read back, it would be too short.
        memory.put(place, &numbers);
        made
    })
}
