/*!
w_uk and w_uv taken out of a kv_b that is put together in another way: rows of K and V of each head in turn ([K0 V0 K1 V1 …]),
in halves ([K0 K1 … V0 V1 …]), or V first. The file's two weights say what stands in each row.
*/

use super::{About, Guess, MOST, Pair, Predict, held};
use mla_reference::{Geometry, Weight};
use std::rc::Rc;

/// A row of kv_b: of K or V, head, index in it.
#[derive(Clone, Copy, PartialEq)]
struct Row {
    value: bool,
    head: usize,
    at: usize,
}

/// How kv_b's rows lie: row number to row, and back.
#[derive(Clone, Copy)]
enum Laid {
    /// K, then V of each head.
    Heads,
    /// V, then K of each head.
    ValueFirst,
    /// All K, then all V, of so many heads at a time.
    Halves(usize),
}

impl Laid {
    fn number(self, g: &Geometry, r: Row) -> usize {
        let (n, v) = (g.nope, g.value);
        match self {
            Laid::Heads => r.head * (n + v) + if r.value { n + r.at } else { r.at },
            Laid::ValueFirst => r.head * (n + v) + if r.value { r.at } else { v + r.at },
            Laid::Halves(group) => {
                let (first, h) = (r.head / group * group * (n + v), r.head % group);
                first + if r.value { group * n + h * v + r.at } else { h * n + r.at }
            }
        }
    }

    fn row(self, g: &Geometry, number: usize) -> Row {
        let (n, v) = (g.nope, g.value);
        let (head, at) = (number / (n + v), number % (n + v));
        match self {
            Laid::Heads if at < n => Row { value: false, head, at },
            Laid::Heads => Row { value: true, head, at: at - n },
            Laid::ValueFirst if at < v => Row { value: true, head, at },
            Laid::ValueFirst => Row { value: false, head, at: at - v },
            Laid::Halves(group) => {
                let (first, at) = (head / group * group, number % (group * (n + v)));
                match at.checked_sub(group * n) {
                    None => Row { value: false, head: first + at / n, at: at % n },
                    Some(at) => Row { value: true, head: first + at / v, at: at % v },
                }
            }
        }
    }
}

/// What a kv_b would give that is laid in one way and read in another.
pub fn guesses<'p>(pair: &Pair<'p>, about: &About<'p>) -> Vec<Guess<'p>> {
    let (g, weight) = (*about.geometry, pair.weight);
    let other = match weight {
        Weight::WUk => Weight::WUv,
        Weight::WUv => Weight::WUk,
        _ => return Vec::new(),
    };
    let Some(other) = about.sibling(other) else { return Vec::new() };
    let values = pair.file.rows() * pair.file.cols() + other.rows() * other.cols();
    if values > MOST || g.nope == 0 || g.value == 0 || g.heads == 0 {
        return Vec::new();
    }
    let (own, other) = (Rc::new(held(pair.file, pair.dtype)), Rc::new(held(other, pair.dtype)));
    let (k, v) = if weight == Weight::WUk { (own, other) } else { (other, own) };
    let mut ways = vec![
        (
            Laid::Heads,
            Laid::Halves(g.heads),
            "kv_b is taken as all K, then all V, though it lies head by head".to_string(),
        ),
        (
            Laid::Halves(g.heads),
            Laid::Heads,
            "kv_b is taken head by head, though it lies as all K, then all V".to_string(),
        ),
        (
            Laid::ValueFirst,
            Laid::Heads,
            "K and V of kv_b are swapped: V comes first in each head".to_string(),
        ),
    ];
    if g.nope != g.value {
        let text = "K and V of kv_b are swapped: each head is read as V, then K, though K comes first";
        ways.push((Laid::Heads, Laid::ValueFirst, text.to_string()));
    }
    if about.ranks > 1 && g.heads.is_multiple_of(about.ranks) && g.heads > about.ranks {
        let group = Laid::Halves(g.heads / about.ranks);
        let text = |how: &str| format!("in each rank kv_b is taken {how}");
        ways.push((Laid::Heads, group, text("as all K, then all V, though it lies head by head")));
        ways.push((group, Laid::Heads, text("head by head, though it lies as all K, then all V")));
    }
    let guess = |(laid, read, text): (Laid, Laid, String)| {
        let (k, v) = (k.clone(), v.clone());
        // What stands where a row is looked for.
        let found =
            move |value: bool, head: usize, at: usize| laid.row(&g, read.number(&g, Row { value, head, at }));
        let element = move |r: Row, l: usize| match r.value {
            false => k[(r.head * g.latent + l) * g.nope + r.at],
            true => v[(r.head * g.value + r.at) * g.latent + l],
        };
        let row: Predict<'p> = if weight == Weight::WUk {
            Box::new(move |i, out| {
                let (head, l) = (i / g.latent, i % g.latent);
                out.iter_mut()
                    .enumerate()
                    .for_each(|(n, o)| *o = f64::from(element(found(false, head, n), l)));
            })
        } else {
            Box::new(move |i, out| {
                let from = found(true, i / g.value, i % g.value);
                out.iter_mut().enumerate().for_each(|(l, o)| *o = f64::from(element(from, l)));
            })
        };
        Guess { name: format!("{weight} out of kv_b laid otherwise"), text, row }
    };
    ways.into_iter().map(guess).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every layout is a numbering: each row has its own number, and the number gives the row back.
    #[test]
    fn rows_and_numbers_belong_to_each_other() {
        let g = Geometry { hidden: 8, heads: 4, q_rank: 0, latent: 5, rope: 2, nope: 3, value: 2 };
        for laid in [Laid::Heads, Laid::ValueFirst, Laid::Halves(4), Laid::Halves(2)] {
            let mut seen = [false; 20];
            for head in 0..4 {
                for (value, n) in [(false, 3), (true, 2)] {
                    for at in 0..n {
                        let row = Row { value, head, at };
                        let number = laid.number(&g, row);
                        assert!(!std::mem::replace(&mut seen[number], true));
                        assert!(laid.row(&g, number) == row);
                    }
                }
            }
        }
        // Two heads at a time: rows 0..6 are K of heads 0 and 1, rows 6..10 their V.
        assert_eq!(Laid::Halves(2).number(&g, Row { value: true, head: 1, at: 0 }), 8);
        assert_eq!(Laid::Halves(4).number(&g, Row { value: true, head: 1, at: 0 }), 14);
    }
}
