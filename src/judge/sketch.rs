/*!
A residual in few numbers: enough to tell whether two runs are wrong in the same way.

The residual of a tensor, engine minus reference in ulps of each element, is projected onto [`AXES`] vectors of random
signs. The cosine of two sketches estimates that of the residuals, with a standard error of at most 1/√128 ≈ 0.09
(Charikar's and Achlioptas's random projections). Residuals that have nothing to do with each other are nearly orthogonal; the same fault gives
nearly the same residual, even where what surrounds it rounds otherwise. So [`ALIKE`] = 0.5 is more than 5 standard errors from
either. Sums are whole numbers: no figure depends on threads.
*/

/// Random axes.
pub const AXES: usize = 128;
/// Cosine from which on two residuals are the same fault's.
pub const ALIKE: f64 = 0.5;
/// An element counts for no more than so many ulps: one that is off by far more must not stand for all.
const MOST: f64 = 1024.0;
/// Parts of an ulp that are counted.
const PARTS: f64 = 16.0;

/// Sums of a residual over random signs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sketch(Option<Box<[i64; AXES]>>);

impl Sketch {
    /// Adds an element of the residual, in ulps, at a row and column. What is not finite adds nothing.
    pub fn add(&mut self, (row, col): (usize, usize), ulps: f64) {
        let parts = (ulps.clamp(-MOST, MOST) * PARTS).round();
        if parts.is_nan() || parts == 0.0 {
            return;
        }
        let parts = parts as i64;
        let sums = self.0.get_or_insert_with(|| Box::new([0; AXES]));
        let place = (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ (col as u64).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        for (word, sums) in sums.chunks_mut(64).enumerate() {
            let signs = mix(place.wrapping_add((word as u64 + 1).wrapping_mul(0x1656_67b1_9e37_79f9)));
            for (bit, sum) in sums.iter_mut().enumerate() {
                let negative = -((signs >> bit & 1) as i64);
                *sum = sum.wrapping_add((parts ^ negative).wrapping_sub(negative));
            }
        }
    }

    /// Adds another part of the same residual.
    pub fn merge(&mut self, other: &Sketch) {
        let Some(theirs) = &other.0 else { return };
        let mine = self.0.get_or_insert_with(|| Box::new([0; AXES]));
        mine.iter_mut().zip(theirs.iter()).for_each(|(a, b)| *a = a.wrapping_add(*b));
    }

    /// The direction alone, in whole numbers up to ±1000; empty where there is no residual.
    pub fn direction(&self) -> Vec<i16> {
        let Some(sums) = &self.0 else { return Vec::new() };
        let most = sums.iter().map(|v| v.unsigned_abs()).max().unwrap_or(0);
        if most == 0 {
            return Vec::new();
        }
        sums.iter().map(|v| (*v as f64 / most as f64 * 1000.0).round() as i16).collect()
    }
}

/// Cosine of two directions; None where one is empty or of another length.
pub fn cosine(a: &[i16], b: &[i16]) -> Option<f64> {
    let dot = |a: &[i16], b: &[i16]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let (aa, bb) = (dot(a, a), dot(b, b));
    (a.len() == b.len() && aa > 0.0 && bb > 0.0).then(|| dot(a, b) / (aa * bb).sqrt())
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sketch(f: impl Fn(usize, usize) -> f64) -> Sketch {
        let mut s = Sketch::default();
        for row in 0..64 {
            for col in 0..96 {
                s.add((row, col), f(row, col));
            }
        }
        s
    }

    /// Drawn values in (−1, 1).
    fn drawn(seed: u64, row: usize, col: usize) -> f64 {
        mix(seed ^ mix((row * 1000 + col) as u64)) as f64 / u64::MAX as f64 * 2.0 - 1.0
    }

    #[test]
    fn a_cosine_is_that_of_the_residuals() {
        // Residuals at known angles: a·cos φ + b·sin φ with a, b drawn.
        let a = sketch(|r, c| 50.0 * drawn(1, r, c));
        let within = 5.0 / (AXES as f64).sqrt();
        for phi in [0.0f64, 0.5, 1.0, 1.5, 2.5, 3.1] {
            let other = sketch(|r, c| 50.0 * (phi.cos() * drawn(1, r, c) + phi.sin() * drawn(2, r, c)));
            let cosine = cosine(&a.direction(), &other.direction()).unwrap();
            // The standard error shrinks with sin² φ.
            assert!((cosine - phi.cos()).abs() <= within * phi.sin().powi(2) + 0.02, "{phi}: {cosine}");
        }
    }

    #[test]
    fn other_places_are_other_residuals_and_size_is_none() {
        let one = |head: usize| sketch(|_, c| if c / 16 == head { 8.0 } else { 0.0 });
        assert!(cosine(&one(1).direction(), &one(2).direction()).unwrap().abs() < ALIKE);
        let twice = sketch(|_, c| if c / 16 == 1 { 16.0 } else { 0.0 });
        assert!(cosine(&one(1).direction(), &twice.direction()).unwrap() > 0.999);
    }

    #[test]
    fn nothing_is_no_direction_and_parts_add_up() {
        assert_eq!(cosine(&Sketch::default().direction(), &sketch(|_, _| 1.0).direction()), None);
        let mut bad = Sketch::default();
        bad.add((0, 0), f64::NAN);
        assert!(bad.direction().is_empty());
        let (mut parts, mut whole) = (Sketch::default(), Sketch::default());
        for i in 0..10 {
            let mut part = Sketch::default();
            part.add((i, 3 * i), i as f64 - 4.0);
            whole.add((i, 3 * i), i as f64 - 4.0);
            parts.merge(&part);
        }
        assert_eq!(parts, whole);
        bad.add((0, 0), f64::INFINITY);
        assert!(bad.direction().iter().all(|v| v.abs() <= 1000));
    }
}
