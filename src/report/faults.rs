/*! The fault suite as text, at most 80 columns wide. */

use crate::fault::catalogue::Row;
use crate::fault::text::{Mutation, PREFIX};
use crate::suite::{Count, Naming, Outcome, Suite, Tried};
use std::fmt::Write;

/// Columns of the table.
const WIDE: usize = 80;

/// The whole report.
pub fn suite(s: &Suite) -> String {
    let mut out = score(s);
    let _ = writeln!(
        out,
        "\n{:25} {:6} {:17} {:9} {:>7}  first out",
        "fault", "", "first at fault", "cause", "smallest"
    );
    let mut family = "";
    for t in &s.faults {
        if t.family != family {
            family = t.family;
            let _ = writeln!(out, "{family}");
        }
        line(&mut out, t);
    }
    let _ = writeln!(
        out,
        "smallest: smallest size that was caught, of those tried; first, out: which of\n\
         norm (10 %), cosine 0.99, NMSE 5e-4, allclose 1e-2 would have seen it beside a\n\
         right engine's tensor: in the first wrong tensor, in the layer's output"
    );
    listed(&mut out, s);
    let _ = writeln!(out, "\n{:.1} s", s.seconds);
    out
}

/// The first lines: the score.
pub fn score(s: &Suite) -> String {
    let c = &s.score;
    let of = |c: Count| format!("{} of {}", c.n, c.of);
    let mut out = String::new();
    let text = format!(
        "engine {}: {} faults caught, first tensor right {}, cause right {}, {} named wrongly, {} clean runs accused: {}",
        s.engine,
        of(c.caught),
        of(c.first),
        of(c.cause),
        c.named_wrongly,
        of(c.false_alarms),
        if s.ok { "holds" } else { "DOES NOT HOLD" }
    );
    wrapped(&mut out, &text);
    let seen = |all: &[Count]| {
        let words: Vec<String> = s.measures.iter().zip(all).map(|(m, c)| format!("{m} {}", of(*c))).collect();
        words.join(", ")
    };
    wrapped(&mut out, &format!("seen in the first wrong tensor by {}", seen(&c.first_seen)));
    wrapped(&mut out, &format!("seen in the layer's output by {}", seen(&c.out_seen)));
    for a in &s.false_alarms {
        let _ = writeln!(out, "FALSE ALARM {}\n  run {}", a.what, a.options);
    }
    out
}

fn line(out: &mut String, t: &Tried) {
    let word = match t.outcome {
        Outcome::Caught => "caught",
        Outcome::Missed => "MISSED",
        Outcome::NotApplicable => "-",
        Outcome::Broke => "BROKE",
    };
    let first = t.first.as_deref().map_or("-", |f| f.split([' ', ',']).next().unwrap_or(f));
    let first = if t.first_right || t.first.is_none() { first.to_string() } else { format!("!{first}") };
    let cause = match (t.outcome, t.cause) {
        (Outcome::NotApplicable | Outcome::Broke, _) => "-",
        (_, Naming::Right) => "right",
        (_, Naming::Ambiguous) => "ambiguous",
        (_, Naming::Unnamed) => "none",
        (_, Naming::Nameless) => "-",
        (_, Naming::Wrong) => "WRONG",
    };
    let smallest = t.smallest.map_or("-".to_string(), |s| format!("{s}"));
    let marks = |said: Option<&crate::suite::measures::Said>| match said {
        None => "   -".to_string(),
        Some(s) => s.seen().iter().zip("ncma".chars()).map(|(on, c)| if *on { c } else { '.' }).collect(),
    };
    // A name that does not fit its column has a line of its own.
    let name = if t.name.len() > 23 { "" } else { t.name };
    if name.is_empty() {
        let _ = writeln!(out, "  {}", t.name);
    }
    let text = format!(
        "  {name:23} {word:6} {first:17} {cause:9} {smallest:>7}  {}  {}",
        marks(t.first_measures.as_ref()),
        marks(t.out_measures.as_ref())
    );
    let _ = writeln!(out, "{}", text.trim_end());
}

/// What did not apply, what was missed, and which families have no rows.
fn listed(out: &mut String, s: &Suite) {
    let missed: Vec<&Tried> = s.faults.iter().filter(|t| !t.complete()).collect();
    if !missed.is_empty() {
        let _ = writeln!(out, "\nmissed:");
    }
    for t in missed {
        let mut what = Vec::new();
        if let Some(why) = &t.why {
            what.push(why.lines().next().unwrap_or("").to_string());
        }
        if t.outcome == Outcome::Caught && !t.first_right {
            let is = t.first.as_deref().unwrap_or("none");
            what.push(format!("the first tensor is {is}, expected {}", t.first_expected.join(" or ")));
        }
        match t.cause {
            Naming::Unnamed if t.outcome == Outcome::Caught => what.push("its cause is not named".into()),
            Naming::Wrong => what.push(format!("named {}", t.causes.join("; "))),
            Naming::Ambiguous => what.push(format!("several names fit: {}", t.causes.join("; "))),
            _ => {}
        }
        what.extend(t.known.map(|k| format!("known: {k}")));
        wrapped(out, &format!("  {} ({}): {}", t.name, t.fault, what.join("; ")));
    }
    let not: Vec<&Tried> = s.faults.iter().filter(|t| t.outcome == Outcome::NotApplicable).collect();
    if let Some(first) = not.first() {
        let why = first.why.as_deref().unwrap_or("");
        let _ = writeln!(out, "\ndo not apply to engine {}:\n  {why}", s.engine);
        let names: Vec<&str> = not.iter().map(|t| t.name).collect();
        wrapped(out, &format!("  {}", names.join(", ")));
    }
    let _ = writeln!(out, "\nfamilies without rows:");
    for [name, what, why] in &s.without {
        let _ = writeln!(out, "  {name} {what}: {why}");
    }
}

/// Text in lines of at most [`WIDE`] characters, indented from the second on.
fn wrapped(out: &mut String, text: &str) {
    let mut line = String::new();
    let lead = text.len() - text.trim_start().len();
    line += &" ".repeat(lead);
    let mut empty = true;
    for word in text.split_whitespace() {
        let n = word.chars().count();
        if !empty && line.chars().count() + 1 + n > WIDE {
            let _ = writeln!(out, "{line}");
            line = " ".repeat(lead + 2);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    let _ = writeln!(out, "{line}");
}

/// The catalogue.
pub fn list<'n>(
    rows: &[Row],
    inside: &[&Mutation],
    names: impl Iterator<Item = (&'n str, &'n str)>,
) -> String {
    let mut out = String::new();
    for r in rows {
        let _ = writeln!(out, "{} {:26} {}", r.family, r.name, r.text(None));
        wrapped(&mut out, &format!("    {}", r.what));
        if !r.issues.is_empty() {
            wrapped(&mut out, &format!("    {}", r.issues.join(" ")));
        }
    }
    for m in inside {
        let _ = writeln!(out, "{} {PREFIX}{}", m.family, m.name);
        wrapped(&mut out, &format!("    {} ({})", m.broken, m.kernel));
        if !m.issues.is_empty() {
            wrapped(&mut out, &format!("    {}", m.issues.join(" ")));
        }
    }
    let _ = writeln!(out, "\n--fault takes any of these and:");
    for (name, what) in names {
        wrapped(&mut out, &format!("  {name}: {what}"));
    }
    out
}
