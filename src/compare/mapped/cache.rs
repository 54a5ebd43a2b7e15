/*! The cache of a dump, gathered into the pages of the case: slots that no request owns play no part. */

use super::super::CompareError;
use super::super::map::Entry;
use super::Reader;
use crate::trace::{Tensor, TensorId};
use mla_reference::{Axis, Plan, Stage};

impl Reader<'_> {
    /// The cache in the pages of the case.
    pub(super) fn cache(&self, entry: &Entry, plan: &Plan) -> Result<Tensor, CompareError> {
        let g = &self.spec.geometry;
        let bad = |what: &str, how: &str| self.bad("cache", what, how);
        let named = |axis: &str| {
            let lists = std::iter::once(entry).chain(&entry.parts).filter_map(|e| e.axes.as_ref());
            lists.flatten().any(|a| a.split('*').any(|a| a.trim() == axis))
        };
        let (axes, shape): (&[Axis], &[Option<usize>]) = match named("slot") {
            true => {
                (&[Axis::Page, Axis::Slot, Axis::LatentRope], &[None, Some(plan.page_size), Some(g.cache())])
            }
            false => (&[Axis::Key, Axis::LatentRope], &[None, Some(g.cache())]),
        };
        let (dtype, _, bytes) = self.values(entry, "cache", axes, shape)?;
        let width = g.cache() * dtype.bytes();
        let rows = bytes.len() / width;
        let total = plan.rows(Stage::K, None);
        let physical: Vec<usize> = match (&entry.block_table, &entry.slots) {
            (Some(_), Some(_)) => return Err(bad("it has a block table and slots", "name one of the two")),
            (None, Some(slots)) => self.numbers(slots, "cache")?,
            (Some(table), None) => {
                let (shape, table) = self.pages(table, "cache")?;
                let &[requests, pages] = shape.as_slice() else {
                    return Err(bad(
                        &format!("the block table has shape {shape:?}"),
                        "dump it as [request, page]",
                    ));
                };
                let longest =
                    plan.sequences.iter().map(|s| s.keys().div_ceil(plan.page_size)).max().unwrap_or(0);
                if requests != plan.sequences.len() || pages < longest {
                    return Err(bad(
                        &format!(
                            "the block table has shape {shape:?}, {} requests of at most {longest} pages need more",
                            plan.sequences.len()
                        ),
                        "dump a row for each request of the map, and say its page_size",
                    ));
                }
                let slot = |i: usize, p: usize| {
                    table[i * pages + p / plan.page_size]
                        .saturating_mul(plan.page_size)
                        .saturating_add(p % plan.page_size)
                };
                plan.sequences
                    .iter()
                    .enumerate()
                    .flat_map(|(i, s)| (0..s.keys()).map(move |p| slot(i, p)))
                    .collect()
            }
            (None, None) if rows == total => (0..total).collect(),
            (None, None) => {
                return Err(bad(
                    &format!("it has {rows} rows, the requests have {total} keys"),
                    "name its block_table or slots, or dump a row for each key, request after request",
                ));
            }
        };
        if physical.len() != total || physical.iter().any(|s| *s >= rows) {
            return Err(bad(
                &format!("{} slots, of {} keys, do not all lie in its {rows} rows", physical.len(), total),
                "name the table that the kernel read, and cut it to the requests of the map",
            ));
        }
        let mut cache = Tensor::zeros(TensorId::shared(Stage::Cache), plan, g, dtype);
        // What nobody owns is NaN, as the judge has it.
        let nan = vec![f64::NAN; g.cache()];
        (0..cache.rows).for_each(|row| cache.write(row, 0, &nan));
        let own = plan.sequences.iter().flat_map(|s| &s.slots);
        for (slot, from) in own.zip(&physical) {
            cache.write_bytes(*slot, 0, &bytes[from * width..(from + 1) * width]);
        }
        Ok(cache)
    }
}
