/*!
Tensor parallelism: a layer on N ranks, as serving engines run it.

| module (name in engines) | cut |
|---|---|
| q_a and kv_a projections, norms, the latent cache | not cut: every rank has all of it |
| q_b (or q), kv_b (w_uk, w_uv) | rows: whole heads |
| o_proj | columns: the heads' values; ranks' products are summed |

A rank is an ordinary [`Layer`](crate::model::Layer) with its share of the heads, so engines know nothing of ranks: they run once
a rank, one after the other on one device, and [`gather`] takes what each delivers. What every rank has must be equal bit for
bit; the rest is put together along the heads, and judged as one layer whose plan says how many ranks there are. The order is:
[`Ranks`] (may the layer be cut so?), [`heads`] (a rank's weights), [`gather`] (a rank's tensors), [`group`] (ranks together).

Which device a rank runs on is the caller's: [`group::reduce`] is the one place where ranks meet.
*/

pub mod gather;
pub mod group;
pub mod heads;

use crate::model::Stored;
use heads::Heads;
use mla_reference::{Axis, Geometry, WEIGHTS, Weight, Weights};

/// Why a layer can't be cut for so many ranks: what, where, what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RanksError {
    /// Heads are not shared.
    #[error("{heads} heads are not to be shared by {of} ranks\n  where: --tp {of}, {place}\n  do: {would}")]
    Heads { of: usize, heads: usize, place: String, would: String },
    /// A shard would begin inside of a block of stored values.
    #[error(
        "a shard of {tensor} would end inside of a block: {own} {what} a rank, {ty} has blocks of {grain}\n  where: --tp {of}, {place}\n  do: {would} (engines that cut there read garbage, or refuse the file)"
    )]
    Block {
        of: usize,
        tensor: String,
        ty: String,
        what: &'static str,
        own: usize,
        grain: usize,
        place: String,
        would: String,
    },
}

/// How many ranks share a layer, each an equal run of its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// How many.
    pub of: usize,
    heads: usize,
}

/// A weight whose shards would not be whole blocks: elements a shard, and of a block.
struct Inside {
    weight: Weight,
    what: &'static str,
    own: usize,
    grain: usize,
}

impl Ranks {
    /// So many ranks of a layer.
    ///
    /// # Errors
    /// Heads that are no multiple of `of`; shards that would begin inside of a block of stored values.
    pub fn new(
        of: usize,
        g: &Geometry,
        weights: &dyn Weights,
        stored: &[Stored],
        place: &str,
    ) -> Result<Ranks, RanksError> {
        let place = place.to_string();
        let would = || {
            let fits = |n: &usize| g.heads.is_multiple_of(*n) && inside(*n, g, weights).is_none();
            match (2..=g.heads).filter(fits).map(|n| n.to_string()).collect::<Vec<_>>() {
                none if none.is_empty() => "leave --tp out: no number of ranks would do".to_string(),
                some => format!("pass --tp {}", some.join(" or ")),
            }
        };
        if of == 0 || !g.heads.is_multiple_of(of) {
            return Err(RanksError::Heads { of, heads: g.heads, place, would: would() });
        }
        if let Some(Inside { weight, what, own, grain }) = inside(of, g, weights) {
            let file = stored.iter().find(|s| s.weight == weight);
            let tensor = file.map_or(weight.name().to_string(), |s| format!("{weight} ({})", s.tensor));
            let ty = file.map_or("it".into(), |s| s.ty.clone());
            return Err(RanksError::Block { of, tensor, ty, what, own, grain, place, would: would() });
        }
        Ok(Ranks { of, heads: g.heads })
    }

    /// The heads of a rank.
    pub fn heads(&self, rank: usize) -> Heads {
        self.heads_of(&[rank])
    }

    /// The heads of some ranks, ascending.
    pub fn heads_of(&self, ranks: &[usize]) -> Heads {
        let each = self.heads / self.of;
        Heads(ranks.iter().flat_map(|r| r * each..(r + 1) * each).collect())
    }
}

/// The first weight that so many ranks would cut inside of a block.
fn inside(of: usize, g: &Geometry, weights: &dyn Weights) -> Option<Inside> {
    WEIGHTS.iter().filter(|r| r.weight.exists(g) && !r.weight.is_norm()).find_map(|row| {
        let m = weights.matrix(row.weight)?;
        let (grain, own, what) = match row.axes.iter().position(|a| *a == Axis::Head)? {
            0 => (m.grain().0, m.rows() / of, "rows"),
            _ => (m.grain().1, m.cols() / of, "columns"),
        };
        let whole = of == 1 || own.is_multiple_of(grain);
        (!whole).then_some(Inside { weight: row.weight, what, own, grain })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::dequant::decoder;
    use mla_reference::ggml::GgmlType;
    use mla_reference::product::{Blocks, Dense, Rows};

    const G: Geometry =
        Geometry { hidden: 4, heads: 12, q_rank: 0, latent: 32, rope: 4, nope: 28, value: 64 };

    /// w_o alone is there, in Q4_K: 12 heads of 64 columns, 3 blocks of 256.
    struct Output<'a>(Blocks<'a>);

    impl Weights for Output<'_> {
        fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
            (weight == Weight::WO).then_some(&self.0 as &dyn Rows)
        }
        fn norm(&self, _: Weight) -> Option<&[f64]> {
            None
        }
    }

    fn bytes(ty: GgmlType, rows: usize, cols: usize) -> Vec<u8> {
        let n = rows * cols / ty.block_elements() * ty.block_bytes();
        // Scales that are finite, whatever the type: no byte of 0x7c to 0x7f or above 0xfb.
        (0..n).map(|i| ((i * 7 + i / 5) % 100) as u8).collect()
    }

    #[test]
    fn ranks_that_do_are_named() {
        let data = bytes(GgmlType::Q4_K, 4, 768);
        let w = Output(Blocks::new(GgmlType::Q4_K, &data, 768).unwrap());
        let ranks = |n| Ranks::new(n, &G, &w, &[], "layer 3");
        for n in [1, 3] {
            assert_eq!(ranks(n).unwrap().heads(n - 1).0.last(), Some(&11));
        }
        let e = ranks(5).unwrap_err().to_string();
        assert!(
            e.contains("12 heads are not to be shared by 5 ranks") && e.contains("do: pass --tp 3"),
            "{e}"
        );
        let e = ranks(0).unwrap_err().to_string();
        assert!(e.contains("shared by 0 ranks"), "{e}");
        let e = ranks(4).unwrap_err().to_string();
        assert!(e.contains("a shard of w_o would end inside of a block: 192 columns a rank"), "{e}");
        assert!(
            e.contains("blocks of 256") && e.contains("do: pass --tp 3 (") && e.contains("layer 3"),
            "{e}"
        );
    }

    /// Cutting what is stored and decoding it, and decoding and cutting: the same values, in every type.
    #[test]
    fn shards_of_blocks_are_shards_of_values() {
        let mut seen = 0;
        for ty in (0..64).filter_map(GgmlType::from_id).filter(|t| decoder(*t).is_some()) {
            let (rows, each) = (6, ty.block_elements().max(32));
            let cols = 4 * each;
            let data = bytes(ty, rows, cols);
            let whole = || Blocks::new(ty, &data, cols).unwrap();
            let mut line = vec![0.0; cols];
            for (r, c) in [(1..4, 0..cols), (0..rows, each..3 * each), (2..3, 3 * each..cols)] {
                let shard = whole().shard(r.clone(), c.clone()).unwrap();
                assert_eq!((shard.rows(), shard.cols()), (r.len(), c.len()));
                let (ty_of, bytes_of) = shard.stored().unwrap();
                let again = Blocks::new(ty_of, bytes_of, c.len()).unwrap();
                let mut own = vec![0.0; c.len()];
                for (i, row) in r.enumerate() {
                    whole().decode(row, 0, &mut line);
                    again.decode(i, 0, &mut own);
                    let same = own.iter().zip(&line[c.clone()]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{ty}, row {row}");
                }
            }
            if ty.block_elements() > 1 {
                assert!(whole().shard(0..rows, 1..cols).is_err(), "{ty}");
                seen += 1;
            }
        }
        assert!(seen >= 20, "{seen} types of blocks");
    }

    #[test]
    fn a_rank_has_its_heads() {
        let data: Vec<f64> = (0..12 * 32 * 32).map(f64::from).collect();
        struct Queries<'a>(Dense<'a>);
        impl Weights for Queries<'_> {
            fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
                (weight == Weight::WQ).then_some(&self.0 as &dyn Rows)
            }
            fn norm(&self, _: Weight) -> Option<&[f64]> {
                None
            }
        }
        let all = Queries(Dense { data: &data, cols: 4 });
        let ranks = Ranks::new(3, &G, &all, &[], "").unwrap();
        let own = ranks.heads(2);
        assert_eq!(own.0, [8, 9, 10, 11]);
        let of = heads::OfHeads::new(&all, &own, &G);
        let m = of.matrix(Weight::WQ).unwrap();
        let rows = all.0.rows() / 12;
        assert_eq!(m.rows(), 4 * rows);
        let mut line = [0.0; 4];
        m.decode(1, 0, &mut line);
        assert_eq!(line[0], (8 * rows + 1) as f64 * 4.0);
    }
}
