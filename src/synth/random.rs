/*!
A counter-based generator: word i of a stream is a function of key and i alone.

So any block can be drawn by any thread in any order. The function is SplitMix64's (Steele, Lea and
Flood 2014), whose state after i steps is key + i·γ.
*/

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of a named thing under a seed.
pub(super) fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed.wrapping_add(GAMMA)), |k, b| mix(k.wrapping_add(GAMMA) ^ u64::from(b)))
}

/// Words from some place on.
pub(super) struct Stream {
    state: u64,
}

impl Stream {
    /// The stream of a key, from word `at` on.
    pub fn new(key: u64, at: u64) -> Stream {
        Stream { state: key.wrapping_add(at.wrapping_mul(GAMMA)) }
    }
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }
    /// Uniform in [0, 1), on multiples of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
    /// Bell-shaped, mean 0, variance 1: the sum of four independent uniform 16-bit numbers, whose
    /// variance is (2^32 - 1)/12 each.
    pub fn bell(&mut self) -> f64 {
        let w = self.word();
        let sum: u64 = (0..4).map(|i| (w >> (16 * i)) & 0xffff).sum();
        (sum as f64 - 2.0 * 65535.0) / ((((1u64 << 32) - 1) as f64) / 3.0).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the published SplitMix64 for seed 1234567.
    #[test]
    fn is_splitmix64() {
        let mut stream = Stream::new(1_234_567, 0);
        let words: [u64; 3] = std::array::from_fn(|_| stream.word());
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        assert_eq!(Stream::new(1_234_567, 2).word(), words[2]);
    }
}
