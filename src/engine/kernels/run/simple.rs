/*!
Stages of one launch: norms, rotations, products with weights.
*/

use super::super::machine::Held;
use super::Run;
use super::stacked::Lying;
use crate::device::{Arg, Device};
use crate::engine::{EngineError, Sink};
use crate::trace::TensorId;
use mla_reference::{Pairing, Stage, Weight};

/// A product: c[i][j] of each head = Σ a[rows[i]] · b[j].
pub struct Product {
    pub weight: Weight,
    /// Rows, columns and terms of a head.
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub heads: usize,
    /// Elements between rows, and between heads.
    pub a: (usize, usize),
    pub b: usize,
    pub c: (usize, usize),
    /// Rows of the weight are terms.
    pub transposed: bool,
}

impl<D: Device> Run<'_, '_, D> {
    pub(super) fn norm(
        &mut self,
        sink: &mut dyn Sink,
        stage: Stage,
        input: Lying,
        cols: usize,
        (weight, eps): (Weight, f64),
    ) -> Result<Held, EngineError> {
        let gamma = self.weight(weight)?;
        let rows = self.plan().tokens();
        self.stage(sink, TensorId::shared(stage), |run, _, out| {
            let arguments = [
                input.argument(run.stored(stage)),
                Arg::In(gamma.buffer),
                Arg::Out(out[0].buffer),
                (cols as i32).into(),
                (input.stride as i32).into(),
                (cols as i32).into(),
                (eps as f32).into(),
            ];
            run.machine.launch("rms_norm", &[("rows", rows)], &arguments)
        })
    }

    pub(super) fn rope(
        &mut self,
        sink: &mut dyn Sink,
        stage: Stage,
        input: Lying,
        (heads, nope): (usize, usize),
        at: usize,
    ) -> Result<Held, EngineError> {
        let (rows, rope) = (self.plan().tokens(), self.geometry().rope);
        let adjacent = self.layer.spec.rope.pairing == Pairing::Adjacent;
        let factors = if stage == Stage::Q { self.tables[2] } else { self.ones()? };
        let made = self.stage(sink, TensorId::shared(stage), |run, _, out| {
            let arguments = [
                Arg::In(input.held.buffer),
                Arg::In(run.tables[0].buffer),
                Arg::In(run.tables[1].buffer),
                Arg::In(factors.buffer),
                Arg::Out(out[0].buffer),
                (heads as i32).into(),
                (nope as i32).into(),
                (rope as i32).into(),
                (input.stride as i32).into(),
                ((input.first + at) as i32).into(),
                ((heads * (nope + rope)) as i32).into(),
                i32::from(adjacent).into(),
            ];
            run.machine.launch("rope", &[("rows", rows), ("nope", nope), ("rope", rope)], &arguments)
        })?;
        if stage != Stage::Q {
            self.machine.free(factors)?;
        }
        Ok(made)
    }

    pub(super) fn ones(&mut self) -> Result<Held, EngineError> {
        self.machine.upload_words(vec![1f32.to_bits(); self.plan().tokens()], "ones")
    }

    pub(super) fn product(
        &mut self,
        input: Held,
        rows: Held,
        p: &Product,
        out: Held,
        whole: bool,
    ) -> Result<(), EngineError> {
        let weight = self.weight(p.weight)?;
        self.multiply(input, rows, (p, weight), out, whole)
    }

    /// A product with a weight that lies in `weight`, whatever it is of.
    pub(super) fn multiply(
        &mut self,
        input: Held,
        rows: Held,
        (p, weight): (&Product, Held),
        out: Held,
        whole: bool,
    ) -> Result<(), EngineError> {
        let entry = if p.transposed { "product_transposed" } else { "product" };
        let names = [("m", p.m), ("n", p.n), ("k", p.k), ("heads", p.heads)];
        let arguments = [
            Arg::In(input.buffer),
            Arg::In(rows.buffer),
            Arg::In(weight.buffer),
            if whole { Arg::Out(out.buffer) } else { Arg::InOut(out.buffer) },
            (p.a.1 as i64).into(),
            ((p.n * p.k) as i64).into(),
            (p.c.1 as i64).into(),
            (p.m as i32).into(),
            (p.n as i32).into(),
            (p.k as i32).into(),
            (p.a.0 as i32).into(),
            (p.b as i32).into(),
            (p.c.0 as i32).into(),
        ];
        self.machine.launch(entry, &names, &arguments)
    }

    /// A stage that is a product with a whole weight, for all heads at once.
    pub(super) fn plain(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        input: Held,
        weight: Weight,
    ) -> Result<Held, EngineError> {
        let (n, k) = weight.matrix(self.geometry());
        let m = self.plan().rows(id.stage, id.form);
        let p = Product { weight, m, n, k, heads: 1, a: (k, 0), b: k, c: (n, 0), transposed: false };
        let identity = self.identity;
        self.stage(sink, id, |run, _, out| run.product(input, identity, &p, out[0], true))
    }

    /// A stage that is a product a head: columns of `input` from `h · stride` on.
    pub(super) fn by_head(
        &mut self,
        sink: &mut dyn Sink,
        id: TensorId,
        input: Held,
        stride: usize,
        weight: Weight,
    ) -> Result<Held, EngineError> {
        let heads = self.geometry().heads;
        let (all, k) = weight.matrix(self.geometry());
        let (n, m) = (all / heads, self.plan().rows(id.stage, id.form));
        let p = Product {
            weight,
            m,
            n,
            k,
            heads,
            a: (heads * stride, stride),
            b: k,
            c: (all, n),
            transposed: false,
        };
        let identity = self.identity;
        self.stage(sink, id, |run, _, out| run.product(input, identity, &p, out[0], true))
    }
}
