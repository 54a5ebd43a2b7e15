/*!
What a stage has to move and to compute, whatever kernel does it: what times are measured against.

Bytes are those of operands and results, each counted once: a weight once a launch, a key's row of the cache once a
request. Operations are the products' multiplications and additions; of attention, those of keys that a row sees. Norms,
rotations and copies count none: memory binds them.
*/

use mla_reference::ggml::GgmlType;
use mla_reference::{Contract, Form, Geometry, Plan, Sequence, Stage, Weight};

/// Bytes and operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes that must move.
    pub bytes: u64,
    /// Multiplications and additions that are of use.
    pub operations: u64,
}

impl Work {
    fn new(bytes: usize, operations: usize) -> Work {
        Work { bytes: bytes as u64, operations: operations as u64 }
    }

    fn and(self, other: Work) -> Work {
        Work { bytes: self.bytes + other.bytes, operations: self.operations + other.operations }
    }
}

/// A weight that is decoded from its stored blocks.
pub fn of_weight(stored: GgmlType, (rows, cols): (usize, usize), contract: &Contract) -> Work {
    let elements = rows * cols;
    let blocks = elements / stored.block_elements().max(1);
    Work::new(blocks * stored.block_bytes() + elements * contract.weights.bytes(), 0)
}

/// A stage in a form (of shared stages any).
pub fn of_stage(stage: Stage, form: Form, plan: &Plan, g: &Geometry, contract: &Contract) -> Work {
    let act = |stage: Stage| contract.stored(stage).bytes();
    let (bytes, tokens) = (act(stage), plan.tokens());
    let rows = plan.rows(stage, Some(form));
    // A matrix product of `rows`, with a weight of `n` rows of `k`.
    let product = |rows: usize, (n, k): (usize, usize), operand: Stage| {
        Work::new(
            rows * k * act(operand) + n * k * contract.weights.bytes() + rows * n * bytes,
            2 * rows * n * k,
        )
    };
    let norm = |cols: usize| Work::new(2 * tokens * cols * bytes + cols * 4, 0);
    let rotated = |cols: usize| Work::new(2 * tokens * cols * bytes + tokens * g.rope * 4, 0);
    let heads = |n: usize, k: usize| (g.heads * n, k);
    let by_head = |rows: usize, n: usize, k: usize, operand: Stage| {
        let p = product(rows, heads(n, k), operand);
        // Each head reads its own columns of the operand.
        Work { bytes: p.bytes + ((g.heads - 1) * rows * k * act(operand)) as u64, ..p }
    };
    let cache_row = g.cache() * act(Stage::Cache);
    match stage {
        Stage::Hidden | Stage::PartOut => Work::default(),
        Stage::AttnIn => norm(g.hidden),
        Stage::QANormed => norm(g.q_rank),
        Stage::KvCNormed => norm(g.latent),
        Stage::QA => product(tokens, Weight::WQA.matrix(g), Stage::AttnIn),
        Stage::QRaw if g.q_rank == 0 => product(tokens, Weight::WQ.matrix(g), Stage::AttnIn),
        Stage::QRaw => product(tokens, Weight::WQB.matrix(g), Stage::QANormed),
        Stage::KvA => product(tokens, Weight::WKvA.matrix(g), Stage::AttnIn),
        Stage::Q => rotated(g.queries()),
        Stage::KPe => rotated(g.rope),
        Stage::Cache => {
            let written: usize = plan.sequences.iter().map(|s| s.tokens.len()).sum();
            Work::new(2 * written * cache_row, 0)
        }
        Stage::K => {
            let p = product(rows, heads(g.nope, g.latent), Stage::Cache);
            Work { bytes: p.bytes + (rows * g.rope * (act(Stage::Cache) + g.heads * bytes)) as u64, ..p }
        }
        Stage::V => product(rows, heads(g.value, g.latent), Stage::Cache),
        Stage::QLatent => by_head(rows, g.latent, g.nope, Stage::Q),
        Stage::AttnOut if form == Form::Absorbed => by_head(rows, g.value, g.latent, Stage::OLatent),
        Stage::PartO | Stage::PartLse => {
            let width = width(form, g);
            let of = plan.part_sequences(form).map(|(_, s, _, _)| attention(s, form, g, contract));
            let written = rows * g.heads * (width * bytes + act(Stage::PartLse));
            of.fold(Work::new(written, 0), Work::and)
        }
        Stage::OLatent | Stage::AttnOut | Stage::Lse => {
            let width = width(form, g);
            let parts = plan.parts(form) * plan.part_rows(form);
            let read = parts * g.heads * (width * act(Stage::PartO) + act(Stage::PartLse));
            let written = rows * g.heads * (width * bytes + act(Stage::Lse));
            let whole = plan.attention_rows(Some(form)).filter(|(_, s, _)| !plan.in_parts(form, s));
            let of = whole.map(|(_, s, _)| attention(s, form, g, contract));
            of.fold(Work::new(read + written, 0), Work::and)
        }
        Stage::Out => product(rows, Weight::WO.matrix(g), Stage::AttnOut),
    }
}

/// Columns of a head that attention writes.
fn width(form: Form, g: &Geometry) -> usize {
    if form == Form::Fused { g.value } else { g.latent }
}

/// What attention of one sequence reads and computes.
fn attention(s: &Sequence, form: Form, g: &Geometry, contract: &Contract) -> Work {
    let act = |stage: Stage| contract.stored(stage).bytes();
    let (new, seen) = (s.tokens.len(), (0..s.tokens.len()).map(|i| s.visible(i)).sum::<usize>());
    let (queries, keys, a_key) = match form {
        Form::Fused => (
            g.queries() * act(Stage::Q),
            g.heads * (g.key() * act(Stage::K) + g.value * act(Stage::V)),
            g.key() + g.value,
        ),
        Form::Absorbed => (
            g.heads * (g.latent * act(Stage::QLatent) + g.rope * act(Stage::Q)),
            g.cache() * act(Stage::Cache),
            g.cache() + g.latent,
        ),
    };
    Work::new(new * queries + s.keys() * keys, 2 * g.heads * seen * a_key)
}

/// What the device reaches with work of each kind, measured in the same run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Ceilings {
    /// Bytes of a copy, read and written, a second.
    pub copy_bytes_a_second: f64,
    /// Operations of a large matrix product a second; None where no library for one is there.
    pub product_operations_a_second: Option<f64>,
    /// What computed it, or why nothing did.
    pub product_by: String,
}

/// What binds a piece of work on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Binds {
    /// Its bytes.
    Memory,
    /// Its operations.
    Compute,
}

impl Binds {
    /// In a table.
    pub fn name(self) -> &'static str {
        match self {
            Binds::Memory => "memory",
            Binds::Compute => "compute",
        }
    }
}

impl Ceilings {
    /// What binds, and the seconds below which the work can't be done at the ceilings. None where it has products and their
    /// ceiling was not measured.
    pub fn least(&self, work: Work) -> Option<(Binds, f64)> {
        let memory = work.bytes as f64 / self.copy_bytes_a_second;
        if work.operations == 0 {
            return Some((Binds::Memory, memory));
        }
        let compute = work.operations as f64 / self.product_operations_a_second?;
        Some(if compute > memory { (Binds::Compute, compute) } else { (Binds::Memory, memory) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;
    use mla_reference::{Regime, Route};

    const G: Geometry =
        Geometry { hidden: 100, heads: 2, q_rank: 30, latent: 16, rope: 4, nope: 8, value: 6 };

    /// One request of 3 cached and 2 new tokens.
    fn plan(splits: usize) -> Plan {
        let sequence = Sequence {
            request: 0,
            regime: Regime::Random,
            tokens: 0..2,
            context: 3,
            slots: (0..5).collect(),
        };
        Plan {
            positions: vec![3, 4],
            token_request: vec![0, 0],
            sequences: vec![sequence],
            page_size: 8,
            pages: 1,
            splits,
            ranks: 1,
            route: Route::default(),
        }
    }

    fn contract() -> Contract {
        Contract { activations: DType::Bf16, weights: DType::Bf16, ..Contract::exact() }
    }

    /// Counted by hand: elements of 2 bytes, lse of its own.
    #[test]
    fn stages_move_and_compute_what_their_formulas_say() {
        let c = contract();
        let of = |stage, form| of_stage(stage, form, &plan(1), &G, &c);
        let lse = c.stored(Stage::Lse).bytes();
        assert_eq!(
            of(Stage::QA, Form::Fused),
            Work::new(2 * (2 * 100 + 30 * 100 + 2 * 30), 2 * 2 * 100 * 30)
        );
        assert_eq!(of(Stage::AttnIn, Form::Fused), Work::new(2 * 2 * 2 * 100 + 400, 0));
        // 5 rows of the cache, w_uv of 12 by 16, 5 by 12.
        assert_eq!(of(Stage::V, Form::Fused), Work::new(2 * (5 * 16 + 12 * 16 + 5 * 12), 2 * 5 * 12 * 16));
        // Rope columns are read once and written for both heads.
        let k = 2 * (5 * 16 + 16 * 16 + 5 * 16) + 2 * 5 * 4 * (1 + 2);
        assert_eq!(of(Stage::K, Form::Fused), Work::new(k, 2 * 5 * 16 * 16));
        // Rows see 4 and 5 keys.
        let read = 2 * (2 * 24 + 5 * 2 * (12 + 6));
        let fused = Work::new(read + 2 * 2 * (6 * 2 + lse), 2 * 2 * 9 * (12 + 6));
        assert_eq!(of(Stage::AttnOut, Form::Fused), fused);
        let read = 2 * (2 * 2 * (16 + 4) + 5 * 20);
        let absorbed = Work::new(read + 2 * 2 * (16 * 2 + lse), 2 * 2 * 9 * (20 + 16));
        assert_eq!(of(Stage::OLatent, Form::Absorbed), absorbed);
        assert_eq!(
            of(Stage::QLatent, Form::Absorbed),
            Work::new(2 * (2 * 16 + 32 * 8 + 2 * 32), 2 * 2 * 32 * 8)
        );
    }

    #[test]
    fn what_binds_is_what_takes_longer_at_the_ceilings() {
        let ceilings = |product| Ceilings {
            copy_bytes_a_second: 100.0,
            product_operations_a_second: product,
            product_by: String::new(),
        };
        let work = Work::new(200, 600);
        assert_eq!(ceilings(Some(1000.0)).least(work), Some((Binds::Memory, 2.0)));
        assert_eq!(ceilings(Some(100.0)).least(work), Some((Binds::Compute, 6.0)));
        assert_eq!(ceilings(None).least(work), None);
        assert_eq!(ceilings(None).least(Work::new(200, 0)), Some((Binds::Memory, 2.0)));
    }
}
