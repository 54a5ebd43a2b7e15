/*!
Attention over a selection of the keys, a token at a time: the chosen rows of keys and values are laid out in the order of the
selection, and what follows is the attention that dense rows have. So tiles and splits are dealt over what is read, as kernels
that gather keys deal them.
*/

use super::{Evaluator, Read, Visit};
use crate::attention::{Head, strided};
use crate::departure::Slip;
use crate::key_stats::KeyStats;
use crate::plan::Selection;
use crate::product::Strided;
use crate::stage::{Form, Phase, Stage};
use ndarray::{Array2, Axis, s};
use rayon::prelude::*;

impl Evaluator<'_> {
    /// The keys that a sequence's tokens attend to; None: all that they see.
    pub(super) fn chosen(&self, sequence: usize) -> Option<&Selection> {
        self.given.selection.get(sequence)
    }

    /// Attention of one sequence over the chosen keys. Positions that the sequence does not have are not read.
    pub(super) fn attend_chosen(
        &self,
        stage: Stage,
        form: Form,
        read: &Read,
        chosen: &Selection,
        visit: Visit,
    ) {
        let (g, seq) = (&self.spec.geometry, read.seq);
        let cache = (form == Form::Absorbed).then(|| self.gather(seq, 0..g.cache()));
        let first = read.parts.map_or(read.rows.start, |(_, own)| own);
        let lists: Vec<(usize, Vec<usize>)> = (0..seq.tokens.len())
            .filter(|i| read.asked(self.departure, &(*i..i + 1)))
            .map(|i| {
                let own = chosen.get(i).map_or(&[][..], Vec::as_slice);
                (i, own.iter().copied().filter(|s| *s < seq.keys()).collect())
            })
            .collect();
        // Absorbed: all heads share the rows that a token reads.
        let gathered: Vec<(Array2<f64>, KeyStats)> = cache
            .iter()
            .flat_map(|c| lists.iter().map(|(_, l)| (c.select(Axis(0), l), KeyStats::default())))
            .collect();
        self.some_heads().into_par_iter().for_each(|h| {
            let columns = h * g.key()..(h + 1) * g.key();
            let own = cache.is_none().then(|| {
                let rows = self.plan.key_rows().find(|(_, s, _)| std::ptr::eq(*s, seq)).map_or(0..0, |r| r.2);
                let k = self.source.block(Stage::K, rows.clone(), columns.clone());
                (k, self.source.block(Stage::V, rows, h * g.value..(h + 1) * g.value))
            });
            let gain = self.departure.and_then(|d| d.value_gain.get(h)).copied().unwrap_or(1.0);
            for (at, (i, list)) in lists.iter().enumerate() {
                if !self.wanted.is_none_or(|w| w(first + i, h)) {
                    continue;
                }
                let token = seq.tokens.start + i;
                let q = self.source.block(Stage::Q, token..token + 1, columns.clone());
                let visible = [list.len()];
                let head =
                    |q, k, v, stats| Head { q, k, v, visible: &visible, scale: self.spec.scale, stats };
                let alone = KeyStats::default();
                match &own {
                    Some((k, v)) => {
                        let (k, mut v) = (k.select(Axis(0), list), v.select(Axis(0), list));
                        scale_by(&mut v, gain);
                        let head = head(q.view(), strided(&k), strided(&v), &alone);
                        self.visit_chosen(stage, form, read, (h, *i, list), &head, visit);
                    }
                    None => {
                        let (rows, stats) = &gathered[at];
                        let latent = h * g.latent..(h + 1) * g.latent;
                        let mut lifted = Array2::zeros((1, g.cache()));
                        let latent = self.source.block(Stage::QLatent, token..token + 1, latent);
                        lifted.slice_mut(s![.., ..g.latent]).assign(&latent);
                        lifted.slice_mut(s![.., g.latent..]).assign(&q.slice(s![.., g.nope..]));
                        let k = strided(rows);
                        let mut scaled = (gain != 1.0).then(|| rows.slice(s![.., ..g.latent]).to_owned());
                        let (values, stats) = match &mut scaled {
                            None => (Strided { cols: g.latent, ..k }, stats),
                            Some(v) => {
                                scale_by(v, gain);
                                (strided(v), &alone)
                            }
                        };
                        let head = head(lifted.view(), k, values, stats);
                        self.visit_chosen(stage, form, read, (h, *i, list), &head, visit);
                    }
                }
            }
        });
    }

    /// One token and head, whole, merged inside, or part by part.
    fn visit_chosen(
        &self,
        stage: Stage,
        form: Form,
        read: &Read,
        (h, i, list): (usize, usize, &[usize]),
        head: &Head,
        visit: Visit,
    ) {
        let n = list.len();
        // Keys that an engine loses, counted along what is read.
        let gone: Vec<usize> = match self.departure.map_or(&[][..], |d| d.gone(read.sequence)) {
            [] => Vec::new(),
            gone => (0..n).filter(|t| gone.binary_search(&list[*t]).is_ok()).collect(),
        };
        let slip = self.departure.map_or(Slip { gone: &gone, ..Slip::default() }, |d| Slip {
            gone: &gone,
            rescale: d.rescale,
            no_last_rescale: d.no_last_rescale,
        });
        let mut ranges = self.contract.split_ranges(n);
        let Some((all, own)) = read.parts else {
            let row = read.rows.start + i..read.rows.start + i + 1;
            let split = read.seq.phase() == Phase::Decode || self.contract.split_prefill;
            if split && ranges.len() > 1 {
                self.visit_merged(stage, h, row, (head, slip), &ranges, visit);
            } else {
                self.visit_attended(stage, h, row, (head, slip), 0..n, visit);
            }
            return;
        };
        ranges.resize(self.plan.parts(form).max(ranges.len()), n..n);
        for (part, range) in ranges.into_iter().enumerate() {
            let row = part * all + own + i;
            self.visit_attended(stage, h, row..row + 1, (head, slip), range, visit);
        }
    }
}

fn scale_by(v: &mut Array2<f64>, gain: f64) {
    if gain != 1.0 {
        v.mapv_inplace(|x| x * gain);
    }
}
