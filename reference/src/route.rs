/*!
Which way each sequence goes, and in which parts its keys are attended.

Serving engines route a batch: requests with few new tokens go through the absorbed form, all others through the fused one.
And they attend to a long context in chunks, each normalised in itself, which are merged with the causal part over the new
tokens. Both decide which rows a form has and which parts `part_o` and `part_lse` hold; nothing else in the reference knows.
*/

use crate::contract::Contract;
use crate::plan::{Plan, Sequence};
use crate::stage::{Form, Phase, Stage};
use std::ops::Range;

/// How requests are routed and contexts cut. The default: every form serves every request, contexts are read in one go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// A request with at most so many new tokens goes through the absorbed form alone, any other through the fused one
    /// alone; None: each form serves all of them. Sequences of the absorbed form come first then.
    pub threshold: Option<usize>,
    /// Keys of a chunk of the context, where the fused form prefills on top of one; None: no parts.
    pub context_chunk: Option<usize>,
    /// Parts are merged inside the attention: no partial results stand by themselves.
    pub inside: bool,
}

/// How the keys of a sequence are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All at once.
    Whole,
    /// Splits of a decode step, dealt by the contract.
    Splits,
    /// Chunks of so many context keys, and the new tokens.
    Chunks(usize),
}

/// Ranges of `context` keys in chunks, then the `new` ones.
pub fn chunks(context: usize, new: usize, chunk: usize) -> Vec<Range<usize>> {
    let of_context = (0..context).step_by(chunk.max(1)).map(|a| a..(a + chunk.max(1)).min(context));
    of_context.chain(std::iter::once(context..context + new)).collect()
}

impl Plan {
    /// Whether a form computes a sequence. None stands for stages that forms share, and for all forms.
    pub fn serves(&self, form: Option<Form>, seq: &Sequence) -> bool {
        let (Some(form), Some(most)) = (form, self.route.threshold) else { return true };
        (seq.tokens.len() <= most) == (form == Form::Absorbed)
    }

    /// Whether a form computes any sequence.
    pub fn has_form(&self, form: Form) -> bool {
        self.sequences.iter().any(|s| self.serves(Some(form), s))
    }

    /// How a form cuts the keys of a sequence, whether or not the parts stand by themselves.
    pub fn cut(&self, form: Form, seq: &Sequence) -> Cut {
        match (seq.phase(), self.route.context_chunk) {
            (Phase::Decode, _) if self.splits > 1 => Cut::Splits,
            (Phase::Prefill, Some(n)) if form == Form::Fused && seq.context > 0 => Cut::Chunks(n),
            _ => Cut::Whole,
        }
    }

    /// Whether a form computes a sequence in parts that stand by themselves and are merged after.
    pub fn in_parts(&self, form: Form, seq: &Sequence) -> bool {
        !self.route.inside && self.cut(form, seq) != Cut::Whole
    }

    /// Key ranges of the parts of a sequence in a form: as many as its partial tensors have, empty ones at the end. One range
    /// of all keys where it has no parts.
    pub fn part_ranges(&self, form: Form, seq: &Sequence, contract: &Contract) -> Vec<Range<usize>> {
        let mut ranges = match self.cut(form, seq) {
            Cut::Whole => return std::iter::once(0..seq.keys()).collect(),
            Cut::Splits => contract.split_ranges(seq.keys()),
            Cut::Chunks(n) => chunks(seq.context, seq.tokens.len(), n),
        };
        if self.in_parts(form, seq) {
            let absent = self.parts(form).saturating_sub(self.own_parts(form, seq));
            ranges.extend(std::iter::repeat_n(seq.keys()..seq.keys(), absent));
        }
        ranges
    }

    /// Parts of a form's partial tensors: the most that any of its sequences has. 1: there are none.
    pub fn parts(&self, form: Form) -> usize {
        self.part_sequences(form).map(|(_, s, _, _)| self.own_parts(form, s)).max().unwrap_or(1)
    }

    /// Parts of one sequence.
    fn own_parts(&self, form: Form, seq: &Sequence) -> usize {
        match self.cut(form, seq) {
            Cut::Whole => 1,
            Cut::Splits => self.splits,
            Cut::Chunks(n) => seq.context.div_ceil(n.max(1)) + 1,
        }
    }

    /// Sequences of a form that are computed in parts: index, sequence, its rows of attention, its rows within each part.
    pub fn part_sequences(
        &self,
        form: Form,
    ) -> impl Iterator<Item = (usize, &Sequence, Range<usize>, Range<usize>)> {
        let mut at = 0;
        self.attention_rows(Some(form)).filter(move |(_, s, _)| self.in_parts(form, s)).map(
            move |(i, s, rows)| {
                let own = at..at + rows.len();
                at = own.end;
                (i, s, rows, own)
            },
        )
    }

    /// Rows of each part of a form's partial tensors.
    pub fn part_rows(&self, form: Form) -> usize {
        self.part_sequences(form).map(|(_, _, rows, _)| rows.len()).sum()
    }

    /// Whether any form has partial tensors.
    pub fn has_parts(&self) -> bool {
        Form::ALL.iter().any(|f| self.has(Stage::PartO, Some(*f)))
    }

    /// Rows of a phase that a form computes: whether any is merged from parts, and whether any is not.
    pub fn merged(&self, form: Option<Form>, phase: Phase) -> (bool, bool) {
        let mut found = (false, false);
        for f in Form::ALL.into_iter().filter(|f| form.is_none_or(|of| of == *f)) {
            for s in self.sequences.iter().filter(|s| s.phase() == phase && self.serves(form, s)) {
                let parts = self.in_parts(f, s);
                found = (found.0 || parts, found.1 || !parts);
            }
        }
        found
    }

    /// Requests of the batch in the order in which they stand in the plan.
    pub fn order(&self) -> Vec<usize> {
        let mut order = self.token_request.clone();
        order.dedup();
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Regime;

    /// Sequences of (context, new), in one regime.
    fn plan(requests: &[(usize, usize)], splits: usize, route: Route) -> Plan {
        let (mut at, mut slot, mut sequences, mut token_request) = (0, 0, Vec::new(), Vec::new());
        for (request, &(context, new)) in requests.iter().enumerate() {
            let tokens = at..at + new;
            (at, slot) = (at + new, slot + context + new);
            token_request.extend(std::iter::repeat_n(request, new));
            let slots = (slot - context - new..slot).collect();
            sequences.push(Sequence { request, regime: Regime::Random, tokens, context, slots });
        }
        let positions = vec![0; at];
        Plan { positions, token_request, sequences, page_size: 1, pages: slot, splits, ranks: 1, route }
    }

    #[test]
    fn chunks_cover_context_and_new_tokens_once() {
        assert_eq!(chunks(7, 5, 3), [0..3, 3..6, 6..7, 7..12]);
        assert_eq!(chunks(7, 5, 7), [0..7, 7..12]);
        assert_eq!(chunks(7, 5, 12), [0..7, 7..12]);
        assert_eq!(chunks(2, 1, 1), [0..1, 1..2, 2..3]);
    }

    #[test]
    fn each_sequence_of_a_routed_plan_has_one_form() {
        let route = Route { threshold: Some(5), ..Route::default() };
        let p = plan(&[(0, 1), (50, 1), (0, 5), (64, 17)], 1, route);
        let of = |f| p.attention_rows(Some(f)).map(|(i, _, r)| (i, r)).collect::<Vec<_>>();
        assert_eq!(of(Form::Absorbed), [(0, 0..1), (1, 1..2), (2, 2..7)]);
        assert_eq!(of(Form::Fused), [(3, 0..17)]);
        assert_eq!(p.rows(Stage::K, Some(Form::Fused)), 81);
        assert_eq!(p.rows(Stage::QLatent, Some(Form::Absorbed)), 7);
        assert_eq!(p.rows(Stage::Out, Some(Form::Absorbed)), 7);
        assert_eq!(p.rows(Stage::Q, None), 24);
        // Nobody prefills: the fused form has nothing.
        let none = plan(&[(0, 1), (50, 1)], 1, route);
        assert!(!none.has_form(Form::Fused) && !none.has(Stage::Out, Some(Form::Fused)));
        assert!(none.has(Stage::Q, None));
    }

    #[test]
    fn splits_and_chunks_share_one_tensor() {
        let route = Route { threshold: None, context_chunk: Some(4), inside: false };
        let p = plan(&[(0, 3), (9, 2), (20, 1), (3, 2)], 2, route);
        // Three chunks of nine context keys and the new tokens; two splits; one chunk and the new tokens.
        assert_eq!((p.parts(Form::Fused), p.part_rows(Form::Fused)), (4, 5));
        assert_eq!(p.rows(Stage::PartO, Some(Form::Fused)), 20);
        let c = Contract { splits: 2.into(), ..Contract::exact() };
        let ranges = |i: usize| p.part_ranges(Form::Fused, &p.sequences[i], &c);
        assert_eq!(ranges(0), std::slice::from_ref(&(0..3)));
        assert_eq!(ranges(1), [0..4, 4..8, 8..9, 9..11]);
        assert_eq!(ranges(2).len(), 4);
        assert!(ranges(2)[2..].iter().all(|r| r.is_empty()));
        assert_eq!(ranges(3), [0..3, 3..5, 5..5, 5..5]);
        let names = p.names(Stage::PartLse, Some(Form::Fused));
        assert_eq!(
            (names.len(), names[6].split, names[6].request, names[6].index),
            (20, Some(1), Some(1), 1)
        );
        // The absorbed form has the splits alone.
        assert_eq!((p.parts(Form::Absorbed), p.part_rows(Form::Absorbed)), (2, 1));
        assert_eq!(p.merged(Some(Form::Fused), Phase::Prefill), (true, true));
        assert_eq!(p.merged(Some(Form::Absorbed), Phase::Prefill), (false, true));
        assert_eq!(p.merged(Some(Form::Absorbed), Phase::Decode), (true, false));
    }
}
