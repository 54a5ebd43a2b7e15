//! How fast values are looked at (`inspect --data`), in stored bytes a second on one thread, from memory.
//!
//! `cargo bench --bench survey`. The aim is 1 GB/s a core; docs/inspect.md says which types reach it.

use divan::Bencher;
use divan::counter::BytesCount;
use mla_check::survey::scan::scan;
use mla_check::survey::{Heads, Subject};
use mla_reference::GgmlType;
use mla_reference::dequant;
use mla_reference::product::Blocks;

fn main() {
    divan::main();
}

/// Every type that can be decoded.
fn types() -> Vec<GgmlType> {
    GgmlType::ALL.iter().copied().filter(|t| dequant::is_supported(*t)).collect()
}

#[divan::bench(args = types(), sample_count = 10)]
fn one_thread(bencher: Bencher, ty: GgmlType) {
    const COLS: usize = 1536;
    let row = COLS / ty.block_elements() * ty.block_bytes();
    let rows = (16 << 20) / row / 192 * 192;
    // Bytes whose bits never make an infinite or NaN scale.
    let bytes: Vec<u8> = (0..(rows * row) as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 & 0x3b)
        .collect();
    let subject = Subject {
        name: "blk.0.attn_q_b.weight".into(),
        layer: Some(0),
        role: None,
        ty: ty.to_string(),
        bytes: bytes.len() as u64,
        values: Box::new(Blocks::new(ty, &bytes, COLS).unwrap()),
        heads: Heads::Rows { each: 192, cut: 128 },
        groups: ["nope rows", "rope rows"],
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    bencher.counter(BytesCount::new(bytes.len())).bench(|| pool.install(|| scan(&subject, &|_| ())));
}
