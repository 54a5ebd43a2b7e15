//! What a weight is that is not the file's: shards of ranks, slots of a stack, kv_b put together otherwise. Named right or
//! not at all: every bit must be predicted.

mod common;

use common::small::{Memory, Views};
use mla_check::judge::Diagnosis;
use mla_check::judge::cause::weight::{About, search};
use mla_numeric::DType;
use mla_reference::product::Dense;
use mla_reference::{Geometry, Weight, Weights};

/// More rows in kv_a (36) than in q_a (26).
const G: Geometry = Geometry { hidden: 40, heads: 24, q_rank: 26, latent: 32, rope: 4, nope: 6, value: 5 };
/// As models have it: 60 rows in q_a, 36 in kv_a.
const WIDE: Geometry = Geometry { q_rank: 60, ..G };

/// What an engine's weight is said to be; `made` gives its rows from all weights of the layer, on the grid of bf16.
fn said(
    g: &Geometry,
    weight: Weight,
    ranks: usize,
    made: impl FnOnce(&dyn Fn(Weight) -> Vec<Vec<f64>>) -> Vec<Vec<f64>>,
) -> String {
    let memory = Memory::new(g);
    let views = Views::of(&memory);
    let rows = |w: Weight| -> Vec<Vec<f64>> {
        let (values, cols) = &memory.0[&w];
        values.chunks(*cols).map(|r| r.iter().map(|v| DType::Bf16.round(*v)).collect()).collect()
    };
    let engine = made(&rows);
    let (count, cols) = weight.matrix(g);
    assert_eq!((engine.len(), engine[0].len()), (count, cols));
    let engine = engine.concat();
    let about = About { geometry: g, layer: Some(&views), ranks, others: None };
    let of = |engine: &[f64]| {
        search(weight, (views.matrix(weight).unwrap(), &Dense { data: engine, cols }), DType::Bf16, &about)
    };
    // One element more is another weight, and has no name.
    let mut other = engine.clone();
    other[cols + 1] += 1.0;
    assert!(matches!(of(&other), Diagnosis::Unexplained { .. }), "{:?}", of(&other));
    match of(&engine) {
        Diagnosis::Cause(c) => {
            assert!(c.ambiguous_with.is_empty(), "{c:?}");
            c.text
        }
        other => format!("{other:?}"),
    }
}

/// Blocks of rows, or of columns, in another order.
fn blocks(rows: Vec<Vec<f64>>, columns: bool, order: &[usize]) -> Vec<Vec<f64>> {
    let moved = |line: &[Vec<f64>]| -> Vec<Vec<f64>> {
        let size = line.len() / order.len();
        order.iter().flat_map(|o| line[o * size..(o + 1) * size].to_vec()).collect()
    };
    if !columns {
        return moved(&rows);
    }
    let each = |r: Vec<f64>| {
        let size = r.len() / order.len();
        order.iter().flat_map(|o| r[o * size..(o + 1) * size].to_vec()).collect()
    };
    rows.into_iter().map(each).collect()
}

#[test]
fn shards_of_ranks_are_named() {
    for weight in [Weight::WQB, Weight::WUk, Weight::WUv, Weight::WO] {
        let columns = weight == Weight::WO;
        for ranks in [2, 3, 4, 8] {
            let is = |order: &[usize]| said(&G, weight, ranks, |rows| blocks(rows(weight), columns, order));
            assert_eq!(is(&vec![0; ranks]), format!("every rank holds rank 0's shard of {weight}"));
            let mut swapped: Vec<usize> = (0..ranks).collect();
            swapped.swap(ranks - 2, ranks - 1);
            let (a, b) = (ranks - 2, ranks - 1);
            let wanted = format!(
                "shards of {weight} are in another order: rank {a} holds rank {b}'s shard, rank {b} rank {a}'s"
            );
            assert_eq!(is(&swapped), wanted);
            // A shard twice is no permutation, and is said as it is.
            let mut twice: Vec<usize> = (0..ranks).collect();
            twice[ranks - 1] = 0;
            let text = is(&twice);
            if ranks == 2 {
                assert_eq!(text, format!("every rank holds rank 0's shard of {weight}"));
            } else {
                assert!(text.ends_with(&format!(": rank {b} holds rank 0's shard")), "{text}");
            }
            // Heads that change places inside of a shard are heads.
            let mut heads: Vec<usize> = (0..24).collect();
            heads.swap(0, 1);
            let text = is(&heads);
            assert!(
                text.starts_with(&format!(
                    "heads of {weight} are in another order: head 0 holds 1, head 1 holds 0"
                )),
                "{text}"
            );
        }
        // Without ranks the same bits are heads.
        let text = said(&G, weight, 1, |rows| blocks(rows(weight), columns, &[1, 0]));
        assert!(
            text.starts_with(&format!("heads of {weight} are in another order: head 0 holds 12")),
            "{text}"
        );
    }
}

#[test]
fn a_shard_that_was_never_loaded_is_a_ranks() {
    for (ranks, rank) in [(2, 1), (3, 1), (8, 7)] {
        let text = said(&G, Weight::WUv, ranks, |rows| {
            let mut rows = rows(Weight::WUv);
            let size = rows.len() / ranks;
            rows[rank * size..(rank + 1) * size].iter_mut().for_each(|r| r.fill(0.0));
            rows
        });
        assert!(text.ends_with(&format!("a shard that was never loaded, rank {rank}'s")), "{text}");
    }
}

/// Rows of parts under each other from `start` on, beginning anew at the end.
fn slot(parts: [Vec<Vec<f64>>; 2], start: usize, count: usize) -> Vec<Vec<f64>> {
    let all = parts.concat();
    (0..count).map(|i| all[(start + i) % all.len()].clone()).collect()
}

#[test]
fn slots_of_a_stack_are_named() {
    use Weight::{WKvA, WQA};
    for g in [G, WIDE] {
        let (r, kv) = (g.q_rank, g.cache());
        let permuted = format!(
            "slots of qkv_a are permuted: it is laid (kv_a:{kv} + q_a:{r}), declared (q_a:{r} + kv_a:{kv})"
        );
        assert_eq!(said(&g, WQA, 1, |rows| slot([rows(WKvA), rows(WQA)], 0, r)), permuted);
        assert_eq!(said(&g, WKvA, 1, |rows| slot([rows(WKvA), rows(WQA)], r, kv)), permuted);
        let middle = (r + kv) / 2;
        let equal = said(&g, WKvA, 1, |rows| slot([rows(WQA), rows(WKvA)], middle, kv));
        let cut = format!("qkv_a is cut at row {middle}, not {r}: the concatenation was cut in equal chunks");
        assert!(equal.starts_with(&cut), "{equal}");
        assert_eq!(equal.contains("; its last 5 rows are the stack's first"), r < kv, "{equal}");
        let text = said(&g, WKvA, 1, |rows| slot([rows(WQA), rows(WKvA)], r - 3, kv));
        assert_eq!(
            text,
            format!(
                "qkv_a is cut at row {}, not {r}: w_kv_a holds its rows {}..{}",
                r - 3,
                r - 3,
                r + kv - 4
            )
        );
        // Some rows only.
        let text = said(&g, WQA, 1, |rows| {
            let mut q = rows(WQA);
            q[4..9].clone_from_slice(&rows(WKvA)[11..16]);
            q
        });
        assert_eq!(text, "w_q_a holds rows of w_kv_a: its rows 4..8 are rows 11..15 of w_kv_a");
    }
}

#[test]
fn kv_b_put_together_otherwise_is_named() {
    let g = G;
    // Rows of K and V of each head, [latent] wide; and a weight of the table from them.
    type Kv = (Vec<Vec<f64>>, Vec<Vec<f64>>);
    let parts = |rows: &dyn Fn(Weight) -> Vec<Vec<f64>>| -> Kv {
        let uk = rows(Weight::WUk);
        let k = (0..g.heads * g.nope)
            .map(|i| (0..g.latent).map(|l| uk[i / g.nope * g.latent + l][i % g.nope]).collect())
            .collect();
        (k, rows(Weight::WUv))
    };
    let heads = |(k, v): &Kv, value_first: bool| -> Vec<Vec<f64>> {
        let of = |h: usize| {
            let (k, v) = (&k[h * g.nope..(h + 1) * g.nope], &v[h * g.value..(h + 1) * g.value]);
            if value_first { [v, k].concat() } else { [k, v].concat() }
        };
        (0..g.heads).flat_map(of).collect()
    };
    let uk = |k: &[Vec<f64>]| -> Vec<Vec<f64>> {
        (0..g.heads * g.latent)
            .map(|i| (0..g.nope).map(|n| k[i / g.latent * g.nope + n][i % g.latent]).collect())
            .collect()
    };
    // K and V as they are read head by head.
    let by_head = |kv_b: &[Vec<f64>], value: bool| -> Vec<Vec<f64>> {
        let of = |h: &[Vec<f64>]| if value { h[g.nope..].to_vec() } else { h[..g.nope].to_vec() };
        kv_b.chunks(g.nope + g.value).flat_map(of).collect()
    };
    for (ranks, in_each) in [(1, ""), (4, "in each rank ")] {
        // Heads that lie together: all, or a rank's.
        let halves = |kv_b: &[Vec<f64>], value: bool| -> Vec<Vec<f64>> {
            let group = g.heads / ranks;
            let of = |part: &[Vec<f64>]| {
                if value { part[group * g.nope..].to_vec() } else { part[..group * g.nope].to_vec() }
            };
            kv_b.chunks(group * (g.nope + g.value)).flat_map(of).collect()
        };
        let wanted = format!("{in_each}kv_b is taken as all K, then all V, though it lies head by head");
        assert_eq!(
            said(&g, Weight::WUk, ranks, |rows| uk(&halves(&heads(&parts(rows), false), false))),
            wanted
        );
        assert_eq!(said(&g, Weight::WUv, ranks, |rows| halves(&heads(&parts(rows), false), true)), wanted);
        let wanted = format!("{in_each}kv_b is taken head by head, though it lies as all K, then all V");
        let laid = |rows: &dyn Fn(Weight) -> Vec<Vec<f64>>| -> Vec<Vec<f64>> {
            let (k, v) = parts(rows);
            let group = g.heads / ranks;
            let both = k.chunks(group * g.nope).zip(v.chunks(group * g.value));
            both.flat_map(|(k, v)| [k, v].concat()).collect()
        };
        assert_eq!(said(&g, Weight::WUk, ranks, |rows| uk(&by_head(&laid(rows), false))), wanted);
        assert_eq!(said(&g, Weight::WUv, ranks, |rows| by_head(&laid(rows), true)), wanted);
    }
    let wanted = "K and V of kv_b are swapped: V comes first in each head";
    assert_eq!(said(&g, Weight::WUk, 1, |rows| uk(&by_head(&heads(&parts(rows), true), false))), wanted);
    assert_eq!(said(&g, Weight::WUv, 1, |rows| by_head(&heads(&parts(rows), true), true)), wanted);
}
