//! Everything that can be asked of a model file, as `inspect` and `run` would ask it: shared by the tests of damaged
//! files and by the fuzz target.

use mla_check::gguf::Gguf;
use mla_check::model::lint::lint;
use mla_check::model::{Convention, Model, Reading};
use mla_check::survey;
use mla_reference::{Weight, Weights};
use std::path::Path;

/// How far a file was understood, and a sum of what was read (so that nothing is optimised away).
#[derive(Clone, Copy, Debug, Default)]
pub struct Reached {
    /// The container was read.
    pub container: bool,
    /// The metadata made a model.
    pub model: bool,
    /// Layers whose weights could all be used.
    pub layers: usize,
    /// Of what was read.
    pub sum: u64,
}

/// Asks for everything; every error is put into words. `values`: the survey of all values too.
pub fn everything(path: &Path, values: bool) -> Reached {
    let mut r = Reached::default();
    match Gguf::open(path) {
        Ok(gguf) => {
            r.container = true;
            container(&gguf, &mut r.sum);
        }
        Err(e) => return Reached { sum: e.to_string().len() as u64, ..r },
    }
    match Model::open(path) {
        Ok(model) => {
            r.model = true;
            layers(&model, &mut r);
            if values {
                let layers: Vec<usize> = model.mla_layers().into_iter().take(4).collect();
                let (mut subjects, unread) = survey::attention(&model, &layers);
                subjects.extend(survey::others(&model, &subjects).0);
                let found = survey::survey(&subjects, unread, &|_| ());
                r.sum += survey::findings(&found).iter().map(|f| f.what.len() as u64).sum::<u64>();
            }
        }
        Err(e) => r.sum += e.to_string().len() as u64,
    }
    r
}

fn container(gguf: &Gguf, sum: &mut u64) {
    let mut add = |n: usize| *sum = sum.wrapping_add(n as u64);
    gguf.warnings().iter().for_each(|w| add(w.to_string().len()));
    for (key, value) in gguf.metadata().iter() {
        add(key.len() + value.to_string().len());
        add(gguf.metadata().u64_or_array(key).map_or(0, |v| v.map_or(0, |v| v.len())));
        add(gguf.metadata().f64(key).map_or(1, |v| v.map_or(0, |v| v as usize)));
        add(gguf.metadata().str(key).map_or_else(|e| e.to_string().len(), |s| s.map_or(0, str::len)));
    }
    for tensor in gguf.tensors() {
        add(tensor.elements() as usize);
        match gguf.bytes(tensor) {
            Ok(bytes) => add(usize::from(bytes[0]) + usize::from(bytes[bytes.len() - 1])),
            Err(e) => add(e.to_string().len()),
        }
    }
}

fn layers(model: &Model, r: &mut Reached) {
    let mut add = |n: usize| r.sum = r.sum.wrapping_add(n as u64);
    for c in Convention::ALL {
        add(model.spec(&Reading { convention: c, ..Reading::default() }).scale.to_bits() as usize);
    }
    lint(model).iter().for_each(|f| add(f.what.len() + f.place.len()));
    for layer in model.mla_layers().into_iter().take(4) {
        let weights = match model.weights(layer) {
            Ok(weights) => weights,
            Err(e) => {
                add(e.to_string().len());
                continue;
            }
        };
        r.layers += 1;
        for &w in Weight::ALL {
            if let Some(m) = weights.matrix(w) {
                let mut row = vec![0.0; m.cols()];
                m.decode(m.rows() - 1, 0, &mut row);
                add(row.iter().map(|v| v.to_bits() as usize & 0xff).sum());
            }
            add(weights.norm(w).map_or(0, <[f64]>::len));
        }
    }
}
