/*!
Two reports of the same case against each other: which tensors got better or worse, by how much, and whether it matters.

What matters is derived, not tuned:

- a verdict that changed, and what is judged in one report only. `exact` and `rounding` are both clean, and between them is a share of
  flips like any other, so for these two the test below decides;
- the share of elements that are not the rounded reference, where both were judged by one contract (another one has other roundings,
  and so another honest share) and it changed more than chance allows. With flips a of n and b of m,
  and the shares truly equal, b given a + b is hypergeometric, for which Chernoff's bound of the binomial with p = m/(n + m) holds
  (Hoeffding 1963, section 6); twice that for both sides. All tensors share the larger budget of the two reports, by Holm's procedure.
  Elements are taken as independent draws, as sums of their own are; in attention, where all columns of a row share the errors of
  its softmax weights, a row is one draw. Two reports of one case have the same inputs, and so differ by less than two draws would;
- the smallest fault that would have been seen, where it crosses what its report promises.

Norms, the worst element and times are shown and decide nothing.
*/

use crate::judge::stats::flips::log_chernoff;
use crate::judge::stats::holm::holm;
use crate::judge::{Unit, Verdict, Which};
use crate::model::list;
use crate::probe::{Outcome, Probe};
use crate::report::read::Source;
use crate::report::{LayerReport, Report};
use crate::written::Name;
use mla_reference::{Axis, Form, Phase, Stage};
use serde::Serialize;
use std::collections::BTreeSet;

pub mod text;

/// Schema of the comparison.
pub const DIFF: Name = "mla-check.diff/1";

/// Two reports that can't be held against each other: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}\n  where: {}\n  do: {how}", where_.join(" and "))]
pub struct Incomparable {
    what: String,
    where_: [String; 2],
    how: &'static str,
}

/// The difference of two reports. Names are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Name and version of this form.
    pub schema: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// The two reports.
    pub reports: [Side; 2],
    /// What else is different: engines, contracts, versions, what is in one report only.
    pub notes: Vec<String>,
    /// Probability that any change of flips is called one by chance.
    pub alpha: f64,
    /// Tensors whose flips were compared.
    pub tests: usize,
    /// Rows that are not equal, the worst first.
    pub rows: Vec<Row>,
    /// Rows that are.
    pub equal: usize,
    /// Rows that got worse, and it matters.
    pub worse: usize,
    /// Rows that got better, and it matters.
    pub better: usize,
    /// Layers with the seconds that each took. Shown, never judged.
    pub seconds: Vec<(usize, [f64; 2])>,
    /// Exit code.
    pub exit: u8,
}

/// One of the two.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// File.
    pub file: String,
    /// Version of the program that wrote it.
    pub version: Name,
    /// The verdict of the whole.
    pub verdict: Verdict,
    /// Its engines.
    pub engines: Vec<String>,
}

/// Which way a row went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// Worse, and it matters.
    Worse,
    /// Better, and it matters.
    Better,
    /// Other, but not in what matters.
    Other,
}

/// A tensor or probe of both reports.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which way, by what matters.
    pub change: Change,
    /// Layer.
    pub layer: usize,
    /// Form.
    pub form: Option<Form>,
    /// Phase.
    pub phase: Option<Phase>,
    /// Tensor, or `probe NAME`.
    pub tensor: String,
    /// Whether it is a probe: `exact` is held, `fault` is broken.
    #[serde(skip)]
    pub probe: bool,
    /// Why it matters.
    pub why: Vec<String>,
    /// Figures in each; None: it is not in this report.
    pub figures: [Option<Figures>; 2],
    /// ln of the p-value of equal shares of flips.
    pub log_p: Option<f64>,
}

/// What a report says of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Verdict.
    pub verdict: Verdict,
    /// Elements compared.
    pub elements: u64,
    /// Those that are not the rounded reference.
    pub flips: u64,
    /// The worst element's error as a share of its bound, as text.
    pub share_of_bound: Option<String>,
    /// The smallest gain, or softmax scale where that is larger, that would have been seen.
    pub seen: Option<f64>,
    /// L2 norm of the engine's tensor.
    pub norm: Option<f64>,
    /// Its order-sensitive checksum.
    pub checksum: Option<f64>,
}

/// Holds B against A.
///
/// # Errors
/// Reports of different models, or with no case in common.
pub fn diff(a: &Source, b: &Source) -> Result<Difference, Incomparable> {
    let apart = |what: String, how| Incomparable {
        what,
        where_: [a.path.display().to_string(), b.path.display().to_string()],
        how,
    };
    let (x, y) = (crate::merge::model(&a.report), crate::merge::model(&b.report));
    if x != y {
        let how = "compare reports of the same model file";
        return Err(apart(format!("the reports are of different models: {x} and {y}"), how));
    }
    let (pairs, mut notes) = pairs(&a.report, &b.report);
    if pairs.is_empty() {
        let cases = |r: &Report| {
            let all: BTreeSet<String> =
                r.layers.iter().map(|l| format!("layer {}: {}", l.layer, case(l))).collect();
            all.into_iter().take(3).collect::<Vec<_>>().join("; ")
        };
        let what = format!(
            "no layer was judged with the same case in both: {} | {}",
            cases(&a.report),
            cases(&b.report)
        );
        return Err(apart(
            what,
            "make both with the same --layer, --batch, --regime, --seed, --dtype and --hidden",
        ));
    }
    notes.extend(differences(&a.report, &b.report, &pairs));
    let (mut rows, mut equal) = (Vec::new(), 0);
    for (l, m) in &pairs {
        equal += layer(l, m, &mut rows);
    }
    let alpha = pairs.iter().flat_map(|(l, m)| [l.budget.alpha, m.budget.alpha]).fold(0.0, f64::max);
    let log_p: Vec<f64> = rows.iter().map(|r| r.log_p.unwrap_or(f64::NAN)).collect();
    // Those that are the same in both were compared as well.
    let tests = pairs.iter().map(|(l, m)| compared(l, m)).sum();
    for i in holm(&log_p, libm::log(alpha), tests) {
        let [Some(f), Some(g)] = &rows[i].figures else { continue };
        let up = g.share() > f.share();
        rows[i].decide(up, if up { "more flips than chance" } else { "fewer flips than chance" });
    }
    rows.extend(alone(&a.report, &b.report));
    rows.sort_by(|r, s| r.order().partial_cmp(&s.order()).unwrap_or(std::cmp::Ordering::Equal));
    let count = |c: Change| rows.iter().filter(|r| r.change == c).count();
    let (worse, better) = (count(Change::Worse), count(Change::Better));
    Ok(Difference {
        schema: DIFF,
        version: env!("CARGO_PKG_VERSION"),
        reports: [a, b].map(side),
        notes,
        alpha,
        tests,
        equal,
        worse,
        better,
        seconds: pairs.iter().map(|(l, m)| (l.layer, [l.seconds, m.seconds])).collect(),
        exit: if worse > 0 { Verdict::Fault.exit(false) } else { 0 },
        rows,
    })
}

fn side(s: &Source) -> Side {
    let engines: BTreeSet<String> =
        s.report.layers.iter().map(|l| format!("{}, {}", l.engine.name, l.case.dtype)).collect();
    Side {
        file: s.path.display().to_string(),
        version: s.report.version,
        verdict: s.report.verdict,
        engines: engines.into_iter().collect(),
    }
}

/// What decides the truth of a layer, in words.
fn case(l: &LayerReport) -> String {
    let c = &l.case;
    format!(
        "{} in {}, {}, seed {}, hidden states {}",
        c.batch,
        c.dtype,
        c.regimes.join(" and "),
        c.seed,
        c.hidden
    )
}

/// Layers of both with the same case: those of the same engine first. And what has no other, in words.
#[allow(clippy::type_complexity)]
fn pairs<'r>(a: &'r Report, b: &'r Report) -> (Vec<(&'r LayerReport, &'r LayerReport)>, Vec<String>) {
    let mut with: Vec<Option<usize>> = vec![None; a.layers.len()];
    let mut taken = vec![false; b.layers.len()];
    for same_engine in [true, false] {
        for (i, l) in a.layers.iter().enumerate().filter(|(i, _)| with[*i].is_none()).collect::<Vec<_>>() {
            let fits = |m: &LayerReport| {
                m.layer == l.layer && case(m) == case(l) && (!same_engine || m.engine.name == l.engine.name)
            };
            let found = (0..b.layers.len()).find(|j| !taken[*j] && fits(&b.layers[*j]));
            if let Some(j) = found {
                (with[i], taken[j]) = (Some(j), true);
            }
        }
    }
    let pairs = with.iter().enumerate().filter_map(|(i, j)| Some((&a.layers[i], &b.layers[(*j)?]))).collect();
    let names = |of: Vec<&LayerReport>, which: &str| {
        let mut numbers: Vec<usize> = of.iter().map(|l| l.layer).collect();
        numbers.dedup();
        (!of.is_empty()).then(|| format!("only in {which}: layers {}, by engine or case", list(&numbers)))
    };
    let only_a = a.layers.iter().zip(&with).filter(|(_, j)| j.is_none()).map(|(l, _)| l).collect();
    let only_b = b.layers.iter().zip(&taken).filter(|(_, t)| !**t).map(|(l, _)| l).collect();
    (pairs, [names(only_a, "A"), names(only_b, "B")].into_iter().flatten().collect())
}

/// What is different beside the tensors.
fn differences(a: &Report, b: &Report, pairs: &[(&LayerReport, &LayerReport)]) -> Vec<String> {
    let mut all = BTreeSet::new();
    let mut note = |what: &str, x: &str, y: &str| {
        if x != y {
            all.insert(format!("{what}: {x} | {y}"));
        }
    };
    note("versions of mla-check", a.version, b.version);
    note("conventions", a.convention, b.convention);
    let fault = |r: &Report| r.deliberate_fault.clone().unwrap_or("none".into());
    note("deliberate faults", &fault(a), &fault(b));
    let broken = |r: &Report| {
        let all: Vec<&str> = r.broken.iter().filter_map(|l| l.what.lines().next()).collect();
        if all.is_empty() { "none".to_string() } else { all.join("; ") }
    };
    note("what broke", &broken(a), &broken(b));
    for (l, m) in pairs {
        let engine = |l: &LayerReport| format!("{}, {}", l.engine.name, l.engine.device);
        note("engines", &engine(l), &engine(m));
        note("contracts", &l.contract_text, &m.contract_text);
        note("page sizes", &l.case.page_size.to_string(), &m.case.page_size.to_string());
        let ways = |l: &LayerReport| {
            let all: Vec<String> = l.case.ways().into_iter().map(|w| w.1).collect();
            if all.is_empty() { "not routed".to_string() } else { all.join("; ") }
        };
        note("routes", &ways(l), &ways(m));
        let kernels = |l: &LayerReport| {
            let all: Vec<String> =
                l.engine.kernels.iter().map(|k| format!("{} {}", k.name, k.hash)).collect();
            all.join(", ")
        };
        note("kernels", &kernels(l), &kernels(m));
    }
    all.into_iter().collect()
}

/// Rows of a layer that are not equal; the number of those that are.
fn layer(l: &LayerReport, m: &LayerReport, rows: &mut Vec<Row>) -> usize {
    let (mut equal, before) = (0, rows.len());
    let at = |u: &Unit| (u.form, u.phase, u.tensor);
    for u in &l.tensors {
        match m.tensors.iter().find(|v| at(v) == at(u)) {
            Some(v) => match unit(l, u, m, v) {
                Some(row) => rows.push(row),
                None => equal += 1,
            },
            None => rows.extend(one(l, u, true)),
        }
    }
    let new = m.tensors.iter().filter(|v| !l.tensors.iter().any(|u| at(u) == at(v)));
    rows.extend(new.filter_map(|v| one(m, v, false)));
    for p in &l.probes {
        let other = m.probes.iter().find(|q| (q.form, q.name) == (p.form, p.name));
        match other.map(|q| (outcome(p), outcome(q))) {
            Some((x, y)) if x == y => equal += 1,
            Some((x, y)) => rows.push(of_probe(l, p, Some(x), Some(y))),
            None => rows.push(of_probe(l, p, Some(outcome(p)), None)),
        }
    }
    for q in &m.probes {
        if !l.probes.iter().any(|p| (q.form, q.name) == (p.form, p.name)) {
            rows.push(of_probe(m, q, None, Some(outcome(q))));
        }
    }
    // Scalars that differ, nothing compared: no tensor says it.
    let told = rows[before..].iter().any(|r| r.change != Change::Other);
    if l.verdict != m.verdict && !told && !(clean(l.verdict) && clean(m.verdict)) {
        let figures = |v| Some(Figures::of_verdict(v));
        let mut row = Row::new(
            l.layer,
            (None, None, "the layer as a whole".into()),
            [figures(l.verdict), figures(m.verdict)],
        );
        row.verdicts(Some(l.verdict), Some(m.verdict));
        rows.push(row);
    }
    equal
}

/// Whether two layers were judged by one contract.
fn same_contract(l: &LayerReport, m: &LayerReport) -> bool {
    let of = |l: &LayerReport| l.judged.as_ref().map_or(l.contract, |j| j.contract);
    of(l) == of(m)
}

/// Tensors whose flips are held against each other.
fn compared(l: &LayerReport, m: &LayerReport) -> usize {
    if !same_contract(l, m) {
        return 0;
    }
    let same = |u: &Unit, v: &Unit| {
        (u.form, u.phase, u.tensor, u.dtype) == (v.form, v.phase, v.tensor, v.dtype) && v.elements > 0
    };
    l.tensors.iter().filter(|u| u.elements > 0 && m.tensors.iter().any(|v| same(u, v))).count()
}

/// Layers that only one report has are rows of their own: what is missing is worse.
fn alone(a: &Report, b: &Report) -> Vec<Row> {
    let only = |of: &Report, other: &Report, first: bool| -> Vec<Row> {
        let mut rows = Vec::new();
        for l in of.layers.iter().filter(|l| !other.layers.iter().any(|m| m.layer == l.layer)) {
            let verdict = Some(Figures::of_verdict(l.verdict));
            let figures = if first { [verdict, None] } else { [None, verdict] };
            let mut row = Row::new(l.layer, (None, None, "the layer as a whole".into()), figures);
            let v = Some(l.verdict);
            if first {
                row.verdicts(v, None)
            } else {
                row.verdicts(None, v)
            }
            rows.push(row);
        }
        rows
    };
    [only(a, b, true), only(b, a, false)].concat()
}

fn clean(v: Verdict) -> bool {
    matches!(v, Verdict::Exact | Verdict::Rounding)
}

/// The verdict of a unit, where one was expected.
fn expected(u: &Unit) -> Option<Verdict> {
    (u.verdict != Verdict::NotApplicable && !u.unexpected()).then_some(u.verdict)
}

fn unit(l: &LayerReport, u: &Unit, m: &LayerReport, v: &Unit) -> Option<Row> {
    let (f, g) = (Figures::of(u), Figures::of(v));
    // What would have been seen goes with the number of tests in the run: it is no difference of the bits.
    let same = Figures { seen: None, ..f.clone() } == Figures { seen: None, ..g.clone() };
    let comparable = f.elements > 0 && g.elements > 0 && u.dtype == v.dtype && same_contract(l, m);
    let log_p = comparable.then(|| {
        let (draws, other) = (columns(u), columns(v));
        flips(
            (f.flips as f64 / draws, f.elements as f64 / draws),
            (g.flips as f64 / other, g.elements as f64 / other),
        )
    });
    let (sees, saw) = (f.seen, g.seen);
    let mut row = Row::new(l.layer, (u.form, u.phase, u.tensor.into()), [Some(f), Some(g)]);
    row.log_p = log_p;
    row.verdicts(expected(u), expected(v));
    // What has no power, or is at fault, promises nothing.
    let within = |seen: Option<f64>, promise: f64| seen.is_some_and(|s| s <= promise);
    let (kept, keeps) = (within(sees, l.budget.promise), within(saw, m.budget.promise));
    if u.power.is_some() && v.power.is_some() && kept != keeps {
        let why = if kept { "no longer sees what it promises" } else { "sees what it promises" };
        row.decide(kept, why);
    }
    (!same || row.change != Change::Other).then_some(row)
}

/// A unit that is in one report only.
fn one(l: &LayerReport, u: &Unit, first: bool) -> Option<Row> {
    let verdict = expected(u)?;
    let figures = Some(Figures::of(u));
    let figures = if first { [figures, None] } else { [None, figures] };
    let mut row = Row::new(l.layer, (u.form, u.phase, u.tensor.into()), figures);
    if first {
        row.verdicts(Some(verdict), None)
    } else {
        row.verdicts(None, Some(verdict))
    }
    Some(row)
}

/// The verdict that a probe amounts to.
fn outcome(p: &Probe) -> Verdict {
    match p.outcome {
        Outcome::Held { .. } => Verdict::Exact,
        Outcome::Broken { .. } => Verdict::Fault,
        Outcome::NotApplicable { .. } => Verdict::NotApplicable,
    }
}

fn of_probe(l: &LayerReport, p: &Probe, a: Option<Verdict>, b: Option<Verdict>) -> Row {
    let figures = [a, b].map(|v| v.map(Figures::of_verdict));
    let mut row = Row::new(l.layer, (Some(p.form), None, format!("probe {}", p.name)), figures);
    let asked = |v: Option<Verdict>| v.filter(|v| *v != Verdict::NotApplicable);
    row.verdicts(asked(a), asked(b));
    row
}

/// Elements that err together.
fn columns(u: &Unit) -> f64 {
    let attention = [Stage::OLatent, Stage::AttnOut, Stage::Lse, Stage::PartO, Stage::PartLse];
    let together = match u.which {
        Which::Tensor(id) if attention.contains(&id.stage) => match u.axes.last() {
            Some(Axis::Value | Axis::Latent) => u.shape.last().copied().unwrap_or(1),
            _ => 1,
        },
        _ => 1,
    };
    together.max(1) as f64
}

/// ln of a bound on the p-value of equal shares: flips and draws of each.
fn flips((a, n): (f64, f64), (b, m): (f64, f64)) -> f64 {
    let (k, of, draws) = if b * n >= a * m { (b, m, n + m) } else { (a, n, n + m) };
    (std::f64::consts::LN_2 + log_chernoff(k, a + b, of / draws)).min(0.0)
}

impl Figures {
    fn of(u: &Unit) -> Figures {
        let power = u.power.as_ref();
        let scale = |p: &crate::judge::Power| if p.scale_applies { p.scale } else { Some(0.0) };
        Figures {
            verdict: u.verdict,
            elements: u.elements,
            flips: u.flips,
            share_of_bound: u.worst.as_ref().map(|w| format!("{:e}", w.share_of_bound)),
            seen: power.and_then(|p| Some(p.gain?.max(scale(p)?))),
            // NaN is no number of JSON, and never equals itself.
            norm: u.engine.map(|d| d.norm).filter(|n| n.is_finite()),
            checksum: u.engine.map(|d| d.checksum).filter(|n| n.is_finite()),
        }
    }

    fn of_verdict(verdict: Verdict) -> Figures {
        Figures {
            verdict,
            elements: 0,
            flips: 0,
            share_of_bound: None,
            seen: None,
            norm: None,
            checksum: None,
        }
    }

    /// Share of flips.
    pub fn share(&self) -> f64 {
        self.flips as f64 / self.elements.max(1) as f64
    }
}

impl Row {
    fn new(
        layer: usize,
        (form, phase, tensor): (Option<Form>, Option<Phase>, String),
        figures: [Option<Figures>; 2],
    ) -> Row {
        Row {
            change: Change::Other,
            layer,
            form,
            phase,
            probe: tensor.starts_with("probe "),
            tensor,
            why: Vec::new(),
            figures,
            log_p: None,
        }
    }

    /// One thing that matters. Worse wins over better.
    fn decide(&mut self, worse: bool, why: &str) {
        self.change = if worse || self.change == Change::Worse { Change::Worse } else { Change::Better };
        self.why.push(why.into());
    }

    /// What a change of verdicts means; None: no verdict was expected, or there is none.
    fn verdicts(&mut self, a: Option<Verdict>, b: Option<Verdict>) {
        match (a, b) {
            (Some(a), Some(b)) if a == b || (clean(a) && clean(b)) => {}
            (Some(a), Some(b)) => self.decide(b > a, "verdict"),
            (Some(_), None) => self.decide(true, "no longer judged"),
            (None, Some(b)) if b.row().exit != 0 => self.decide(true, "newly judged"),
            (None, Some(_)) => self.decide(false, "newly judged"),
            (None, None) => {}
        }
    }

    /// Worse first, then by verdict, then by how sure it is.
    fn order(&self) -> (Change, std::cmp::Reverse<Option<Verdict>>, f64, usize) {
        let worst = self.figures.iter().flatten().map(|f| f.verdict).max();
        (self.change, std::cmp::Reverse(worst), self.log_p.unwrap_or(0.0), self.layer)
    }

    /// `layer 0 fused/attn_out, decode`
    pub fn title(&self) -> String {
        let form = self.form.map_or(String::new(), |f| format!("{}/", f.name()));
        let phase = self.phase.map_or(String::new(), |p| format!(", {}", p.name()));
        format!("layer {} {form}{}{phase}", self.layer, self.tensor)
    }
}

#[cfg(test)]
mod tests;
