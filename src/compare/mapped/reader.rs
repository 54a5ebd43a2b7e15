/*!
Arrays of a dump as the map names them: found, of all ranks, in the table's axes.

Ranks hold equal shares of the heads, in their order; what has no heads is the same on all of them, and where it is not, that
is evidence.
*/

use super::super::CompareError;
use super::super::arrange::{Wanted, arrange, reorder, typed};
use super::super::map::{Entry, Numbers, RANK, nearest};
use super::Reader;
use crate::trace::read::{self, Array};
use mla_numeric::DType;
use mla_reference::{Axis, Geometry};

/// Values of an entry: dtype, shape, bits.
pub(super) type Values = (DType, Vec<usize>, Vec<u8>);

impl Reader<'_> {
    pub(super) fn bad(&self, tensor: &str, what: &str, how: &str) -> CompareError {
        CompareError::new(
            format!("{tensor}: {what}"),
            format!("the map, with {}", self.dump.path().display()),
            how,
        )
    }

    /// A name of the map with what stands for numbers filled in; `{rank}` is left where no rank is given.
    fn name(&self, name: &str, rank: Option<usize>) -> String {
        let step = self.map.step;
        let name = name
            .replace("{layer}", &self.layer.to_string())
            .replace("{step5}", &format!("{step:05}"))
            .replace("{step}", &step.to_string());
        match rank {
            Some(r) => name.replace(RANK, &r.to_string()),
            None => name,
        }
    }

    /// The arrays of the dump that a name may mean: the first of its alternatives (`A | B`) that is there, by itself or as the
    /// first of a module's outputs (`A.0`); `*` stands for anything.
    fn meant(&self, name: &str, rank: Option<usize>) -> Vec<&read::Entry> {
        for one in self.name(name, rank).split(" | ") {
            let first = match one.strip_suffix("___*") {
                Some(stem) => format!("{stem}.0___*"),
                None => format!("{one}.0"),
            };
            for pattern in [one, &first] {
                let found = self.dump.matching(pattern);
                if !found.is_empty() {
                    return found;
                }
            }
        }
        Vec::new()
    }

    /// All arrays of the dump that the map names.
    pub(super) fn named(&self) -> Vec<&str> {
        let ranks: Vec<Option<usize>> = match &self.map.ranks {
            Some(ranks) => ranks.present.iter().copied().map(Some).collect(),
            None => vec![None],
        };
        let all = self.map.arrays();
        let of = ranks.iter().flat_map(|r| all.iter().flat_map(|n| self.meant(n, *r)));
        of.map(|e| e.name.as_str()).collect()
    }

    /// Whether the dump has an entry's arrays, of any rank.
    pub(super) fn has(&self, entry: &Entry) -> bool {
        let any = |name: &str| match &self.map.ranks {
            Some(ranks) => ranks.present.iter().any(|r| !self.meant(name, Some(*r)).is_empty()),
            None => !self.meant(name, None).is_empty(),
        };
        match entry.parts.as_slice() {
            [] => any(&entry.name),
            parts => parts.iter().all(|p| any(&p.name)),
        }
    }

    /// An array by its name in the map; `tensor`: what it is wanted for.
    pub(super) fn array(&self, name: &str, rank: Option<usize>, tensor: &str) -> Result<Array, CompareError> {
        let entry = match self.meant(name, rank).as_slice() {
            [one] => *one,
            [] => {
                let all: Vec<&str> = self.dump.entries().iter().map(|e| e.name.as_str()).collect();
                let name = self.name(name, rank);
                return Err(self.bad(
                    tensor,
                    &format!("the dump has no array {}", name.escape_debug()),
                    &format!("the nearest of its {} are {}", all.len(), nearest(&name, &all).join(", ")),
                ));
            }
            several => {
                let shown: Vec<String> =
                    several.iter().take(5).map(|e| e.name.escape_debug().to_string()).collect();
                return Err(self.bad(
                    tensor,
                    &format!("{} arrays are called {}", several.len(), self.name(name, rank).escape_debug()),
                    &format!("name one of them, or its step or rank: {}", shown.join(", ")),
                ));
            }
        };
        self.dump.read(entry).map_err(|e| {
            let text = e.to_string();
            let mut lines = text.split("\n  where: ");
            let what = lines.next().unwrap_or_default().to_string();
            let (place, how) = lines.next().unwrap_or_default().split_once("\n  do: ").unwrap_or_default();
            CompareError::new(what, place, how)
        })
    }

    /// An array of integers that are not negative.
    pub(super) fn counts(&self, name: &str, tensor: &str) -> Result<(Vec<usize>, Vec<usize>), CompareError> {
        let (shape, all) = self.integers(name, tensor)?;
        match all.into_iter().map(usize::try_from).collect() {
            Ok(all) => Ok((shape, all)),
            Err(_) => Err(self.bad(
                tensor,
                &format!("array {} holds numbers below zero", name.escape_debug()),
                "name an array of integers that are not negative",
            )),
        }
    }

    /// A page table: what is below zero is no page.
    pub(super) fn pages(&self, name: &str, tensor: &str) -> Result<(Vec<usize>, Vec<usize>), CompareError> {
        let (shape, all) = self.integers(name, tensor)?;
        Ok((shape, all.into_iter().map(|p| usize::try_from(p).unwrap_or(usize::MAX)).collect()))
    }

    fn integers(&self, name: &str, tensor: &str) -> Result<(Vec<usize>, Vec<i64>), CompareError> {
        let rank = self.map.ranks.as_ref().and_then(|r| r.present.first().copied());
        let array = self.array(name, rank, tensor)?;
        match array.integers() {
            Some(all) => Ok((array.shape, all)),
            None => Err(self.bad(
                tensor,
                &format!(
                    "array {} of {} does not hold counts",
                    self.name(name, rank).escape_debug(),
                    array.stored
                ),
                "name an array of integers",
            )),
        }
    }

    /// Integers, from the map or from an array.
    pub(super) fn numbers(&self, numbers: &Numbers, tensor: &str) -> Result<Vec<usize>, CompareError> {
        match numbers {
            Numbers::Array(name) => Ok(self.counts(name, tensor)?.1),
            Numbers::Given(all) => Ok(all.clone()),
        }
    }

    /// An entry's values with these axes, heads of all ranks one after the other.
    pub(super) fn values(
        &self,
        entry: &Entry,
        tensor: &str,
        axes: &[Axis],
        shape: &[Option<usize>],
    ) -> Result<Values, CompareError> {
        let by_rank = std::iter::once(entry).chain(&entry.parts).any(|e| e.name.contains(RANK));
        let Some(ranks) = self.map.ranks.as_ref().filter(|_| by_rank) else {
            if by_rank {
                return Err(self.bad(
                    tensor,
                    "its name holds {rank}, and the map no ranks",
                    "write ranks = 8",
                ));
            }
            return self.of_rank(entry, None, tensor, axes, shape, &self.spec.geometry);
        };
        let g = Geometry { heads: self.spec.geometry.heads / ranks.present.len(), ..self.spec.geometry };
        let head = axes.iter().position(|a| *a == Axis::Head);
        let mut local = shape.to_vec();
        if let Some(at) = head {
            local[at] = Some(g.heads);
        }
        let mut all: Vec<Values> = Vec::with_capacity(ranks.present.len());
        for &r in &ranks.present {
            let own = self.of_rank(entry, Some(r), tensor, axes, &local, &g)?;
            if let Some(first) = all.first()
                && (own.0 != first.0 || own.1 != first.1)
            {
                return Err(self.bad(
                    tensor,
                    &format!(
                        "it is {} {:?} on one rank and {} {:?} on rank {r}",
                        first.0, first.1, own.0, own.1
                    ),
                    "dump it alike on all ranks",
                ));
            }
            all.push(own);
        }
        let Some(at) = head else {
            let (first, rest) = (ranks.present[0], &ranks.present[1..]);
            let n = all[0].0.bytes();
            for (r, own) in rest.iter().zip(&all[1..]) {
                let off = own.2.chunks(n).zip(all[0].2.chunks(n)).filter(|(a, b)| a != b).count();
                if off > 0 {
                    let of = own.2.len() / n;
                    self.differ.borrow_mut().push((
                        tensor.to_string(),
                        format!("{off} of {of} elements of rank {r} are not those of rank {first}: a tensor without heads is the same on all ranks"),
                    ));
                }
            }
            return Ok(all.swap_remove(0));
        };
        let (dtype, mut shape) = (all[0].0, all[0].1.clone());
        let inner: usize = shape[at..].iter().product::<usize>() * dtype.bytes();
        shape[at] = self.spec.geometry.heads;
        let outer: usize = shape[..at].iter().product();
        let mut bytes = Vec::with_capacity(outer * inner * all.len());
        for i in 0..outer {
            for (_, _, own) in &all {
                bytes.extend_from_slice(&own[i * inner..(i + 1) * inner]);
            }
        }
        Ok((dtype, shape, bytes))
    }

    /// An entry's values on one rank, whose widths are `g`; of parts, the last axis is theirs in turn.
    pub(super) fn of_rank(
        &self,
        entry: &Entry,
        rank: Option<usize>,
        tensor: &str,
        axes: &[Axis],
        shape: &[Option<usize>],
        g: &Geometry,
    ) -> Result<Values, CompareError> {
        if !entry.parts.is_empty() {
            return self.joined(entry, rank, tensor, axes, shape, g);
        }
        let fail = |what: String| {
            let name = self.name(&entry.name, rank);
            self.bad(
                tensor,
                &format!("array {}: {what}", name.escape_debug()),
                "correct the map (docs/dumps.md), or the dump",
            )
        };
        let (dtype, array) = typed(self.array(&entry.name, rank, tensor)?, entry.dtype).map_err(fail)?;
        let wanted = Wanted { axes, shape: shape.to_vec(), g };
        let (shape, mut bytes) = arrange(&array, entry, &wanted).map_err(fail)?;
        if let Some(order) = entry.pair_order {
            if !matches!(axes.last(), Some(Axis::Rope | Axis::NopeRope | Axis::LatentRope)) {
                return Err(fail("it has no rope columns, so no pair_order".into()));
            }
            let width = shape.last().copied().unwrap_or(1);
            reorder(&mut bytes, dtype.bytes(), width, g.rope, order.pairing(), self.spec.rope.pairing);
        }
        Ok((dtype, shape, bytes))
    }

    /// Two arrays, one after the other on the last axis.
    fn joined(
        &self,
        entry: &Entry,
        rank: Option<usize>,
        tensor: &str,
        axes: &[Axis],
        shape: &[Option<usize>],
        g: &Geometry,
    ) -> Result<Values, CompareError> {
        let first = match axes.last() {
            Some(Axis::NopeRope) => Axis::Nope,
            Some(Axis::LatentRope) => Axis::Latent,
            _ => return Err(self.bad(tensor, "it does not consist of parts", "name one array")),
        };
        let [a, b] = entry.parts.as_slice() else {
            return Err(self.bad(
                tensor,
                "it consists of two parts",
                &format!("give {} and rope", first.name()),
            ));
        };
        let part = |entry: &Entry, last: Axis| {
            let mut axes = axes.to_vec();
            let mut shape = shape.to_vec();
            if let (Some(a), Some(n)) = (axes.last_mut(), shape.last_mut()) {
                (*a, *n) = (last, last.len(g));
            }
            self.of_rank(entry, rank, tensor, &axes, &shape, g)
        };
        let ((da, sa, a), (db, sb, b)) = (part(a, first)?, part(b, Axis::Rope)?);
        let outer = sa.len() - 1;
        if da != db || sa[..outer] != sb[..outer] {
            return Err(self.bad(
                tensor,
                &format!("its parts are {da} {sa:?} and {db} {sb:?}"),
                "dump both alike",
            ));
        }
        let (wa, wb) = (sa[outer] * da.bytes(), sb[outer] * da.bytes());
        let rows = a.chunks_exact(wa).zip(b.chunks_exact(wb));
        let bytes = rows.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
        let shape = sa[..outer].iter().copied().chain([sa[outer] + sb[outer]]).collect();
        Ok((da, shape, bytes))
    }
}
