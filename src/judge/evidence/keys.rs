/*!
Lost keys: of how many of the keys the loss would have shown.

Without key t a row moves by `P_t/(1 − P_t)·(x − v_t)`, of which the share `0.8·rms/ulp` of the elements flips. A key is
*seen* if the flips that its loss makes in all rows that see it would be significant. Taken from a few of the sampled pairs.
*/

use super::{Evidence, Piece};
use crate::judge::sample::Sample;
use crate::judge::stats::flips::log_chernoff;
use mla_reference::Terms;
use mla_reference::attention::Attended;
use std::collections::BTreeMap;

/// By sequence and position: Σ of the shares of flips of the pairs that see the key, in units of 2⁻³² so that no order of
/// threads shows, and how many these are.
pub(super) type Keys = BTreeMap<(usize, usize), (u64, u64)>;
/// A share of 1.
const ONE: f64 = 4_294_967_296.0;

/// Keys of a unit as power needs them.
#[derive(Clone, Debug, Default)]
pub struct LostKeys {
    /// Share of flips that the loss of a key makes, and elements that see it.
    keys: Vec<(f64, f64)>,
    /// Honest share of flips.
    limit: f64,
}

impl LostKeys {
    /// Share of the keys whose loss would have been significant at this level; None where nothing was sampled.
    pub fn seen(&self, log_alpha: f64) -> Option<f64> {
        let seen = |(share, n): &&(f64, f64)| {
            let all = (share + self.limit).min(1.0);
            log_chernoff(all * n, *n, self.limit) <= log_alpha
        };
        let count = self.keys.iter().filter(seen).count();
        (!self.keys.is_empty()).then(|| count as f64 / self.keys.len() as f64)
    }
}

impl Evidence {
    /// Adds what the loss of each key would do to these rows of a piece; `sequence`: whose keys a row of the stage sees.
    pub fn lost_keys(
        &mut self,
        piece: &Piece,
        among: &[usize],
        sample: &Sample,
        sequence: &dyn Fn(usize) -> Option<usize>,
    ) {
        let Terms::Attention { attended, head, lse: false } = piece.terms else { return };
        if Self::wide(self.dtype) || !piece.prediction.emulated() {
            return;
        }
        let at_head = piece.at.1 / self.columns.width;
        for &i in among.iter().filter(|i| sample.takes_few(piece.at.0 + **i, at_head)) {
            let Some(s) = sequence(piece.at.0 + i) else { continue };
            self.pairs_of_keys += 1;
            let x = piece.x.row(i);
            let square = x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64;
            let ulp = self.dtype.spacing(square.sqrt());
            let Attended { p, w, l, range, .. } = attended;
            for (t, (p, w)) in range.clone().zip(p.row(i).iter().zip(w.row(i))) {
                let weight = p * w / l[i];
                if weight.is_nan() || weight <= 0.0 {
                    continue;
                }
                let v = head.v.data.get(t * head.v.stride..).unwrap_or(&[]);
                let apart = v.iter().zip(x).map(|(v, x)| (v - x) * (v - x)).sum::<f64>();
                let moved = weight / (1.0 - weight) * (apart / x.len().max(1) as f64).sqrt();
                let share = (0.8 * moved / ulp).min(1.0);
                let sum = self.keys.entry((s, t)).or_default();
                *sum = (sum.0 + (share * ONE) as u64, sum.1 + 1);
            }
        }
    }

    /// What power needs of them.
    pub fn keys_at_stake(&self) -> LostKeys {
        let pairs = (self.rows.len() * self.columns.heads) as f64;
        let each = pairs / self.pairs_of_keys.max(1) as f64 * self.columns.width as f64;
        let keys = self.keys.values().map(|(sum, n)| (*sum as f64 / ONE / *n as f64, *n as f64 * each));
        LostKeys { keys: keys.collect(), limit: self.whole_limit() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key whose loss flips every second of 1,000 elements shows, one that flips one in 10,000 does not.
    #[test]
    fn losses_that_flip_much_are_seen() {
        let of = |keys| LostKeys { keys, limit: 0.005 }.seen(-20.0);
        assert_eq!(of(vec![(0.5, 1000.0), (1e-4, 1000.0)]), Some(0.5));
        assert_eq!(of(vec![(1e-3, 1e8)]), Some(1.0));
        assert_eq!(of(Vec::new()), None);
    }
}
