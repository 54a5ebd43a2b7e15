/*!
Geometry first: every scalar of the configuration, before any tensor.

Equal bytes prove nothing when both sides read the same wrong number, so an engine's numbers are compared
with the file's, each by name.
*/

use mla_reference::Spec;
use serde::Serialize;

/// A scalar that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScalarDifference {
    /// Name.
    pub name: String,
    /// The engine's.
    pub engine: f64,
    /// The file's, by the convention of the run.
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
    use mla_reference::{Geometry, Pairing, Rope};

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
    }
}
