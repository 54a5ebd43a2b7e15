/*!
Where conventions read a file differently, and by how much.

Each [`Quantity`] is a number of the mathematics; its values under all conventions are compared, and those that
agree are named together. Sources: the table in `model/convention.rs`.
*/

use crate::model::{Convention, Model, Reading};
use mla_reference::Spec;

/// What each convention makes of the file; a sentence for every quantity that they disagree about.
pub(super) fn differences(model: &Model) -> Vec<String> {
    let specs = Convention::ALL.map(|c| (c, model.spec(&Reading::of(c))));
    QUANTITIES.iter().filter_map(|q| q.differs(&specs)).collect()
}

/// A number of the mathematics that conventions disagree about.
struct Quantity {
    name: &'static str,
    of: fn(&Spec) -> Vec<f64>,
    /// Why, and what it does: largest value, its counterpart.
    why: fn(f64, f64) -> String,
}

/// Below this, relative, two values are decimals of the same float32 in the file.
const SAME: f64 = 1e-6;

static QUANTITIES: &[Quantity] = &[
    Quantity {
        name: "eps of the norm before attention",
        of: |s| vec![s.eps_attn],
        why: |_, _| "the decimal of the file's float32 is taken differently".into(),
    },
    Quantity {
        name: "eps of the q_a and kv_a norms",
        of: |s| vec![s.eps_latent],
        // d/d eps of (m + eps)^-1/2, relative: eps / 2m.
        why: |a, b| {
            format!(
                "Hugging Face's modules take 1e-6 there whatever the configuration says, the others the file's eps; where the mean square of q_a or kv_a is 1e-3, what follows the norm differs by {:.1e}",
                (a - b).abs() / 2e-3
            )
        },
    },
    Quantity {
        name: "frequencies of rope",
        of: |s| s.rope.inv_freq.clone(),
        why: |_, _| {
            "llama.cpp does not read the file's YaRN betas for this architecture, and takes 32 and 1".into()
        },
    },
    Quantity {
        name: "softmax scale",
        of: |s| vec![s.scale],
        why: |_, _| {
            "the file has no YaRN multiplier: llama.cpp then takes YaRN's factor into the scale too".into()
        },
    },
    Quantity {
        name: "factor on cos and sin",
        of: |s| vec![s.rope.magnitude],
        why: |_, _| "YaRN's factor is put into cos and sin by some, and not by others".into(),
    },
];

impl Quantity {
    fn differs(&self, specs: &[(Convention, Spec)]) -> Option<String> {
        let values: Vec<Vec<f64>> = specs.iter().map(|(_, s)| (self.of)(s)).collect();
        let first = values.first()?;
        // The element with the largest ratio to the first convention's.
        let ratio = |a: f64, b: f64| if a == b { 1.0 } else { (a / b).max(b / a) };
        let all = values.iter().flat_map(|v| v.iter().zip(first).enumerate());
        let (at, worst) = all.map(|(j, (a, b))| (j, ratio(*a, *b))).max_by(|a, b| a.1.total_cmp(&b.1))?;
        if worst <= 1.0 + SAME {
            return None;
        }
        let mut groups: Vec<(f64, Vec<&str>)> = Vec::new();
        for ((convention, _), value) in specs.iter().zip(&values) {
            let value = *value.get(at)?;
            match groups.iter_mut().find(|(v, _)| ratio(*v, value) <= 1.0 + SAME) {
                Some((_, names)) => names.push(convention.name()),
                None => groups.push((value, vec![convention.name()])),
            }
        }
        let of_pair = if first.len() > 1 { format!(" (most at pair {at})") } else { String::new() };
        let high = groups.iter().fold(f64::MIN, |m, g| m.max(g.0));
        let low = groups.iter().fold(f64::MAX, |m, g| m.min(g.0));
        let groups: Vec<String> =
            groups.iter().map(|(v, names)| format!("{} {}", names.join(", "), digits(*v))).collect();
        Some(format!(
            "conventions differ in the {}{of_pair}: {}, a factor of {}. {}. No defect: an engine is judged by its own convention (--convention)",
            self.name,
            groups.join("; "),
            digits(worst),
            (self.why)(high, low)
        ))
    }
}

/// Four digits: a float32's decimal as people wrote it.
fn digits(x: f64) -> String {
    let rounded: f64 = format!("{x:.3e}").parse().unwrap_or(x);
    if (1e-3..1e6).contains(&rounded) { format!("{rounded}") } else { format!("{rounded:e}") }
}
