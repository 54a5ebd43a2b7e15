//! Tests that are made of what was counted: odd elements of the whole and of slices, and directions.

use super::Evidence;
use crate::judge::stats::direction::{Kind, floor, p_value};
use crate::judge::stats::flips::{BLOCK, Flips, MIN_ROWS};
use crate::judge::stats::score::Fineness;
use mla_reference::RowName;
use std::collections::BTreeMap;

/// One statistical test of a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Test {
    /// Tests of a kind, for calibration: `flips`, `flips slice`, `gain T1`, …
    pub family: &'static str,
    /// What was tested: `flips of head 3`, `scale T1`.
    pub name: String,
    /// ln of the p-value.
    pub log_p: f64,
    /// Estimated factor − 1 of a direction; share of odd elements.
    pub size: f64,
    /// What an honest engine may reach: floor of a direction, limit of a share.
    pub limit: f64,
    /// Whether Holm's procedure over the run rejects it.
    pub rejected: bool,
}

impl Evidence {
    /// All tests, the whole tensor's first. `name`: what a row is.
    pub fn tests(&self, name: &dyn Fn(usize) -> Option<RowName>) -> Vec<Test> {
        let mut tests = Vec::new();
        let what = if Self::wide(self.dtype) { "far elements" } else { "flips" };
        let mut odd = |family, of: String, flips: &Flips| {
            let limit = self.limit(flips);
            let size = flips.flips as f64 / flips.elements.max(1) as f64;
            let name = if of.is_empty() { what.to_string() } else { format!("{what} of {of}") };
            tests.push(Test { family, name, log_p: flips.log_p(limit), size, limit, rejected: false });
        };
        if self.counts_odd() {
            odd("flips", String::new(), &self.whole());
            if self.head_slice().is_some() {
                self.heads.iter().enumerate().for_each(|(h, f)| odd("flips slice", format!("head {h}"), f));
            }
            if self.rows.len() * self.columns.heads >= MIN_ROWS && self.blocks.len() > 1 {
                for (b, f) in self.blocks.iter().enumerate() {
                    let to = ((b + 1) * BLOCK).min(self.columns.width) - 1;
                    odd("flips slice", format!("columns {}..{to}", b * BLOCK), f);
                }
            }
            if self.row_slice().is_some() {
                self.rows.iter().for_each(|(r, f)| odd("flips slice", row_name(*r, name(*r)), f));
            }
            let mut requests: BTreeMap<usize, (usize, Flips)> = BTreeMap::new();
            for (r, f) in &self.rows {
                if let Some(request) = name(*r).and_then(|n| n.request) {
                    let of = requests.entry(request).or_default();
                    of.0 += 1;
                    of.1.merge(*f);
                }
            }
            if requests.len() > 1 {
                let enough = requests.iter().filter(|(_, of)| of.0 * self.columns.heads >= MIN_ROWS);
                enough.for_each(|(r, of)| odd("flips slice", format!("request {r}"), &of.1));
            }
        }
        let clean = self.clean();
        for m in self.measured() {
            if m.fineness == Fineness::Fine && !clean {
                continue;
            }
            let kind = if m.head.is_some() { Kind::Local } else { m.direction.kind() };
            let limit = floor(kind, self.steps, m.fineness) + m.jump;
            let p = p_value(kind, &m.estimate, limit, clean);
            let t = if m.fineness == Fineness::Coarse { "T1" } else { "T2" };
            let (family, name) = match m.head {
                Some(h) => ("head gain T1", format!("gain of head {h}, {t}")),
                None => (m.direction.family(m.fineness), format!("{}, {t}", m.direction.name())),
            };
            tests.push(Test { family, name, log_p: p.log_p, size: m.estimate.beta, limit, rejected: false });
        }
        tests
    }

    /// Whether anything is suspicious enough to look closer: a broken bound, or a p-value below the run's level.
    pub fn suspect(&self, log_alpha: f64, tests: &[Test]) -> bool {
        self.tally.beyond > 0 || self.unlikely > 0 || tests.iter().any(|t| t.log_p <= log_alpha)
    }
}

/// Words for a row.
pub fn row_name(row: usize, name: Option<RowName>) -> String {
    match name {
        Some(RowName { request: Some(r), index, split: Some(s), .. }) => {
            format!("request {r}, row {index}, split {s}")
        }
        Some(RowName { request: Some(r), index, rank: Some(rank), .. }) => {
            format!("rank {rank}, request {r}, row {index}")
        }
        Some(RowName { request: Some(r), index, .. }) => format!("request {r}, row {index}"),
        _ => format!("row {row}"),
    }
}
