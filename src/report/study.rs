/*! Studies of the judge as text, at most 100 columns wide. */

use crate::judge::Verdict;
use crate::study::calibrate::{Below, Calibration, Family, Remark};
use crate::study::sensitivity::{Row, SHARE, Sensitivity};
use mla_reference::Regime;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Remarks of one kind that are printed; JSON has up to a hundred.
const SHOWN: usize = 5;

/// Clean runs.
pub fn calibration(c: &Calibration) -> String {
    let mut out = calibration_line(c);
    let _ = writeln!(out, "\nlayers    {}", c.layers.join(", "));
    let _ = writeln!(out, "runs      {}", verdicts(&c.runs_by_verdict));
    let _ = writeln!(out, "tensors   {}", verdicts(&c.units_by_verdict));
    remarks(&mut out, "false alarms", &c.alarms);
    remarks(&mut out, "without power (no alarm)", &c.inconclusive);
    if c.families.iter().all(|f| f.tests == 0) {
        let _ = writeln!(out, "\nno test reported a p-value");
    } else {
        let wide = c.families.iter().map(|f| f.name.len()).max().unwrap_or(0).max(12);
        let _ = write!(out, "\n{:wide$} {:>9}", "tests", "n");
        for level in c.families.first().iter().flat_map(|f| &f.below) {
            let _ = write!(out, " {:>8} {:>8} {:>8}", format!("<{:.0e}", level.level), "share", "at most");
        }
        let _ = writeln!(out, " {:>9} {:>6}", "smallest", "run");
        for f in c.families.iter().filter(|f| f.tests > 0) {
            family(&mut out, f, wide);
        }
        let _ = writeln!(
            out,
            "at most: of all tests the allowed share; of a family what chance gives one in 10,000 with it"
        );
    }
    let _ = writeln!(out, "\n{:.1} s", c.seconds);
    let contract =
        if c.contract == "declared" { String::new() } else { format!(" --contract {}", c.contract) };
    let _ =
        writeln!(out, "Repeat one run: mla-check calibrate --seed {} --first RUN --runs 1{contract}", c.seed);
    out
}

/// The first line, and what is missed.
pub fn calibration_line(c: &Calibration) -> String {
    let engine = c.engine.as_ref().map_or("none", |e| e.name.as_ref());
    let end = if c.ok { "every figure is reached" } else { "MISSED" };
    let mut out = format!(
        "engine {engine}, contract {}, {} clean runs of seed {}: {end}\n",
        c.contract, c.runs, c.seed
    );
    missed(&mut out, &c.missed);
    out
}

fn missed(out: &mut String, all: &[String]) {
    for m in all {
        let _ = writeln!(out, "  missed: {m}");
    }
}

fn verdicts(counts: &BTreeMap<Verdict, u64>) -> String {
    let all: Vec<String> = counts.iter().map(|(v, n)| format!("{n} {v}")).collect();
    if all.is_empty() { "none".into() } else { all.join(", ") }
}

fn remarks(out: &mut String, title: &str, all: &[Remark]) {
    if all.is_empty() {
        return;
    }
    let _ = writeln!(out, "{title}:");
    for r in all.iter().take(SHOWN) {
        let _ = writeln!(out, "  run {}: {}\n    {}\n    {}", r.run, r.what, r.setup, r.repeat);
    }
    if all.len() > SHOWN {
        let _ = writeln!(out, "  … and {} more in --format json", all.len() - SHOWN);
    }
}

fn family(out: &mut String, f: &Family, wide: usize) {
    let _ = write!(out, "{:wide$} {:>9}", f.name, f.tests);
    for Below { count, share, most, .. } in &f.below {
        let _ = write!(out, " {count:>8} {:>8} {most:>8}", format!("{share:.1e}"));
    }
    let smallest = f.smallest_log10.map_or("-".to_string(), power_of_ten);
    let run = f.smallest.as_ref().map_or("-".to_string(), |r| r.run.to_string());
    let _ = writeln!(out, " {smallest:>9} {run:>6}{}", if f.holds() { "" } else { "  MISSED" });
}

/// 10^l with two digits, also where it is no float64.
fn power_of_ten(l: f64) -> String {
    if l == f64::NEG_INFINITY {
        return "0".into();
    }
    let exponent = l.floor();
    let digits = libm::pow(10.0, l - exponent);
    if digits >= 9.95 { format!("1.0e{}", exponent + 1.0) } else { format!("{digits:.1}e{exponent}") }
}

/// Faults and the smallest size of each that is found.
pub fn sensitivity(s: &Sensitivity) -> String {
    let mut out = sensitivity_line(s);
    let _ = writeln!(
        out,
        "\nSmallest size found in {:.0} % of {} runs, at the right tensor, in every form; batch\n{} in {}.",
        SHARE * 100.0,
        s.seeds,
        s.batch,
        s.dtype
    );
    let _ = writeln!(out, "Gates look at the same tensors of the same runs.\n");
    let _ = write!(out, "{:14} {:8} {:>10}", "fault", "regime", "judge");
    for g in s.gates {
        let _ = write!(out, " {g:>9}");
    }
    out.push('\n');
    for r in &s.rows {
        let _ = write!(out, "{:14} {:8} {:>10}", r.fault, r.regime.name(), cell(r, None));
        for g in 0..s.gates.len() {
            let unusable = s
                .clean
                .iter()
                .any(|c| c.regime == r.regime && c.gates.get(r.fault).is_some_and(|counts| counts[g] > 0));
            let text = if unusable { "unusable".into() } else { cell(r, Some(g)) };
            let _ = write!(out, " {text:>9}");
        }
        out.push('\n');
    }
    let units: Vec<String> =
        s.rows.iter().filter(|r| r.regime == first_regime(s) && !r.unit.is_empty()).map(unit).collect();
    let _ = writeln!(out, "sizes: {}", units.join("; "));
    let _ = writeln!(out, "a fault without sizes: share of runs found; -: no size is");
    for c in &s.clean {
        let _ = writeln!(out, "clean runs, {}: {} of {} accused", c.regime.name(), c.accused, c.runs);
    }
    let _ = writeln!(out, "\n{} runs, {:.1} s", s.runs, s.seconds);
    out
}

fn first_regime(s: &Sensitivity) -> Regime {
    s.clean.first().map_or(Regime::Random, |c| c.regime)
}

fn unit(r: &Row) -> String {
    format!("{} {}", r.fault, r.unit)
}

/// A size, or a share of runs for a fault without sizes.
fn cell(r: &Row, gate: Option<usize>) -> String {
    if r.unit.is_empty() {
        let Some(t) = r.tried.first() else { return "-".into() };
        let n = gate.map_or(t.found, |g| t.gates[g]);
        return format!("{:.0} %", 100.0 * n as f64 / t.runs.max(1) as f64);
    }
    gate.map_or(r.smallest, |g| r.gates[g]).map_or("-".to_string(), |s| format!("{s:.0e}"))
}

/// The first line, and what is missed.
pub fn sensitivity_line(s: &Sensitivity) -> String {
    let end = if s.ok { "every figure is reached" } else { "MISSED" };
    let mut out = format!(
        "contract {}, {} runs with deliberate faults, {} seeds: {end}\n",
        s.contract, s.runs, s.seeds
    );
    missed(&mut out, &s.missed);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_ten_beyond_float64() {
        assert_eq!(power_of_ten(-3.0), "1.0e-3");
        assert_eq!(power_of_ten(-400.5), "3.2e-401");
        assert_eq!(power_of_ten(-0.00001), "1.0e0");
        assert_eq!(power_of_ten(f64::NEG_INFINITY), "0");
    }
}
