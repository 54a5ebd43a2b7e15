//! Decoders against ggml's own results (`fixtures/quant`).

use mla_reference::dequant;
use mla_reference::ggml::GgmlType;
use safetensors::SafeTensors;

/// ggml's results.
const GGML: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/quant/blocks.safetensors");
/// What the layout says, of types that ggml decodes nowhere.
const LAYOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/quant/layouts.safetensors");

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
}

fn decoded(ty: GgmlType, bytes: &[u8], elements: usize) -> Vec<f64> {
    let mut got = vec![1.0; elements];
    dequant::decode(ty, bytes, &mut got)
        .unwrap_or_else(|| panic!("{ty} has no decoder, or not so many elements"));
    got
}

/// Decoded values and ggml's float32: the same bits after one rounding, NaN as NaN.
fn compare(ty: GgmlType, what: &str, bytes: &[u8], want: &[f32]) {
    for (i, (got, want)) in decoded(ty, bytes, want.len()).iter().zip(want).enumerate() {
        let rounded = *got as f32;
        let same = rounded.to_bits() == want.to_bits() || rounded.is_nan() && want.is_nan();
        assert!(same, "{ty} {what}: element {i}: {got:e}, ggml {want:e}");
    }
}

/// Types of a codebook or a table of scales: there must be blocks that visit all of it.
const WALKED: &[GgmlType] = {
    use GgmlType::*;
    &[IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, MXFP4, NVFP4]
};

/// Every type of the table: ggml's float32, or, where ggml has none, the float64 that the layout says, bit for bit.
#[test]
fn every_type() {
    let files = [GGML, LAYOUT].map(|file| std::fs::read(file).unwrap());
    let [ggml, layout] = files.each_ref().map(|file| SafeTensors::deserialize(file).unwrap());
    let (mut missing, mut by_layout) = (Vec::new(), Vec::new());
    for &ty in GgmlType::ALL {
        let tensor = |key: &str| ggml.tensor(&format!("{ty}.{key}"));
        if let Ok(bytes) = tensor("bytes") {
            assert_eq!(bytes.shape()[1], ty.block_bytes());
            assert!(bytes.shape()[0] >= 42); // 32 random, 10 special
            compare(ty, "blocks", bytes.data(), &floats(tensor("f32").unwrap().data()));
            if let (Ok(bytes), Ok(want)) = (tensor("quantised_bytes"), tensor("quantised_f32")) {
                compare(ty, "quantised", bytes.data(), &floats(want.data()));
            }
            // Signs of zero (of an f16 scale -0), or all entries, are part of the fixture: there must be such blocks.
            let special = tensor("special").unwrap();
            assert!(special.data().contains(&2) || WALKED.contains(&ty), "{ty}");
            assert_eq!(special.data().contains(&9), WALKED.contains(&ty), "{ty}");
        } else if let Ok(bytes) = layout.tensor(&format!("{ty}.bytes")) {
            by_layout.push(ty);
            assert_eq!(bytes.shape()[1], ty.block_bytes());
            assert!(bytes.shape()[0] >= 74);
            let want = doubles(layout.tensor(&format!("{ty}.f64")).unwrap().data());
            for (i, (got, want)) in decoded(ty, bytes.data(), want.len()).iter().zip(&want).enumerate() {
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{ty}: element {i}: {got:e}, by its layout {want:e}");
            }
        } else {
            missing.push(ty);
        }
    }
    assert_eq!(missing, [], "types without a fixture");
    // ggml's results are used wherever there are any.
    use GgmlType::*;
    assert_eq!(by_layout, [F32, Q8_1, I8, I16, I32, I64, F64]);
}

/// d, as a whole number of 2^-24.
fn whole(half: &[u8]) -> i128 {
    let h = i128::from(u16::from_le_bytes([half[0], half[1]]));
    let (e, f) = (h >> 10 & 31, h & 1023);
    let m = if e == 0 { f } else { (f | 1024) << (e - 1) };
    if h >> 15 == 1 { -m } else { m }
}

/// Where float32 rounds or overflows (Q4_1, Q4_K, Q8_K, MXFP4), float64 does not: the same formula in whole numbers, or
/// each value divided by its code is the scale.
#[test]
fn exact() {
    let file = std::fs::read(GGML).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut beyond = 0;
    let mut check = |ty: GgmlType, formula: &dyn Fn(&[u8], usize) -> i128| {
        let (bytes, kind) =
            (file.tensor(&format!("{ty}.bytes")).unwrap(), file.tensor(&format!("{ty}.special")).unwrap());
        for (block, kind) in bytes.data().chunks(ty.block_bytes()).zip(kind.data()) {
            // Finite scales only.
            if *kind > 3 {
                continue;
            }
            let mut got = vec![0.0; ty.block_elements()];
            dequant::decode(ty, block, &mut got).unwrap();
            for (i, v) in got.iter().enumerate() {
                let units = v * 2f64.powi(24);
                assert_eq!(units as i128, formula(block, i), "{ty} {i}");
                assert_eq!(units.fract(), 0.0);
                beyond += u32::from(f64::from(*v as f32) != *v);
            }
        }
    };
    check(GgmlType::Q4_1, &|b, i| {
        let q = b[4 + i % 16] >> (4 * (i / 16)) & 15;
        whole(&b[..2]) * i128::from(q) + whole(&b[2..4])
    });
    check(GgmlType::Q4_K, &|b, i| {
        let (g, s) = (i / 32, &b[4..16]);
        let (sc, m) = match g {
            0..4 => (s[g] & 63, s[g + 4] & 63),
            _ => (s[g + 4] & 15 | s[g - 4] >> 6 << 4, s[g + 4] >> 4 | s[g] >> 6 << 4),
        };
        let q = b[16 + 32 * (g / 2) + i % 32] >> (4 * (g % 2)) & 15;
        whole(&b[..2]) * i128::from(sc) * i128::from(q) - whole(&b[2..4]) * i128::from(m)
    });
    assert!(beyond > 500, "float32 would not do: {beyond}");

    // A quotient of exact numbers is rounded once: it is the scale, only if nothing was rounded before.
    let mut beyond = [0, 0];
    let mut check = |which: usize, ty: GgmlType, parts: &dyn Fn(&[u8], usize) -> [f64; 2]| {
        for block in file.tensor(&format!("{ty}.bytes")).unwrap().data().chunks(ty.block_bytes()) {
            for (i, v) in decoded(ty, block, ty.block_elements()).iter().enumerate() {
                let [scale, q] = parts(block, i);
                if q != 0.0 && scale.is_finite() {
                    assert_eq!(v / q, scale, "{ty} {i}");
                    beyond[which] += u32::from(f64::from(*v as f32) != *v);
                }
            }
        }
    };
    check(0, GgmlType::Q8_K, &|b, i| {
        [f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into(), f64::from(b[4 + i] as i8)]
    });
    check(1, GgmlType::MXFP4, &|b, i| {
        let q = usize::from(b[1 + i % 16] >> (4 * (i / 16)) & 15);
        let code = [0., 1., 2., 3., 4., 6., 8., 12.][q % 8];
        [2f64.powi(i32::from(b[0]) - 128), if q < 8 { code } else { -code }]
    });
    assert!(beyond[0] > 1000 && beyond[1] > 10, "float32 would not do: {beyond:?}");
}

#[test]
fn wrong_length() {
    assert_eq!(dequant::decode(GgmlType::I32, &[0; 4], &mut [0.0; 2]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[0; 34], &mut [0.0; 31]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[0; 33], &mut [0.0; 32]), None);
    assert_eq!(dequant::decode(GgmlType::IQ1_M, &[0; 56], &mut [0.0; 128]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[], &mut []), Some(()));
}
