/*! Counting what holds and what does not, and naming the first element of which it does not. */

use crate::case::Case;
use crate::trace::{Tensor, TensorId};
use mla_reference::{Axis, Form, Stage};

/// Elements compared.
#[derive(Clone, Debug, Default)]
pub struct Count {
    /// All.
    pub elements: u64,
    /// Of which it does not hold.
    pub broken: u64,
    /// Where the first one is.
    pub first: Option<String>,
}

impl Count {
    /// One element.
    pub fn check(&mut self, holds: bool, place: impl FnOnce() -> String) {
        self.elements += 1;
        if !holds {
            self.broken += 1;
            self.first.get_or_insert_with(place);
        }
    }

    /// Another count's elements too.
    pub fn add(&mut self, other: Count) {
        self.elements += other.elements;
        self.broken += other.broken;
        if self.first.is_none() {
            self.first = other.first;
        }
    }
}

/// `fused/attn_out, request 0+2 token 0, head 3, value 17`
pub fn place(case: &Case, form: Form, stage: Stage, t: &Tensor, row: usize, col: usize) -> String {
    let mut text = TensorId::of(stage, form).to_string();
    if let Some(name) = case.plan.names(stage, Some(form)).get(row) {
        let what = if matches!(stage, Stage::K | Stage::V | Stage::Cache) { "key" } else { "token" };
        match name.request.and_then(|r| case.batch.0.get(r)) {
            Some(r) => text += &format!(", request {r} {what} {}", name.index),
            None => text += ", a slot that nobody owns",
        }
        if let Some(s) = name.split {
            text += &format!(", split {s}");
        }
        if let Some(r) = name.rank {
            text += &format!(", rank {r}");
        }
    }
    // The columns are the last axes, as many as their lengths multiply to.
    let (mut left, mut rest, mut parts) = (t.cols, col, Vec::<(Axis, usize)>::new());
    for (axis, &n) in t.axes.iter().zip(&t.shape).rev() {
        if left <= 1 || n == 0 {
            break;
        }
        parts.push((*axis, rest % n));
        rest /= n;
        left /= n;
    }
    for (axis, i) in parts.into_iter().rev() {
        text += &format!(", {} {i}", axis.name());
    }
    text
}
