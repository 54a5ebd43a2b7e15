/*!
Codebooks of the IQ1, IQ2 and IQ3 types, and what their entries are multiplied by.

`codebooks.bin` holds them one after another, an entry a little-endian u16: element j in bits w j of it, as an index into
the few values that elements have. They are unpacked when this is compiled.

| codebook | entries of | w | values |
|---|---|---|---|
| IQ2_XXS, IQ2_XS, IQ2_S | 8 | 2 | 8 25 43 |
| IQ3_XXS | 4 | 3 | 4 12 20 28 36 44 52 62 |
| IQ3_S | 4 | 3 | 1 3 5 … 15 |
| IQ1 (IQ1_S, IQ1_M) | 8 | 2 | -1 0 1 |

Source of the numbers: ggml 0.25.3 (MIT licence), grids of `ggml-common.h`, as carried by llama.cpp commit 0c1e57098;
they were chosen by its authors and follow from no formula. ggml's own results for blocks that visit every entry are
in `fixtures/quant`.
*/

static PACKED: &[u8; 2 * 4608] = include_bytes!("codebooks.bin");

/// Entries `from .. from + N` of the file.
const fn unpack<const N: usize, const E: usize>(from: usize, width: usize, values: &[i8]) -> [[i8; E]; N] {
    let mut grid = [[0; E]; N];
    let mut n = 0;
    while n < N {
        let at = 2 * (from + n);
        let entry = u16::from_le_bytes([PACKED[at], PACKED[at + 1]]);
        let mut j = 0;
        while j < E {
            grid[n][j] = values[(entry >> (width * j)) as usize & ((1 << width) - 1)];
            j += 1;
        }
        n += 1;
    }
    grid
}

const TWO: &[i8] = &[8, 25, 43];

/// Entries of IQ2_XXS.
pub static IQ2_XXS: [[i8; 8]; 256] = unpack(0, 2, TWO);
/// Entries of IQ2_XS.
pub static IQ2_XS: [[i8; 8]; 512] = unpack(256, 2, TWO);
/// Entries of IQ2_S.
pub static IQ2_S: [[i8; 8]; 1024] = unpack(768, 2, TWO);
/// Entries of IQ3_XXS.
pub static IQ3_XXS: [[i8; 4]; 256] = unpack(1792, 3, &[4, 12, 20, 28, 36, 44, 52, 62]);
/// Entries of IQ3_S.
pub static IQ3_S: [[i8; 4]; 512] = unpack(2048, 3, &[1, 3, 5, 7, 9, 11, 13, 15]);
/// Entries of IQ1_S and IQ1_M.
pub static IQ1: [[i8; 8]; 2048] = unpack(2560, 2, &[-1, 0, 1]);

/// Eight signs from seven bits: the eighth makes the number of minus signs even.
static EVEN: [u8; 128] = {
    let mut signs = [0; 128];
    let mut i = 0;
    while i < 128 {
        signs[i] = i as u8 | ((i.count_ones() & 1) << 7) as u8;
        i += 1;
    }
    signs
};

/// Signs of group `l` from a word that holds seven bits for each of four groups.
#[inline(always)]
pub(super) fn even_signs(word: u32, l: usize) -> u8 {
    EVEN[(word >> (7 * l)) as usize & 127]
}

/// scale q, with the sign of q turned where bit j of `signs` is set.
#[inline(always)]
pub(super) fn signed<const E: usize>(q: &[i8; E], signs: u8, scale: f64, out: &mut [f64; E]) {
    for j in 0..E {
        let minus = (i32::from(signs) >> j) & 1;
        out[j] = scale * f64::from((i32::from(q[j]) ^ -minus) + minus);
    }
}
