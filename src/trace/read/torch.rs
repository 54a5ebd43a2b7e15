/*!
`torch.save`'s files: a zip archive of one pickle and raw storages.

`ROOT/data.pkl` says which tensors there are, `ROOT/data/KEY` holds the elements of a storage, `ROOT/byteorder` their
order. Tensors are views (offset, shape, strides) and are copied out row-major. Dictionaries and lists give names:
keys and indices, joined by dots.
*/

use super::pickle::{self, Strided, Value};
use super::zip::{self, File};
use super::{Array, elements};

/// How many times larger than its storage a tensor may be: `expand` repeats elements, over heads for example.
const MOST_REPEATS: usize = 4096;

/// The archive's tensors by name; a bare tensor has an empty one.
pub fn list(bytes: &[u8]) -> Result<Vec<(String, Strided)>, String> {
    let files = zip::list(bytes)?;
    let code = find(&files, "data.pkl").ok_or("it has no data.pkl, so torch.save did not write it")?;
    if let Some(order) = find(&files, "byteorder") {
        let order = zip::read(bytes, order, false)?;
        if order != b"little" {
            return Err(format!("its numbers are {}-endian", String::from_utf8_lossy(&order).escape_debug()));
        }
    }
    let value = pickle::parse(&zip::read(bytes, code, false)?).map_err(|e| e.to_string())?;
    let mut all = Vec::new();
    collect(value, String::new(), &mut all);
    Ok(all)
}

/// The entry of this name below the root folder.
fn find<'a>(files: &'a [File], name: &str) -> Option<&'a File> {
    files.iter().find(|f| f.name.split_once('/').is_some_and(|(_, rest)| rest == name))
}

fn collect(value: Value, name: String, all: &mut Vec<(String, Strided)>) {
    let below = |part: String| if name.is_empty() { part } else { format!("{name}.{part}") };
    match value {
        Value::Tensor(t) => all.push((name, *t)),
        Value::List(items) => {
            for (i, v) in items.into_iter().enumerate() {
                collect(v, below(i.to_string()), all);
            }
        }
        Value::Dict(items) => {
            for (k, v) in items {
                match k {
                    Value::Text(k) => collect(v, below(k), all),
                    Value::Int(k) => collect(v, below(k.to_string()), all),
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

/// The elements of a tensor.
pub fn read(bytes: &[u8], tensor: &Strided) -> Result<Array, String> {
    let files = zip::list(bytes)?;
    let name = format!("data/{}", tensor.key);
    let file = find(&files, &name).ok_or_else(|| format!("it lacks {}", name.escape_debug()))?;
    let storage = zip::read(bytes, file, false)?;
    let n = tensor.stored.bytes();
    let bad = || format!("a tensor of shape {:?} reaches beyond its storage", tensor.shape);
    let total = elements(&tensor.shape).ok_or_else(bad)?;
    if total == 0 {
        return Array::new(tensor.stored, tensor.shape.clone(), Vec::new());
    }
    let last = tensor
        .shape
        .iter()
        .zip(&tensor.strides)
        .try_fold(tensor.offset, |at, (len, stride)| at.checked_add((len - 1).checked_mul(*stride)?));
    let held = storage.len() / n;
    if last.is_none_or(|last| last >= held) || total / MOST_REPEATS > held {
        return Err(bad());
    }
    let mut out = Vec::with_capacity(total * n);
    let (inner, step) = match (tensor.shape.last(), tensor.strides.last()) {
        (Some(len), Some(step)) => (*len, *step),
        _ => (1, 1),
    };
    let outer = tensor.shape.len().saturating_sub(1);
    let mut index = vec![0usize; outer];
    for _ in 0..total / inner {
        let at = tensor.offset + index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum::<usize>();
        if step == 1 {
            out.extend_from_slice(&storage[at * n..(at + inner) * n]);
        } else {
            (0..inner).for_each(|j| out.extend_from_slice(&storage[(at + j * step) * n..][..n]));
        }
        for (i, len) in index.iter_mut().zip(&tensor.shape).rev() {
            *i += 1;
            if *i < *len {
                break;
            }
            *i = 0;
        }
    }
    Array::new(tensor.stored, tensor.shape.clone(), out)
}
