/*!
Guards: bytes on both sides of every buffer that no kernel has a reason to write.

They differ from place to place, so that a kernel that writes zeros, poison or one value over and over is seen. What
lands further away than a guard is long is not.
*/

use crate::device::error::{Problem, Side};

/// Bytes of a guard: more than a row of any tensor here; a multiple of every alignment that the driver gives.
pub(super) const BYTES: usize = 1 << 16;

/// A guard's bytes.
pub(super) fn pattern() -> Vec<u8> {
    // Multiples of an odd number, high bits mixed in: no two neighbours alike, all 256 values as often.
    (0..BYTES).map(|i| ((i as u32).wrapping_mul(0x9e37_79b1) >> 13) as u8).collect()
}

/// What was written over a guard, if anything.
pub(super) fn broken(held: &[u8], pattern: &[u8], side: Side) -> Option<Problem> {
    let differs = || held.iter().zip(pattern).enumerate().filter(|(_, (h, p))| h != p).map(|(i, _)| i);
    let bytes = differs().count() as u64;
    let nearest = match side {
        Side::Before => BYTES - differs().next_back()?,
        Side::Behind => differs().next()? + 1,
    };
    Some(Problem::Guard { side, at: nearest as u64, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_over_and_over_is_seen() {
        let pattern = pattern();
        for value in 0..=255 {
            let alike = pattern.iter().filter(|p| **p == value).count();
            assert!((128..=384).contains(&alike), "{value}: {alike} of {BYTES}");
        }
        let same = pattern.windows(2).filter(|w| w[0] == w[1]).count();
        assert!(same < BYTES / 64, "{same} neighbours are alike");
    }

    #[test]
    fn the_nearest_byte_is_counted_from_the_buffer() {
        let pattern = pattern();
        assert_eq!(broken(&pattern, &pattern, Side::Behind), None);
        let mut held = pattern.clone();
        held[2] ^= 1;
        held[BYTES - 1] ^= 0x80;
        let guard = |side, at, bytes| Some(Problem::Guard { side, at, bytes });
        assert_eq!(broken(&held, &pattern, Side::Behind), guard(Side::Behind, 3, 2));
        assert_eq!(broken(&held, &pattern, Side::Before), guard(Side::Before, 1, 2));
        let text = broken(&held, &pattern, Side::Behind).unwrap().to_string();
        assert_eq!(
            text,
            "a kernel wrote 2 bytes outside of the buffer, the nearest of them 3 behind its last byte"
        );
    }
}
