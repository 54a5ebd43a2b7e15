/*!
Judging a selection: whether the keys that an engine chose are those with the largest logits, as far as rounding lets it know.

Two lists of keys that differ prove nothing: near the cut an honest engine's last bits decide. What is known is each logit l_s and
how far an honest engine's may be from it, e_s. A set S is one that honest logits can give if and only if

```text
max over dropped b of (l_b − e_b)  ≤  min over chosen a of (l_a + e_a)
```

(raise what was chosen and lower what was dropped as far as the bounds go: if the cut still fails then, it fails for all honest logits).
So the rule is exact: it accuses no honest engine, and what it lets pass an honest engine may give. With the engine's own recorded
logits e is 0, and only keys of equal logits may stand for each other. Everything else is no matter of rounding: ids that are no
keys of the request or that the token does not see, doubles, too few, padding (−1) in front of ids, an order that was promised.
*/

use super::Verdict;
use mla_numeric::U;
use mla_reference::{Indexer, Plan};
use ndarray::{Array2, ArrayView2, s};

/// What ids count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Positions within the request.
    Position,
    /// Slots of the paged cache.
    Slot,
}

/// What order an engine promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// None.
    Any,
    /// The largest logit first.
    Descending,
    /// The lowest position first.
    Position,
}

/// What is wrong with a token's selection, whatever rounding did.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Wrong {
    /// No key of any request, and not −1.
    NoKey { id: i64 },
    /// A key of another sequence: its request.
    Foreign { id: i64, request: usize },
    /// A key that comes after the token.
    Unseen { position: usize },
    /// More than once.
    Double { position: usize },
    /// Padding in front of an id.
    Padding { at: usize },
    /// Not as many as there are to choose: all that are seen, top_k at most.
    Count { found: usize, wanted: usize },
    /// A logit that decides is not a number.
    NotANumber { position: usize },
    /// A key was chosen in front of a better one: `by` is how much worse it is, `bound` what rounding may do.
    Worse { chosen: usize, dropped: usize, by: f64, bound: f64 },
    /// The order is not the promised one, from this place on.
    Order { at: usize },
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wrong::NoKey { id } => write!(f, "{id} is the id of no key"),
            Wrong::Foreign { id, request } => write!(f, "{id} is the id of a key of request {request}"),
            Wrong::Unseen { position } => write!(f, "key {position} comes after the token"),
            Wrong::Double { position } => write!(f, "key {position} is there more than once"),
            Wrong::Padding { at } => write!(f, "padding at {at}, in front of ids"),
            Wrong::Count { found, wanted } => write!(f, "{found} keys where {wanted} should be"),
            Wrong::NotANumber { position } => write!(f, "the logit of key {position} is not a number"),
            Wrong::Worse { chosen, dropped, by, bound } => write!(
                f,
                "key {chosen} was chosen and key {dropped} was not, whose logit is larger by {by:.3e}; rounding explains {bound:.3e}"
            ),
            Wrong::Order { at } => write!(f, "not in the promised order from place {at} on"),
        }
    }
}

/// What a token chose from.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Logits of the keys of the sequence, by position.
    pub logits: &'a [f64],
    /// How far an honest engine's may be from them; empty: not at all.
    pub slack: &'a [f64],
    /// How many keys, from the first on, the token sees.
    pub visible: usize,
    /// Keys that are kept.
    pub top_k: usize,
}

impl Row<'_> {
    fn slack(&self, s: usize) -> f64 {
        self.slack.get(s).copied().unwrap_or(0.0)
    }

    /// Judges chosen positions: whether they are the reference's own set, or what is wrong.
    ///
    /// # Errors
    /// The first thing that is wrong, what is exact before what rounding may explain.
    pub fn judge(&self, chosen: &[usize], order: Order) -> Result<bool, Wrong> {
        let seen = self.visible.min(self.logits.len());
        let mut taken = vec![false; seen];
        for &position in chosen {
            match taken.get_mut(position) {
                None => return Err(Wrong::Unseen { position }),
                Some(true) => return Err(Wrong::Double { position }),
                Some(free) => *free = true,
            }
        }
        let wanted = seen.min(self.top_k);
        if chosen.len() != wanted {
            return Err(Wrong::Count { found: chosen.len(), wanted });
        }
        if wanted < seen {
            if let Some(position) = (0..seen).find(|s| self.logits[*s].is_nan() || self.slack(*s).is_nan()) {
                return Err(Wrong::NotANumber { position });
            }
            self.cut(&taken)?;
        }
        if let Some(at) = self.disorder(chosen, order) {
            return Err(Wrong::Order { at });
        }
        let own = mla_reference::indexer::top_k(&self.logits[..seen], self.top_k);
        Ok(own.iter().all(|s| taken[*s]))
    }

    /// The rule of the cut.
    fn cut(&self, taken: &[bool]) -> Result<(), Wrong> {
        let most = |s: usize| self.logits[s] + self.slack(s);
        let least = |s: usize| self.logits[s] - self.slack(s);
        let chosen = (0..taken.len()).filter(|s| taken[*s]).min_by(|a, b| most(*a).total_cmp(&most(*b)));
        let dropped = (0..taken.len()).filter(|s| !taken[*s]).max_by(|a, b| least(*a).total_cmp(&least(*b)));
        match (chosen, dropped) {
            (Some(a), Some(b)) if least(b) > most(a) => Err(Wrong::Worse {
                chosen: a,
                dropped: b,
                by: self.logits[b] - self.logits[a],
                bound: self.slack(a) + self.slack(b),
            }),
            _ => Ok(()),
        }
    }

    /// The first place where no honest logits are in the promised order.
    fn disorder(&self, chosen: &[usize], order: Order) -> Option<usize> {
        match order {
            Order::Any => None,
            Order::Position => chosen.windows(2).position(|w| w[0] > w[1]).map(|i| i + 1),
            Order::Descending => {
                let mut most = f64::INFINITY;
                chosen.iter().position(|s| {
                    most = most.min(self.logits[*s] + self.slack(*s));
                    self.logits[*s] - self.slack(*s) > most
                })
            }
        }
    }
}

/// What ids of a token of a sequence mean: positions in the order of the list, −1 at its end left out.
///
/// # Errors
/// What is no id of the sequence's, or stands behind padding.
pub fn positions(plan: &Plan, sequence: usize, ids: Ids, list: &[i64]) -> Result<Vec<usize>, Wrong> {
    let some = list.iter().rposition(|id| *id != -1).map_or(0, |last| last + 1);
    if let Some(at) = list[..some].iter().position(|id| *id == -1) {
        return Err(Wrong::Padding { at });
    }
    let own = plan.sequences.get(sequence);
    let keys = own.map_or(0, mla_reference::Sequence::keys);
    let one = |id: &i64| {
        let id = *id;
        let number = usize::try_from(id).map_err(|_| Wrong::NoKey { id })?;
        match ids {
            Ids::Position => Some(number).filter(|n| *n < keys).ok_or(Wrong::NoKey { id }),
            Ids::Slot => {
                let of = |s: &mla_reference::Sequence| s.slots.iter().position(|slot| *slot == number);
                own.and_then(of).ok_or_else(|| {
                    let other = plan.sequences.iter().find(|s| of(s).is_some());
                    other.map_or(Wrong::NoKey { id }, |s| Wrong::Foreign { id, request: s.request })
                })
            }
        }
    };
    list[..some].iter().map(one).collect()
}

/// Selections of all tokens of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selected {
    /// Tokens whose set is the reference's own.
    pub equal: usize,
    /// Tokens whose set is another, by equal logits or logits that rounding may have put in that order.
    pub rounding: usize,
    /// Tokens with a fault, in order, and what it is.
    pub wrong: Vec<(usize, Wrong)>,
}

impl Selected {
    /// Exact, rounding or fault.
    pub fn verdict(&self) -> Verdict {
        match (self.wrong.is_empty(), self.rounding) {
            (false, _) => Verdict::Fault,
            (true, 0) => Verdict::Exact,
            (true, _) => Verdict::Rounding,
        }
    }
}

/// Judges the selections of a sequence's new tokens: `lists[i]`, ids as `ids` counts them, of the `i`-th. `logits`, `slack`:
/// `[token, key]`; an empty slack is none. Tokens without a list have chosen nothing.
pub fn judge(
    (plan, sequence): (&Plan, usize),
    (logits, slack): (ArrayView2<f64>, ArrayView2<f64>),
    top_k: usize,
    (lists, ids, order): (&[Vec<i64>], Ids, Order),
) -> Selected {
    let mut all = Selected::default();
    let Some(seq) = plan.sequences.get(sequence) else { return all };
    for i in 0..seq.tokens.len().min(logits.nrows()) {
        let of = |m: ArrayView2<f64>| if m.is_empty() { Vec::new() } else { m.row(i).to_vec() };
        let (own, off) = (of(logits), of(slack));
        let row = Row { logits: &own, slack: &off, visible: seq.visible(i), top_k };
        let list = lists.get(i).map_or(&[][..], Vec::as_slice);
        match positions(plan, sequence, ids, list).and_then(|chosen| row.judge(&chosen, order)) {
            Ok(true) => all.equal += 1,
            Ok(false) => all.rounding += 1,
            Err(wrong) => all.wrong.push((i, wrong)),
        }
    }
    all
}

/// How far logits of an engine that sums in float32 may be from the exact ones of the same q, k and weights, `[row, key]`,
/// in any order of summation.
///
/// A dot product of d terms is off by γ_d Σ|q||k|; relu moves no two values apart; the factors 1/√d (its own rounding
/// included) and w, and the sum over H heads, are d + H + 3 roundings of each term in all: `γ_n = n u / (1 − n u)`. Where a
/// result is subnormal a rounding is off by 2⁻¹⁵⁰ at most instead: those d + 3 before w is multiplied and one after it.
pub fn slack(
    indexer: &Indexer,
    q: ArrayView2<f64>,
    head_weights: ArrayView2<f64>,
    k: ArrayView2<f64>,
) -> Array2<f64> {
    let n = (indexer.width + indexer.heads + 3) as f64 * U;
    let gamma = n / (1.0 - n) / (indexer.width as f64).sqrt();
    let (q, k) = (q.mapv(f64::abs), k.mapv(f64::abs));
    let mut all = Array2::zeros((q.nrows(), k.nrows()));
    for h in 0..indexer.heads {
        let dots = q.slice(s![.., h * indexer.width..(h + 1) * indexer.width]).dot(&k.t());
        for ((i, s), dot) in dots.indexed_iter() {
            let w = head_weights[[i, h]].abs();
            all[[i, s]] += w * dot * gamma + (w * (indexer.width + 3) as f64 + 1.0) * f64::powi(2.0, -149);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f64; 6] = [1.0, 5.0, 3.0, 3.0, 2.9, 9.0];

    fn row(slack: &[f64]) -> Row<'_> {
        Row { logits: &LOGITS, slack, visible: 5, top_k: 2 }
    }

    #[test]
    fn the_cut_is_judged_by_what_rounding_may_do() {
        let any = |chosen: &[usize], slack: f64| row(&[slack; 6]).judge(chosen, Order::Any);
        assert_eq!(any(&[1, 2], 0.0), Ok(true));
        // A tie: any of the two.
        assert_eq!(any(&[3, 1], 0.0), Ok(false));
        let worse = |bound| Wrong::Worse { chosen: 4, dropped: 2, by: 3.0 - 2.9, bound };
        for (slack, fine) in [(0.0, false), (0.04, false), (0.051, true)] {
            match any(&[1, 4], slack) {
                Ok(own) => assert!(fine && !own),
                Err(Wrong::Worse { chosen: 4, by, bound, .. }) => {
                    assert!(!fine);
                    assert_eq!((by, bound), (3.0 - 2.9, 2.0 * slack));
                }
                other => panic!("{other:?} {:?}", worse(slack)),
            }
        }
        // The best key is missing: no bound near the others helps.
        assert!(matches!(any(&[2, 3], 0.5), Err(Wrong::Worse { dropped: 1, .. })));
        // A chosen key whose own bound is wide may stand, the same key with a narrow one not.
        let wide = [0.0, 0.0, 0.0, 0.0, 0.2, 0.0];
        assert_eq!(row(&wide).judge(&[1, 4], Order::Any), Ok(false));
        assert!(row(&[0.2, 0.0, 0.0, 0.0, 0.0, 0.0]).judge(&[1, 4], Order::Any).is_err());
    }

    #[test]
    fn what_is_exact_is_judged_exactly() {
        let any = |chosen: &[usize]| row(&[9.0; 6]).judge(chosen, Order::Any);
        assert_eq!(any(&[1, 5]), Err(Wrong::Unseen { position: 5 }));
        assert_eq!(any(&[1, 1]), Err(Wrong::Double { position: 1 }));
        assert_eq!(any(&[1]), Err(Wrong::Count { found: 1, wanted: 2 }));
        assert_eq!(any(&[1, 2, 3]), Err(Wrong::Count { found: 3, wanted: 2 }));
        // Fewer keys than are kept: all of them, whatever their logits.
        let few = Row { logits: &[f64::NAN, 1.0, 7.0], slack: &[], visible: 2, top_k: 4 };
        assert_eq!(few.judge(&[1, 0], Order::Any), Ok(true));
        assert_eq!(few.judge(&[1], Order::Any), Err(Wrong::Count { found: 1, wanted: 2 }));
        let nan = Row { logits: &[1.0, f64::NAN, 7.0], slack: &[], visible: 3, top_k: 2 };
        assert_eq!(nan.judge(&[0, 2], Order::Any), Err(Wrong::NotANumber { position: 1 }));
    }

    #[test]
    fn orders_are_those_of_honest_logits() {
        let of = |chosen: &[usize], slack: f64, order| {
            Row { logits: &LOGITS, slack: &[slack; 6], visible: 6, top_k: 6 }.judge(chosen, order)
        };
        assert_eq!(of(&[5, 1, 3, 2, 4, 0], 0.0, Order::Descending), Ok(true));
        assert_eq!(of(&[5, 1, 4, 3, 2, 0], 0.0, Order::Descending), Err(Wrong::Order { at: 3 }));
        assert_eq!(of(&[5, 1, 4, 3, 2, 0], 0.06, Order::Descending), Ok(true));
        assert_eq!(of(&[0, 1, 2, 3, 4, 5], 0.0, Order::Position), Ok(true));
        assert_eq!(of(&[0, 2, 1, 3, 4, 5], 9.0, Order::Position), Err(Wrong::Order { at: 2 }));
    }

    #[test]
    fn ids_are_positions_or_slots_of_the_own_request() {
        use mla_reference::{Regime, Sequence};
        let seq = |request, slots: &[usize]| Sequence {
            request,
            regime: Regime::Random,
            tokens: 0..1,
            context: slots.len() - 1,
            slots: slots.to_vec(),
        };
        let plan = Plan { sequences: vec![seq(0, &[7, 4, 9]), seq(1, &[5, 2])], ..Plan::default() };
        let of = |ids, list: &[i64]| positions(&plan, 0, ids, list);
        assert_eq!(of(Ids::Position, &[2, 0, -1, -1]), Ok(vec![2, 0]));
        assert_eq!(of(Ids::Slot, &[9, 7, -1]), Ok(vec![2, 0]));
        assert_eq!(of(Ids::Slot, &[-1, -1]), Ok(vec![]));
        assert_eq!(of(Ids::Position, &[2, 3]), Err(Wrong::NoKey { id: 3 }));
        assert_eq!(of(Ids::Position, &[-2]), Err(Wrong::NoKey { id: -2 }));
        assert_eq!(of(Ids::Slot, &[9, 2]), Err(Wrong::Foreign { id: 2, request: 1 }));
        assert_eq!(of(Ids::Slot, &[9, 3]), Err(Wrong::NoKey { id: 3 }));
        assert_eq!(of(Ids::Position, &[2, -1, 0]), Err(Wrong::Padding { at: 1 }));
    }
}
