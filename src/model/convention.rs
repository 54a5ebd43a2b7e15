/*!
Conventions: which mathematics a file's numbers are taken to mean.

The ecosystem disagrees about the same file: eps of the q_a and kv_a norms, YaRN's betas, decimals of
float32 metadata. [`Numbers`] is what the file says; [`Numbers::spec`] is what a convention makes of it.

| | hf | llama.cpp | vllm, sglang |
|---|---|---|---|
| eps of attn_norm | rounded to 2 digits | float32 as stored | rounded to 2 digits |
| eps of q_a and kv_a norms | 1e-6 always | the same eps | the same eps |
| YaRN betas | from the file | 32 and 1 always | from the file |
| YaRN multiplier / 0.1 | rounded to 6 digits | float32 as stored | rounded to 6 digits |
| YaRN without multiplier | cos, sin · g | cos, sin · g and scale · g² | cos, sin · g |
| temperature scale | rounded to 6 digits | float32 as stored | rounded to 6 digits |
| rope factors | rounded to 6 digits | float32 as stored | rounded to 6 digits |
| cos, sin under rope factors | · m | as they are | · m |

g = 1 + 0.1 ln factor, m = [`Factors::magnitude`] (1 where the file was made for the length it was trained on). Where
an architecture's scale is plain ([`YarnMultiplier::Plain`]) YaRN leaves it alone. Sources: transformers 5.24 (modules build the q_a and kv_a norms without an eps
argument), llama.cpp 0c1e57098 (reads neither beta key for these architectures), vLLM's deepseek_v2.py.
*/

use super::Reading;
use super::arch::{Architecture, Rotation, YarnMultiplier};
use super::rope::{Factors, Yarn, plain_frequencies, significant, yarn_frequencies};
use mla_reference::{Geometry, Pairing, Rope, Spec, Temperature};
use serde::Serialize;

/// Whose reading of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Convention {
    /// What fits the command: `hf` in `run`.
    Auto,
    /// Hugging Face transformers.
    Hf,
    /// llama.cpp.
    #[value(name = "llama.cpp")]
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

impl Convention {
    /// Those that a file can be read by.
    pub const ALL: [Convention; 4] =
        [Convention::Hf, Convention::LlamaCpp, Convention::Vllm, Convention::Sglang];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Convention::Auto => "auto",
            Convention::Hf => "hf",
            Convention::LlamaCpp => "llama.cpp",
            Convention::Vllm => "vllm",
            Convention::Sglang => "sglang",
        }
    }
}

/// The numbers of a file, before any convention.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    /// attention.layer_norm_rms_epsilon as stored
    pub eps: f64,
    /// rope.freq_base
    pub theta: f64,
    /// YaRN, where the scaling type says so
    pub yarn: Option<Yarn>,
    /// attention.temperature_scale and _length
    pub temperature: Option<Temperature>,
    /// rope_factors_short.weight and _long
    pub factors: Option<Factors>,
}

impl Numbers {
    /// What a reading makes of the numbers.
    pub fn spec(&self, arch: &Architecture, geometry: Geometry, reading: &Reading) -> Spec {
        let convention = reading.convention;
        let llama = convention == Convention::LlamaCpp;
        let eps = if llama { self.eps } else { significant(self.eps, 2) };
        let own_eps = if matches!(convention, Convention::Hf | Convention::Auto) { 1e-6 } else { eps };
        let (rope, factor_of_scale) = match arch.rotation {
            // cos 0 = 1 and sin 0 = 0, and x·1 − y·0 = x in every format, up to the sign of a zero, which is judged in copies alone.
            Rotation::None => {
                let inv_freq = vec![0.0; geometry.rope / 2];
                (Rope { inv_freq, magnitude: 1.0, pairing: Pairing::Adjacent }, 1.0)
            }
            Rotation::Pairs(pairing) => self.rope(arch, pairing, geometry.rope, reading, llama),
        };
        Spec {
            geometry,
            eps_attn: eps,
            eps_latent: reading.norm_eps.unwrap_or(own_eps),
            rope,
            scale: factor_of_scale / (geometry.key() as f64).sqrt(),
            temperature: self
                .temperature
                .filter(|_| arch.temperature)
                .map(|t| Temperature { scale: if llama { t.scale } else { significant(t.scale, 6) }, ..t }),
        }
    }

    /// The rotation of `width` columns, and what it puts into the softmax scale.
    fn rope(
        &self,
        arch: &Architecture,
        pairing: Pairing,
        width: usize,
        reading: &Reading,
        llama: bool,
    ) -> (Rope, f64) {
        let (mut magnitude, mut factor_of_scale) = (1.0, 1.0);
        let mut inv_freq = plain_frequencies(self.theta, width);
        if let Some(y) = &self.yarn {
            let betas = if llama { (32.0, 1.0) } else { (y.beta_fast, y.beta_slow) };
            inv_freq = yarn_frequencies(&inv_freq, self.theta, width, y, betas);
            let g = |m: f64| if y.factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(y.factor) + 1.0 };
            let stored = y.log_multiplier.filter(|_| arch.yarn == YarnMultiplier::Tenth);
            match stored.map(|m| if llama { f64::from(m as f32 / 0.1f32) } else { significant(m / 0.1, 6) }) {
                // mscale = mscale_all_dim in every known file: cos and sin keep their size.
                Some(m) if m != 0.0 => factor_of_scale = g(m) * g(m),
                _ => {
                    magnitude = g(1.0);
                    if llama && arch.yarn != YarnMultiplier::Plain {
                        factor_of_scale = magnitude * magnitude;
                    }
                }
            }
        }
        if let Some(factors) = &self.factors {
            let divisors = factors.of(factors.set(reading.n_ctx));
            for (f, divisor) in inv_freq.iter_mut().zip(divisors) {
                *f /= if llama { *divisor } else { significant(*divisor, 6) };
            }
            if !llama {
                magnitude *= factors.magnitude();
            }
        }
        (Rope { inv_freq, magnitude, pairing }, factor_of_scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::deepseek2::DEEPSEEK2;
    use crate::model::glm_dsa::GLM_DSA;
    use crate::model::kimi_linear::KIMI_LINEAR;
    use crate::model::minicpm3::MINICPM3;
    use crate::model::mistral4::MISTRAL4;
    use crate::model::plm::PLM;
    use approx::assert_relative_eq;

    const V3: Geometry =
        Geometry { hidden: 7168, heads: 128, q_rank: 1536, latent: 512, rope: 64, nope: 128, value: 128 };

    fn numbers(factor: f64, multiplier: Option<f64>) -> Numbers {
        let yarn =
            Yarn { factor, original: 4096.0, beta_fast: 32.0, beta_slow: 1.0, log_multiplier: multiplier };
        Numbers { eps: f64::from(1e-6f32), theta: 1e4, yarn: Some(yarn), temperature: None, factors: None }
    }

    /// Published values: 192^-1/2 · (0.1·m·ln factor + 1)².
    #[test]
    fn scale_of_known_models() {
        let scale = |f, m: f32| {
            numbers(f, Some(f64::from(m))).spec(&DEEPSEEK2, V3, &Reading::of(Convention::Hf)).scale
        };
        assert_relative_eq!(scale(40.0, 0.1), 0.135_233_78, max_relative = 1e-7);
        assert_relative_eq!(scale(40.0, 0.0707), 0.114_721_39, max_relative = 1e-7);
        assert_relative_eq!(scale(32.0, 0.1), 0.130_860_8, max_relative = 1e-6);
    }

    /// DeepSeek-V3: low 10, high 23; the pairs outside the ramp are plain, or divided by the factor.
    #[test]
    fn yarn_ramp_lies_between_pairs_10_and_23() {
        let s = numbers(40.0, Some(0.1)).spec(&DEEPSEEK2, V3, &Reading::of(Convention::Hf));
        let plain = plain_frequencies(1e4, 64);
        assert_eq!(s.rope.inv_freq[10], plain[10]);
        assert!(s.rope.inv_freq[11] < plain[11]);
        assert!(s.rope.inv_freq[22] > plain[22] / 40.0);
        assert_relative_eq!(s.rope.inv_freq[23], plain[23] / 40.0, max_relative = 1e-15);
        assert_eq!(s.rope.magnitude, 1.0);
    }

    /// A ramp beyond the ends: dim(r) = 32·ln(orig / 2πr) / ln θ is below 0 or above P − 1.
    #[test]
    fn yarn_ramp_ends_at_the_first_and_last_column() {
        let freq = |theta, original, beta_fast, beta_slow| {
            let yarn = Yarn { factor: 40.0, original, beta_fast, beta_slow, log_multiplier: Some(0.1) };
            let n = Numbers { eps: 1e-6, theta, yarn: Some(yarn), temperature: None, factors: None };
            n.spec(&DEEPSEEK2, V3, &Reading::of(Convention::Hf)).rope.inv_freq
        };
        // dim(32) = 32·ln(64/201)/ln 10⁴ = -4.0, dim(1) = 8.1: from 0, not from -4, to 9.
        let f = freq(1e4, 64.0, 32.0, 1.0);
        let plain = plain_frequencies(1e4, 64);
        assert_eq!(f[0], 1.0);
        assert_relative_eq!(f[3], plain[3] * (6.0 / 9.0 + 3.0 / 9.0 / 40.0), max_relative = 1e-14);
        // θ = 10: dim(600) = 1.2, dim(1) = 90: from 1 to 63, not to 91.
        let f = freq(10.0, 4096.0, 600.0, 1.0);
        let plain = plain_frequencies(10.0, 64);
        assert_relative_eq!(f[31], plain[31] * (32.0 / 62.0 + 30.0 / 62.0 / 40.0), max_relative = 1e-14);
        // dim(1) = 32·ln(6/2π)/ln 10⁴ = -0.16, whose ceiling is 0: a step from pair 0 to pair 1.
        let f = freq(1e4, 6.0, 32.0, 1.0);
        assert_eq!(f[0], 1.0);
        assert_relative_eq!(f[1], plain_frequencies(1e4, 64)[1] / 40.0, max_relative = 1e-14);
    }

    /// transformers: get_mscale is 1 up to factor 1; a multiplier of 0 is none; glm-dsa does not read the key.
    #[test]
    fn multipliers_that_are_none() {
        let hf = |n: Numbers, arch| n.spec(arch, V3, &Reading::of(Convention::Hf));
        assert_eq!(hf(numbers(0.5, Some(0.1)), &DEEPSEEK2).scale, 1.0 / 192f64.sqrt());
        let none = hf(numbers(40.0, None), &DEEPSEEK2);
        assert_eq!(hf(numbers(40.0, Some(0.0)), &DEEPSEEK2), none);
        assert_eq!(hf(numbers(40.0, Some(0.1)), &GLM_DSA), none);
        let hot =
            Numbers { temperature: Some(Temperature { scale: 0.1, length: 8192.0 }), ..numbers(40.0, None) };
        assert_eq!(hf(hot.clone(), &DEEPSEEK2).temperature, hot.temperature);
        assert_eq!(hf(hot, &GLM_DSA).temperature, None);
    }

    /// llama.cpp reads neither beta: 32 and 1 whatever the file says.
    #[test]
    fn betas_are_the_files_except_in_llama_cpp() {
        let with = |beta_fast, beta_slow, c| {
            let mut n = numbers(40.0, Some(0.1));
            n.yarn = n.yarn.map(|y| Yarn { beta_fast, beta_slow, ..y });
            n.spec(&DEEPSEEK2, V3, &Reading::of(c)).rope.inv_freq
        };
        let usual = with(32.0, 1.0, Convention::Hf);
        for c in Convention::ALL {
            assert_eq!(with(16.0, 2.0, c) == usual, c == Convention::LlamaCpp, "{}", c.name());
        }
    }

    #[test]
    fn conventions_differ_where_the_table_says() {
        let n = Numbers { eps: f64::from(1e-5f32), ..numbers(40.0, None) };
        let [hf, llama, vllm, _] = Convention::ALL.map(|c| n.spec(&DEEPSEEK2, V3, &Reading::of(c)));
        assert_eq!((hf.eps_attn, hf.eps_latent), (1e-5, 1e-6));
        assert_eq!((llama.eps_attn, llama.eps_latent), (f64::from(1e-5f32), f64::from(1e-5f32)));
        assert_eq!((vllm.eps_attn, vllm.eps_latent), (1e-5, 1e-5));
        let g = 1.0 + 0.1 * 40f64.ln();
        assert_relative_eq!(hf.rope.magnitude, g, max_relative = 1e-15);
        assert_relative_eq!(llama.scale / hf.scale, g * g, max_relative = 1e-15);
        assert_eq!(
            n.spec(&DEEPSEEK2, V3, &Reading { norm_eps: Some(3e-5), ..Reading::of(Convention::Hf) })
                .eps_latent,
            3e-5
        );
    }

    const MINICPM: Geometry =
        Geometry { hidden: 2560, heads: 40, q_rank: 768, latent: 256, rope: 32, nope: 64, value: 64 };

    /// Factors 1.1 (float32) and 2, for a model trained on 32,768 positions and made for four times as many.
    fn longrope() -> Numbers {
        let factors = Factors {
            short: vec![f64::from(1.1f32); 16],
            long: vec![2.0; 16],
            original: 32_768.0,
            context: 131_072.0,
        };
        Numbers { eps: 1e-5, theta: 1e4, yarn: None, temperature: None, factors: Some(factors) }
    }

    /// Which set: by the session's length. transformers' magnitude √(1 + ln 4 / ln 32768), none in llama.cpp; the scale is plain.
    #[test]
    fn rope_factors_are_chosen_by_the_session() {
        let spec = |c, n_ctx| longrope().spec(&MINICPM3, MINICPM, &Reading { n_ctx, ..Reading::of(c) });
        let plain = plain_frequencies(1e4, 32);
        for (n_ctx, divisor) in [(None, 1.1), (Some(32_768), 1.1), (Some(32_769), 2.0)] {
            let s = spec(Convention::Hf, n_ctx);
            for (f, p) in s.rope.inv_freq.iter().zip(&plain) {
                assert_relative_eq!(*f, p / divisor, max_relative = 1e-15);
            }
            assert_relative_eq!(s.rope.magnitude, 1.064_581_294_844_754_2, max_relative = 1e-15);
            assert_eq!((s.rope.pairing, s.scale), (Pairing::Half, 1.0 / 96f64.sqrt()));
        }
        let llama = spec(Convention::LlamaCpp, None);
        assert_eq!(llama.rope.magnitude, 1.0);
        assert_relative_eq!(llama.rope.inv_freq[0], 1.0 / f64::from(1.1f32), max_relative = 1e-15);
    }

    /// No angle, whatever the file says of rope; the scale has no factor of YaRN's.
    #[test]
    fn no_rotation_is_no_angle() {
        let s = numbers(40.0, Some(0.1)).spec(&KIMI_LINEAR, V3, &Reading::of(Convention::LlamaCpp));
        assert!(s.rope.inv_freq.iter().all(|f| *f == 0.0) && s.rope.inv_freq.len() == 32);
        assert_eq!((s.rope.magnitude, s.scale), (1.0, 1.0 / 192f64.sqrt()));
        // Where the scale is plain, YaRN is in cos and sin alone.
        let s = numbers(40.0, Some(0.1)).spec(&PLM, V3, &Reading::of(Convention::LlamaCpp));
        assert_relative_eq!(s.rope.magnitude, 1.0 + 0.1 * 40f64.ln(), max_relative = 1e-15);
        assert_eq!(s.scale, 1.0 / 192f64.sqrt());
    }

    /// The decimal of float32 0.1 for all but llama.cpp.
    #[test]
    fn temperature_is_the_decimal_but_for_llama_cpp() {
        let hot = Temperature { scale: f64::from(0.1f32), length: 8192.0 };
        let n = Numbers { temperature: Some(hot), ..numbers(128.0, Some(0.1)) };
        for c in Convention::ALL {
            let scale = n.spec(&MISTRAL4, V3, &Reading::of(c)).temperature.unwrap().scale;
            assert_eq!(
                scale,
                if c == Convention::LlamaCpp { f64::from(0.1f32) } else { 0.1 },
                "{}",
                c.name()
            );
        }
    }
}
