/*!
Several names fit one tensor: which of them the run's other tensors leave.

A few keys, or rows of one phase alone, often can't tell two causes from each other: one key too few is the first, the last or any. Most
runs have one fault. So of names that fit a tensor those stay that also fit the other tensors at fault, as far as these have names in
common with it; where none is left, or another fault is at work, all stay.
*/

use super::{Cause, Diagnosis};
use crate::judge::unit::{Unit, origins};

fn cause(u: &Unit) -> Option<&Cause> {
    match &u.diagnosis {
        Some(Diagnosis::Cause(c)) => Some(c),
        _ => None,
    }
}

fn names(c: &Cause) -> impl Iterator<Item = &String> {
    std::iter::once(&c.name).chain(&c.ambiguous_with)
}

/// Narrows the names of tensors at fault down by each other.
pub fn settle(units: &mut [Unit]) {
    let found: Vec<(String, Cause)> =
        origins(units).filter_map(|u| Some((u.title(), cause(u)?.clone()))).collect();
    // A tensor's other phases and forms first: they have the most in common with it.
    let tensor = |title: &str| title.split(',').next().and_then(|t| t.rsplit('/').next()).map(str::to_string);
    for u in units.iter_mut() {
        let title = u.title();
        let Some(Diagnosis::Cause(own)) = &mut u.diagnosis else { continue };
        let others = || found.iter().filter(|(t, _)| *t != title);
        let same = settled(own, others().filter(|(t, _)| tensor(t) == tensor(&title)));
        if let Some(settled) = same.or_else(|| settled(own, others())) {
            *own = settled;
        }
    }
}

/// The cause with the names that are left; None where nothing changes.
fn settled<'f>(own: &Cause, others: impl Iterator<Item = &'f (String, Cause)>) -> Option<Cause> {
    let all: Vec<&String> = names(own).collect();
    let others: Vec<&(String, Cause)> =
        others.filter(|(_, o)| all.iter().any(|n| names(o).any(|m| m == *n))).collect();
    let left: Vec<&String> =
        all.iter().copied().filter(|n| others.iter().all(|(_, o)| names(o).any(|m| m == *n))).collect();
    if left.is_empty() || left.len() == all.len() {
        return None;
    }
    // The sentence is known of the first name of each alone.
    let from = match left.contains(&&own.name) {
        true => own,
        false => others.iter().map(|(_, o)| o).find(|o| left.contains(&&o.name))?,
    };
    Some(Cause {
        name: from.name.clone(),
        family: from.family,
        text: format!("{}; of {} that fit here it also fits other tensors at fault", from.text, all.len()),
        effect: from.effect,
        tried: own.tried,
        runner_up: own.runner_up.clone(),
        ambiguous_with: left.iter().filter(|n| ***n != from.name).map(|n| n.to_string()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(all: &[&str]) -> Cause {
        Cause {
            name: all[0].into(),
            family: "mask",
            text: format!("{} is so", all[0]),
            effect: None,
            tried: 9,
            runner_up: None,
            ambiguous_with: all[1..].iter().map(|n| n.to_string()).collect(),
        }
    }

    fn left(own: &[&str], others: &[&[&str]]) -> Vec<String> {
        let own = of(own);
        let others: Vec<(String, Cause)> = others.iter().map(|o| ("lse, prefill".into(), of(o))).collect();
        let after = settled(&own, others.iter()).unwrap_or(own);
        names(&after).cloned().collect()
    }

    #[test]
    fn names_are_narrowed_by_the_other_tensors() {
        assert_eq!(left(&["a", "b", "c"], &[&["b"]]), ["b"]);
        assert_eq!(left(&["a", "b", "c"], &[&["c", "a"]]), ["a", "c"]);
        assert_eq!(left(&["a", "b", "c"], &[&["a", "b"], &["b", "c"], &["b"]]), ["b"]);
        // Another fault's name says nothing; contradictions leave all.
        assert_eq!(left(&["a", "b"], &[&["x"]]), ["a", "b"]);
        assert_eq!(left(&["a", "b"], &[&["a"], &["b"]]), ["a", "b"]);
    }

    #[test]
    fn the_sentence_is_that_of_the_name() {
        let c = settled(&of(&["a", "b"]), [("lse, prefill".to_string(), of(&["b"]))].iter()).unwrap();
        assert_eq!(c.text, "b is so; of 2 that fit here it also fits other tensors at fault");
        assert!(settled(&of(&["a"]), [("lse".to_string(), of(&["a"]))].iter()).is_none());
    }
}
