/*! `case.json`: what a case's folder holds and what is wanted. */

use mla_numeric::DType;
use mla_reference::Form;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What it calls itself.
pub const SCHEMA: &str = "mla-check.case/1";

/// A case.
#[derive(Debug, Serialize, Deserialize)]
pub struct CaseFile {
    /// Name and version of this form.
    pub schema: String,
    /// Version of the program that wrote it.
    pub version: String,
    /// The model's file, architecture and layer, for people.
    pub model: String,
    /// Form of the attention.
    pub form: Form,
    /// What float64 scores are multiplied by.
    pub scale: f64,
    /// Widths: heads, nope, rope, value, latent.
    pub geometry: BTreeMap<String, usize>,
    /// `CONTEXT+NEW` of each request, in the order of rows.
    pub requests: Vec<String>,
    /// How the context of each request was drawn.
    pub regimes: Vec<String>,
    /// Position of each new token.
    pub positions: Vec<usize>,
    /// Slots of a page.
    pub page_size: usize,
    /// Inputs, by name.
    pub tensors: BTreeMap<String, Array>,
    /// Outputs, by name: to be written by the kernel's author.
    pub wanted: BTreeMap<String, Array>,
}

/// An array of a case.
#[derive(Debug, Serialize, Deserialize)]
pub struct Array {
    /// Its .npy file, relative to the case's folder; bf16 as its bits in uint16.
    pub file: String,
    /// Number format, or `i32`.
    pub dtype: String,
    /// Axes, slowest first.
    pub axes: Vec<String>,
    /// Their lengths.
    pub shape: Vec<usize>,
    /// A wanted output that may be left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

impl Array {
    /// The number format; None: integers.
    pub fn format(&self) -> Option<DType> {
        serde_json::from_value(serde_json::Value::String(self.dtype.clone())).ok()
    }
}
