//! Decoders against ggml's own results (`fixtures/quant`).

use mla_reference::dequant;
use mla_reference::ggml::GgmlType;
use safetensors::SafeTensors;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/quant/blocks.safetensors");

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Decoded values and ggml's float32: the same bits after one rounding, NaN as NaN.
fn compare(ty: GgmlType, what: &str, bytes: &[u8], want: &[f32]) {
    let mut got = vec![1.0; want.len()];
    dequant::decode(ty, bytes, &mut got).unwrap();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let rounded = *got as f32;
        let same = rounded.to_bits() == want.to_bits() || rounded.is_nan() && want.is_nan();
        assert!(same, "{ty} {what}: element {i}: {got:e}, ggml {want:e}");
    }
}

#[test]
fn ggml_bits() {
    let file = std::fs::read(FILE).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut missing = Vec::new();
    for &ty in GgmlType::ALL.iter().filter(|ty| dequant::is_supported(**ty)) {
        let tensor = |key: &str| file.tensor(&format!("{ty}.{key}"));
        let Ok(bytes) = tensor("bytes") else {
            missing.push(ty);
            continue;
        };
        assert_eq!(bytes.shape()[1], ty.block_bytes());
        assert!(bytes.shape()[0] >= 74);
        compare(ty, "blocks", bytes.data(), &floats(tensor("f32").unwrap().data()));
        if let (Ok(bytes), Ok(want)) = (tensor("quantised_bytes"), tensor("quantised_f32")) {
            compare(ty, "quantised", bytes.data(), &floats(want.data()));
        }
        // Signs of zero are part of the fixture: there must be such blocks.
        assert!(tensor("special").unwrap().data().contains(&2));
    }
    // F32 is its own float32.
    assert_eq!(missing, [GgmlType::F32]);
    let bits = [0u32, 1 << 31, 1, 0x7f7f_ffff, 0xff80_0000, 0x7fc0_0000, 0x3f80_0001];
    compare(GgmlType::F32, "", &bits.map(u32::to_le_bytes).concat(), &bits.map(f32::from_bits));
}

/// d, as a whole number of 2^-24.
fn whole(half: &[u8]) -> i128 {
    let h = i128::from(u16::from_le_bytes([half[0], half[1]]));
    let (e, f) = (h >> 10 & 31, h & 1023);
    let m = if e == 0 { f } else { (f | 1024) << (e - 1) };
    if h >> 15 == 1 { -m } else { m }
}

/// Where float32 rounds (Q4_1, Q4_K), float64 does not: the same formula in whole numbers.
#[test]
fn exact() {
    let file = std::fs::read(FILE).unwrap();
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
    assert!(beyond > 1000, "float32 would not do: {beyond}");
}

#[test]
fn unsupported_or_wrong_length() {
    assert!(!dequant::is_supported(GgmlType::I32));
    assert_eq!(dequant::decode(GgmlType::I32, &[0; 4], &mut [0.0]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[0; 34], &mut [0.0; 31]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[0; 33], &mut [0.0; 32]), None);
    assert_eq!(dequant::decode(GgmlType::Q8_0, &[], &mut []), Some(()));
}
