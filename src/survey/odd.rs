/*!
Heads and layers whose norms stand out, by robust statistics over the model.

**What is compared.** Norms of the same group of elements (the rope rows of `w_q_b`, the rows of a head of `w_uv` …).
A head is compared with the other heads of its layer: r = ln norm − median over the layer's heads of ln norm. A layer is
compared with the two layers on each side: r = ln norm − median over these neighbours, since norms drift with depth;
its norm is that of its median head, so that one odd head does not make an odd layer.

**The threshold.** Trained weights do not have normal tails, so none are assumed: only that |r| has tails no heavier than
exponential, P(|r| > t) = exp(−t/b). Its median is b·ln 2, and the median over the model of |r| (the MAD, which up to
half of the values can't move) estimates it. Of N values, N·exp(−t/b) are expected beyond t; that is α = 0.01 for

  t = MAD / ln 2 · ln(N / α),

N being all values that are compared, of all groups: of healthy models one in a hundred lists anything by chance. For 61
layers of 128 heads in 8 groups N is 62,464 and t is 22.6 MAD (a normal distribution's 5.6 σ would be 8.3 MAD).

**The floor.** Norms of random weights agree to a part in a thousand; a factor of 1.25 is nothing that breaks attention,
so nothing below it is listed, however even the rest is. This also holds where few values make a poor MAD.

**The ends.** The first and last two layers of a model have neighbours on one side, and trained models differ there most:
they need twice the threshold (a squared factor).

A norm of zero stands out by any threshold; it is left to the finding about zeros, where the whole tensor is zero.
*/

use mla_reference::Weight;
use serde::Serialize;

/// Models without a fault that may list something, of all of them.
const ALPHA: f64 = 0.01;
/// The least factor that is listed.
const FLOOR: f64 = 1.25;
/// Values of a group below which a median says nothing.
const LEAST: usize = 5;
/// Layers on each side that a layer is compared with.
const NEIGHBOURS: usize = 2;

/// Norms of one group of elements over the model.
pub struct Group {
    /// Weight.
    pub role: Weight,
    /// Which of its elements.
    pub name: &'static str,
    /// (layer, norm of each head), in the order of layers.
    pub layers: Vec<(usize, Vec<f64>)>,
}

impl Group {
    /// Of no layers yet.
    pub fn new(role: Weight, name: &'static str) -> Group {
        Group { role, name, layers: Vec::new() }
    }
}

/// A head or a layer that stands out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Odd {
    /// Weight.
    pub role: Weight,
    /// Which of its elements.
    pub group: &'static str,
    /// Layer.
    pub layer: usize,
    /// Head; None: the layer as a whole.
    pub head: Option<usize>,
    /// Its L2 norm; of a layer, that of its median head.
    pub norm: f64,
    /// What the norm would be by what it was compared with.
    pub typical: f64,
}

/// By which factor something of a group had to stand out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Threshold {
    /// Weight.
    pub role: Weight,
    /// Which of its elements.
    pub group: &'static str,
    /// Between the heads of a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<f64>,
    /// Between neighbouring layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<f64>,
}

/// A value as far as it stands out: residual of logs, how much less than others it weighs, and what to say of it.
struct Value {
    residual: f64,
    ease: f64,
    odd: Odd,
}

/// What stands out, and by what thresholds it was judged.
pub fn odd(groups: &[Group]) -> (Vec<Odd>, Vec<Threshold>) {
    let compared: Vec<(Vec<Value>, Vec<Value>)> = groups.iter().map(|g| (heads(g), layers(g))).collect();
    let n: usize = compared.iter().map(|(h, l)| h.len() + l.len()).sum();
    let (mut found, mut thresholds) = (Vec::new(), Vec::new());
    for (group, (heads, layers)) in groups.iter().zip(compared) {
        let [heads, layers] = [heads, layers].map(|values| {
            let limit = limit(&values, n)?;
            found.extend(values.into_iter().filter(|v| v.residual.abs() > limit * v.ease).map(|v| v.odd));
            Some(limit.exp())
        });
        if heads.is_some() || layers.is_some() {
            thresholds.push(Threshold { role: group.role, group: group.name, heads, layers });
        }
    }
    (found, thresholds)
}

/// The least |ln factor| that stands out of these values, where there are enough of them; `n`: values of all groups.
fn limit(values: &[Value], n: usize) -> Option<f64> {
    if values.len() < LEAST {
        return None;
    }
    let sizes = values.iter().map(|v| v.residual.abs()).collect();
    let b = median(sizes) / std::f64::consts::LN_2;
    Some((b * (n as f64 / ALPHA).ln()).max(FLOOR.ln()))
}

fn heads(group: &Group) -> Vec<Value> {
    let mut all = Vec::new();
    for (layer, norms) in group.layers.iter().filter(|l| l.1.len() > 1) {
        let typical = median(norms.iter().map(|n| n.ln()).collect());
        // Where most heads are zero there is nothing to compare with.
        if !typical.is_finite() {
            continue;
        }
        all.extend(norms.iter().enumerate().map(|(h, &norm)| Value {
            residual: norm.ln() - typical,
            ease: 1.0,
            odd: Odd {
                role: group.role,
                group: group.name,
                layer: *layer,
                head: Some(h),
                norm,
                typical: typical.exp(),
            },
        }));
    }
    all
}

fn layers(group: &Group) -> Vec<Value> {
    let norms: Vec<f64> = group.layers.iter().map(|(_, heads)| median(heads.clone())).collect();
    // Too few to be neighbours and ends at once.
    if norms.len() <= 2 * NEIGHBOURS {
        return Vec::new();
    }
    let mut all = Vec::new();
    for (i, &norm) in norms.iter().enumerate() {
        let (from, to) = (i.saturating_sub(NEIGHBOURS), (i + NEIGHBOURS + 1).min(norms.len()));
        let around = (from..to).filter(|j| *j != i).map(|j| norms[j].ln()).collect();
        let typical = median(around);
        if norm == 0.0 || !typical.is_finite() {
            continue;
        }
        let end = i < NEIGHBOURS || i + NEIGHBOURS >= norms.len();
        all.push(Value {
            residual: norm.ln() - typical,
            ease: if end { 2.0 } else { 1.0 },
            odd: Odd {
                role: group.role,
                group: group.name,
                layer: group.layers[i].0,
                head: None,
                norm,
                typical: typical.exp(),
            },
        });
    }
    all
}

/// The median; of an even number, the mean of the middle two. NaN of nothing.
fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    match x.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => x[n / 2],
        // Equal infinities: their mean is themselves.
        n if x[n / 2 - 1] == x[n / 2] => x[n / 2],
        n => (x[n / 2 - 1] + x[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of a counter, uniform in (0, 1).
    fn uniform(seed: u64) -> impl FnMut() -> f64 {
        let mut s = seed;
        move || {
            s = s.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = (s ^ (s >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + 1e-18
        }
    }

    /// 61 layers of 128 heads in 8 groups: logs with tails as heavy as the derivation allows, and a drift with depth.
    fn model(seed: u64, b: f64) -> Vec<Group> {
        let mut u = uniform(seed);
        let mut laplace = move || {
            let v = u() - 0.5;
            -b * v.signum() * (1.0 - 2.0 * v.abs()).max(1e-300).ln()
        };
        let roles = [Weight::WQB, Weight::WUk, Weight::WUv, Weight::WO];
        let mut groups: Vec<Group> =
            roles.iter().flat_map(|r| ["one", "two"].map(|name| Group::new(*r, name))).collect();
        for g in &mut groups {
            g.layers = (0..61)
                .map(|l| (l, (0..128).map(|_| (laplace() + 0.02 * l as f64).exp()).collect()))
                .collect();
        }
        groups
    }

    /// α is 0.01: of 50 healthy models half a one is expected, and 4 or more of them once in 500 times (Poisson).
    #[test]
    fn healthy_models_list_nothing_by_chance() {
        let listed = (0..50).filter(|s| !odd(&model(*s, 0.2)).0.is_empty()).count();
        assert!(listed < 4, "{listed} of 50");
    }

    #[test]
    fn what_was_planted_is_listed() {
        let mut groups = model(1, 0.02);
        let limit = odd(&groups).1[2].heads.unwrap();
        assert!(limit > 1.25 && limit < 1.6, "{limit}");
        groups[2].layers[7].1[100] *= 2.0;
        groups[5].layers[30].1[3] = 0.0;
        groups[7].layers[40].1.iter_mut().for_each(|n| *n *= 3.0);
        let found: Vec<_> = odd(&groups).0.into_iter().map(|o| (o.role, o.layer, o.head)).collect();
        assert_eq!(found, [(Weight::WUk, 7, Some(100)), (Weight::WUv, 30, Some(3)), (Weight::WO, 40, None)]);
    }

    /// Layers of a drifting model that changed places.
    #[test]
    fn swapped_layers_are_listed() {
        let mut groups = model(2, 0.01);
        for (l, (_, norms)) in groups[0].layers.iter_mut().enumerate() {
            norms.iter_mut().for_each(|n| *n *= (0.03 * l as f64).exp());
        }
        assert_eq!(odd(&groups).0, []);
        let (a, b) = (groups[0].layers[10].1.clone(), groups[0].layers[50].1.clone());
        (groups[0].layers[10].1, groups[0].layers[50].1) = (b, a);
        let found: Vec<_> = odd(&groups).0.into_iter().map(|o| (o.layer, o.head)).collect();
        assert_eq!(found, [(10, None), (50, None)]);
    }

    #[test]
    fn few_layers_say_nothing_of_layers() {
        let mut groups = model(3, 0.01);
        groups.iter_mut().for_each(|g| g.layers.truncate(4));
        groups[0].layers[1].1.iter_mut().for_each(|n| *n *= 9.0);
        assert!(odd(&groups).0.is_empty());
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![f64::NEG_INFINITY; 2]), f64::NEG_INFINITY);
    }
}
