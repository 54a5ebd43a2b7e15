/*!
What the costly statistics look at: a sample by seed, and how large it is.

Bounds and flips are counted on every element. A direction costs a dozen exponentials an element and a product
with V a row, and needs far fewer elements than there are: its standard error on the sample of [`ELEMENTS`]
elements is about 1.5·10⁻⁵ for a gain of 16-bit data, a tenth of what is promised. So of each unit some *pairs*
(row, head) are drawn, and of each pair some columns, evenly spaced from a drawn first one. The draw is a function
of seed, tensor, row and head alone: no thread, chunk or other request changes it.
*/

use crate::trace::TensorId;
use mla_reference::Form;

/// Elements of a unit that directions look at, at most (about).
pub const ELEMENTS: usize = 24_576;
/// Pairs that are taken where there are as many, however wide they are.
const PAIRS: usize = 256;

/// The sample of one unit.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    key: u64,
    /// A pair is taken if its hash is below this.
    limit: u64,
    /// Columns of a pair.
    columns: usize,
}

/// SplitMix64's mixing of a word.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Sample {
    /// Of a unit with `pairs` pairs of `width` columns each.
    pub fn new(seed: u64, id: TensorId, pairs: usize, width: usize) -> Sample {
        let width = width.max(1);
        let form = match id.form {
            None => 0,
            Some(Form::Fused) => 1,
            Some(Form::Absorbed) => 2,
        };
        let key = mix(mix(seed) ^ (id.stage as u64) << 8 ^ form);
        // Narrow pairs: more of them; wide ones: fewer columns of each.
        let wanted = PAIRS.max(ELEMENTS / width);
        let taken = wanted.min(pairs.max(1));
        let limit =
            if wanted >= pairs { u64::MAX } else { (u64::MAX / pairs as u64).saturating_mul(taken as u64) };
        Sample { key, limit, columns: (ELEMENTS / taken).clamp(1, width) }
    }

    fn hash(&self, row: usize, head: usize) -> u64 {
        mix(self.key ^ mix((row as u64) << 20 ^ head as u64))
    }

    /// Whether a pair is taken.
    pub fn takes(&self, row: usize, head: usize) -> bool {
        self.hash(row, head) <= self.limit
    }

    /// Whether a pair is one of the few that what costs even more looks at: an eighth of a sample of many.
    pub fn takes_few(&self, row: usize, head: usize) -> bool {
        let limit = if self.limit == u64::MAX { self.limit } else { self.limit / 8 };
        self.hash(row, head) <= limit
    }

    /// Columns of a pair, out of `width`, ascending.
    pub fn columns(&self, row: usize, head: usize, width: usize) -> impl Iterator<Item = usize> + use<> {
        let step = width.div_ceil(self.columns).max(1);
        let first = (mix(self.hash(row, head)) % step as u64) as usize;
        (first..width).step_by(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::Stage;

    #[test]
    fn small_units_are_taken_whole_and_large_ones_in_part() {
        let id = TensorId::shared(Stage::Q);
        let all = Sample::new(1, id, 100, 64);
        assert!((0..100).all(|i| all.takes(i, 3)));
        assert_eq!(all.columns(5, 0, 64).count(), 64);
        let (rows, heads, width) = (1000, 64, 256);
        let some = Sample::new(1, id, rows * heads, width);
        let pairs: Vec<_> = (0..rows)
            .flat_map(|r| (0..heads).map(move |h| (r, h)))
            .filter(|(r, h)| some.takes(*r, *h))
            .collect();
        // A binomial number around 256: six standard deviations.
        assert!((160..=352).contains(&pairs.len()), "{}", pairs.len());
        let elements: usize = pairs.iter().map(|(r, h)| some.columns(*r, *h, width).count()).sum();
        assert!((ELEMENTS / 2..ELEMENTS * 2).contains(&elements), "{elements}");
        // All heads and both parities of columns are among them.
        let heads_seen: std::collections::HashSet<_> = pairs.iter().map(|(_, h)| h).collect();
        assert!(heads_seen.len() > 55);
        let odd = pairs.iter().flat_map(|(r, h)| some.columns(*r, *h, width)).filter(|c| c % 2 == 1).count();
        assert!(odd * 4 > elements && odd * 4 < elements * 3);
        let again = Sample::new(2, id, rows * heads, width);
        assert!(pairs.iter().any(|(r, h)| !again.takes(*r, *h)));
    }
}
