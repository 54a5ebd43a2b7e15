/*!
The inner loops, in plain Rust, generic over the shape of a tile; [`super::dispatch`] instantiates them once per
instruction set. The defined sum of the module's text is this file's.

To know before changing anything:
- no closures in these loops: one inside an inlined function is compiled without the caller's instruction set,
  `mul_add` becomes a call, 50 times slower, and the bits stay the same, so that no test notices (the benchmark does);
- do not unroll over k by hand: LLVM then regroups the chains by row, and dependent operations follow each other;
- a loop that starts on 16 and not on 32 bytes is 15 % slower: `.cargo/config.toml` aligns them.
*/

/// Columns summed by one accumulator. Part of the definition of the result.
pub const KC: usize = 256;
/// Row stride of a decoded block: not a power of two, so that rows spread over cache sets.
pub const LD: usize = KC + 8;

/// Part of a decoded row, on cache lines of its own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Row(pub [f64; LD]);

/// `out[r][l] += Σ_k w[r][k] x[k][l]` for `R` rows of weights and `L` tokens.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
pub fn tile<const R: usize, const L: usize>(w: &[Row; R], x: &[[f64; L]], out: &mut [[f64; L]; R]) {
    let mut acc = [[0.0f64; L]; R];
    let n = x.len().min(KC);
    let x = &x[..n];
    // By index: the loop has fewer instructions than over an iterator.
    for k in 0..n {
        let xk = &x[k];
        for r in 0..R {
            let v = w[r].0[k];
            for l in 0..L {
                acc[r][l] = v.mul_add(xk[l], acc[r][l]);
            }
        }
    }
    for r in 0..R {
        for l in 0..L {
            out[r][l] += acc[r][l];
        }
    }
}

/// One token: `G` rows of weights side by side in the lanes, four columns turned at a time.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
pub fn column<const G: usize>(w: &[Row; G], x: &[f64], out: &mut [f64; G]) {
    let mut acc = [0.0f64; G];
    let (fours, rest) = x[..x.len().min(KC)].as_chunks::<4>();
    for i in 0..fours.len() {
        let (k, xk) = (4 * i, &fours[i]);
        for g in 0..G / 4 {
            let mut t = [[0.0f64; 4]; 4];
            for i in 0..4 {
                for j in 0..4 {
                    t[j][i] = w[g * 4 + i].0[k + j];
                }
            }
            for j in 0..4 {
                for i in 0..4 {
                    acc[g * 4 + i] = t[j][i].mul_add(xk[j], acc[g * 4 + i]);
                }
            }
        }
    }
    for i in 0..rest.len() {
        for g in 0..G {
            acc[g] = w[g].0[4 * fours.len() + i].mul_add(rest[i], acc[g]);
        }
    }
    for g in 0..G {
        out[g] += acc[g];
    }
}

/// Sum of squares: eight lanes (k mod 8), then a fixed tree.
#[inline(always)]
pub fn sumsq(w: &[f64]) -> f64 {
    let (chunks, rest) = w.as_chunks::<8>();
    let mut a = [0.0f64; 8];
    for c in chunks {
        for l in 0..8 {
            a[l] = c[l].mul_add(c[l], a[l]);
        }
    }
    for (l, v) in rest.iter().enumerate() {
        a[l] = v.mul_add(*v, a[l]);
    }
    ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles of instruction sets that this machine lacks, as portable code.
    #[test]
    fn every_tile_sums_alike() {
        fn shape<const R: usize, const L: usize>() {
            let v = |i: usize| ((i * 7919 % 1009) as f64 - 500.0) / 333.0;
            for n in [1, 5, KC] {
                let mut w = [Row([0.0; LD]); R];
                for (r, row) in w.iter_mut().enumerate() {
                    for (k, w) in row.0[..n].iter_mut().enumerate() {
                        *w = v(r * 1000 + k);
                    }
                }
                let x: Vec<[f64; L]> =
                    (0..n).map(|k| std::array::from_fn(|l| v(k * 31 + l * 5003))).collect();
                let mut out = [[1.0; L]; R];
                tile(&w, &x, &mut out);
                for r in 0..R {
                    for l in 0..L {
                        let p = (0..n).fold(0.0f64, |p, k| w[r].0[k].mul_add(x[k][l], p));
                        assert_eq!(out[r][l].to_bits(), (1.0 + p).to_bits());
                    }
                }
                if L == 1 {
                    let mut col = [1.0; R];
                    column(&w, x.as_flattened(), &mut col);
                    assert_eq!(col.as_slice(), out.as_flattened());
                }
            }
        }
        shape::<1, 8>();
        shape::<1, 16>();
        shape::<4, 8>();
        shape::<4, 4>();
        shape::<6, 8>();
        shape::<12, 4>();
        shape::<12, 16>();
        shape::<24, 8>();
        shape::<8, 1>();
        shape::<24, 1>();
    }
}
