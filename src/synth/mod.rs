/*!
Made-up model files: real dimensions, random weights, attention only.

For trying the harness on a model's true geometry where the model itself is not at hand. Files are what
llama-quantize would write for the attention tensors of each layer: its names, order, metadata and mix of
types. The same seed gives the same bytes for every number of threads, and a layer's bytes do
not depend on how many layers are written.
*/

mod draw;
mod mix;
mod preset;
mod random;

pub use mix::FileType;
pub use preset::{Draw, Indexer, Lengths, MlaLayers, Preset, Yarn};

use crate::gguf::GgufError;
use crate::gguf::write::Writer;
use draw::Drawer;
use mla_reference::ggml::GgmlType;
use random::Stream;
use rayon::prelude::*;
use std::io;
use std::path::Path;

/// The most layers and heads of a made-up model.
const MOST_LAYERS: u32 = 512;
const MOST_HEADS: u64 = 1024;
/// Bytes drawn at a time.
const CHUNK: usize = 8 << 20;
/// Words of the generator set apart for a block; the largest block takes 292 / 8 words and 4 more.
const BLOCK_WORDS: u64 = 64;

/// What is to be made up.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The model whose geometry it has.
    pub preset: &'static Preset,
    /// The mix of types.
    pub file_type: &'static FileType,
    /// How many layers are written.
    pub layers: u32,
    /// Heads, where not the preset's.
    pub heads: Option<u64>,
    /// The seed of the weights.
    pub seed: u64,
}

impl Spec {
    /// One layer of a preset.
    pub fn new(preset: &'static Preset, file_type: &'static FileType) -> Spec {
        Spec { preset, file_type, layers: 1, heads: None, seed: 0 }
    }
}

/// Why no file was made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SynthError {
    #[error("{found} {what}\n  where: the model asked for\n  do: ask for 1 to {most}")]
    Number { what: &'static str, found: u64, most: u64 },
    #[error(
        "no random blocks of type {ty} can be drawn\n  where: the model asked for\n  do: choose another --type"
    )]
    Type { ty: GgmlType },
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

struct Tensor {
    name: String,
    drawer: Drawer,
    bytes: u64,
}

/// Writes a made-up model; `progress` is told bytes of weights written and in all. Gives the file's length.
pub fn write(spec: &Spec, path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, SynthError> {
    let heads = spec.heads.unwrap_or(spec.preset.heads);
    for (what, found, most) in
        [("layers", spec.layers.into(), MOST_LAYERS.into()), ("heads", heads, MOST_HEADS)]
    {
        if !(1..=most).contains(&found) {
            return Err(SynthError::Number { what, found, most });
        }
    }
    let mut writer = Writer::new();
    metadata(spec, heads, &mut writer);
    let mut tensors = Vec::new();
    for (name, width, [least, greatest]) in spec.preset.globals() {
        writer.tensor(name, &[width], GgmlType::F32);
        let drawer = Drawer::uniform(least, greatest);
        tensors.push(Tensor { name: name.into(), drawer, bytes: 4 * width });
    }
    for layer in (0..spec.layers).filter(|l| spec.preset.is_mla(*l, spec.layers)) {
        for (name, dims, draw) in spec.preset.tensors(heads) {
            let name = format!("blk.{layer}.{name}");
            let ty = spec.file_type.tensor(draw, dims[0]);
            let drawer = match draw {
                Draw::Norm => Some(Drawer::uniform(0.5, 1.5)),
                Draw::Bias => Some(Drawer::uniform(-0.5, 0.5)),
                Draw::Weight | Draw::Output | Draw::Query | Draw::Heads => {
                    Drawer::rms(ty, 1.0 / (dims[0] as f64).sqrt())
                }
            };
            let drawer = drawer.ok_or(SynthError::Type { ty })?;
            if let Some(scale) = drawer.tensor_scale() {
                let name = format!("{}.scale", name.trim_end_matches(".weight"));
                writer.tensor(&name, &[1], GgmlType::F32);
                tensors.push(Tensor { name, drawer: Drawer::uniform(scale, scale), bytes: 4 });
            }
            writer.tensor(&name, &dims, ty);
            let blocks = dims.iter().product::<u64>() / ty.block_elements() as u64;
            tensors.push(Tensor { name, drawer, bytes: blocks * ty.block_bytes() as u64 });
        }
    }
    let total = tensors.iter().map(|t| t.bytes).sum();
    let mut done = 0;
    let mut buffers = [Vec::new(), Vec::new()];
    let length = writer.write(path, &mut |i, out| {
        let tensor = tensors.get(i).ok_or(io::ErrorKind::InvalidInput)?;
        stream(tensor, spec.seed, &mut buffers, &mut |bytes| {
            out.write_all(bytes)?;
            done += bytes.len() as u64;
            progress(done, total);
            Ok(())
        })
    })?;
    Ok(length)
}

/// Draws a tensor, a buffer of whole blocks at a time; one is drawn while the one before is written.
fn stream(
    tensor: &Tensor,
    seed: u64,
    buffers: &mut [Vec<u8>; 2],
    write: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let key = random::key(seed, &tensor.name);
    let block = tensor.drawer.bytes;
    let at_once = (CHUNK / block * block) as u64;
    let fill = |buffer: &mut Vec<u8>, from: u64| {
        buffer.resize(at_once.min(tensor.bytes - from) as usize, 0);
        let first = from / block as u64;
        buffer.par_chunks_mut(block).with_min_len(1024).enumerate().for_each(|(i, bytes)| {
            tensor.drawer.block(bytes, Stream::new(key, (first + i as u64) * BLOCK_WORDS));
        });
    };
    let [ready, next] = buffers;
    fill(ready, 0);
    let mut from = at_once;
    while from < tensor.bytes {
        rayon::in_place_scope(|scope| {
            scope.spawn(|_| fill(next, from));
            write(ready)
        })?;
        std::mem::swap(ready, next);
        from += at_once;
    }
    write(ready)
}

fn metadata(spec: &Spec, heads: u64, writer: &mut Writer) {
    let (preset, seed) = (spec.preset, spec.seed);
    writer
        .meta("general.architecture", preset.arch)
        .meta("general.type", "model")
        .meta("general.name", format!("{} synthetic, random weights, seed {seed}", preset.name));
    preset.metadata(writer, spec.layers, heads);
    writer.meta("general.quantization_version", 2u32).meta("general.file_type", spec.file_type.id);
}
