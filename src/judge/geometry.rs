/*!
Geometry first: every scalar of the configuration, before any tensor.

Equal bytes prove nothing when both sides read the same wrong number, so an engine's numbers are compared
with the file's, each by name.
*/

use mla_reference::Spec;
use serde::{Deserialize, Serialize};

/// A scalar that differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalarDifference {
    /// Name.
    pub name: String,
    /// The engine's.
    #[serde(deserialize_with = "crate::written::number")]
    pub engine: f64,
    /// The file's, by the convention of the run.
    #[serde(deserialize_with = "crate::written::number")]
    pub reference: f64,
}

/// Scalars that differ, bit for bit, between an engine and the reference.
pub fn compare_scalars(engine: &Spec, reference: &Spec) -> Vec<ScalarDifference> {
    let (a, b) = (engine.scalars(), reference.scalars());
    let mut all: Vec<ScalarDifference> = a
        .iter()
        .zip(&b)
        .filter(|(a, b)| a.0 != b.0 || a.1.to_bits() != b.1.to_bits())
        .map(|(a, b)| ScalarDifference { name: b.0.clone(), engine: a.1, reference: b.1 })
        .collect();
    if a.len() != b.len() {
        let n = |s: &[(String, f64)]| s.len() as f64;
        all.push(ScalarDifference { name: "rope pairs".into(), engine: n(&a), reference: n(&b) });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::{Geometry, Pairing, Rope, Temperature};

    #[test]
    fn every_scalar_counts() {
        let spec = Spec {
            geometry: Geometry { hidden: 4, heads: 2, q_rank: 0, latent: 8, rope: 2, nope: 4, value: 4 },
            eps_attn: 1e-6,
            eps_latent: 1e-6,
            rope: Rope { inv_freq: vec![1.0], magnitude: 1.0, pairing: Pairing::Adjacent },
            scale: 0.5,
            temperature: None,
        };
        assert!(compare_scalars(&spec, &spec).is_empty());
        let mut other = spec.clone();
        other.geometry.heads = 3;
        other.rope.inv_freq[0] = 0.5;
        other.scale = 0.25;
        let names: Vec<String> = compare_scalars(&other, &spec).into_iter().map(|d| d.name).collect();
        assert_eq!(names, ["heads", "scale", "inv_freq[0]"]);
        // One field after the other, and each by the least that can be told apart.
        let up = |v: &mut f64| *v = v.next_up();
        type Change<'a> = &'a dyn Fn(&mut Spec);
        let changes: [(&str, Change); 15] = [
            ("hidden", &|s| s.geometry.hidden += 1),
            ("heads", &|s| s.geometry.heads += 1),
            ("q_rank", &|s| s.geometry.q_rank += 1),
            ("latent", &|s| s.geometry.latent += 1),
            ("rope", &|s| s.geometry.rope += 1),
            ("nope", &|s| s.geometry.nope += 1),
            ("value", &|s| s.geometry.value += 1),
            ("eps_attn", &|s| up(&mut s.eps_attn)),
            ("eps_latent", &|s| up(&mut s.eps_latent)),
            ("scale", &|s| up(&mut s.scale)),
            ("rope_magnitude", &|s| up(&mut s.rope.magnitude)),
            ("rope_half_split", &|s| s.rope.pairing = Pairing::Half),
            ("temperature_scale", &|s| s.temperature = Some(Temperature { scale: 0.1, length: 0.0 })),
            ("temperature_length", &|s| s.temperature = Some(Temperature { scale: 0.0, length: 8.0 })),
            ("inv_freq[0]", &|s| up(&mut s.rope.inv_freq[0])),
        ];
        for (name, change) in changes {
            let mut other = spec.clone();
            change(&mut other);
            let found: Vec<String> = compare_scalars(&other, &spec).into_iter().map(|d| d.name).collect();
            assert_eq!(found, [name]);
        }
        other = spec.clone();
        other.rope.inv_freq.push(0.5);
        assert_eq!(compare_scalars(&other, &spec).len(), 1);
    }
}
