//! Attention over tensors whose rows do not lie together: the bits of the same tensors packed, and nothing written between.

use mla_check::device::{Arg, Device};
use mla_check::engine::kernels::code::Code;
use mla_check::engine::kernels::library::Library;
use mla_check::engine::kernels::machine::{Held, Machine, poison};
use mla_numeric::DType;

const HEADS: usize = 5;
const TOKENS: usize = 9;
const KEYS: usize = 70;
const GEOMETRY: [(&str, i64); 4] = [("NOPE", 128), ("ROPE", 64), ("VALUE", 128), ("LATENT", 512)];
/// Scale · log₂ e.
const C2: f32 = 0.1;
/// What is between rows, and in slots that nobody uses.
const NAN: u16 = 0xffff;

/// Where [row][head][width] lies: elements from a row and from a head to the next one.
#[derive(Clone, Copy)]
struct Lying {
    rows: usize,
    width: usize,
    row: usize,
    head: usize,
}

impl Lying {
    fn elements(&self) -> usize {
        (self.rows - 1) * self.row + (HEADS - 1) * self.head + self.width
    }

    fn at(&self) -> impl Iterator<Item = usize> + '_ {
        let heads = move |r| (0..HEADS).map(move |h| r * self.row + h * self.head);
        (0..self.rows).flat_map(heads).flat_map(|at| at..at + self.width)
    }

    /// Values where they belong, NaN between.
    fn spread(&self, values: &[u16]) -> Vec<u8> {
        let mut out = vec![NAN; self.elements()];
        self.at().zip(values).for_each(|(i, v)| out[i] = *v);
        out.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    /// The values back; what is between must be as it was.
    fn gathered(&self, bytes: &[u8]) -> Vec<u16> {
        let mut all: Vec<u16> = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let values = self.at().map(|i| std::mem::replace(&mut all[i], NAN)).collect();
        assert!(all[..self.elements()].iter().all(|v| *v == NAN), "something was written between the rows");
        values
    }
}

/// Packed, with gaps between heads and tokens, and head by head.
fn layouts(rows: usize, width: usize) -> [Lying; 3] {
    [
        Lying { rows, width, row: HEADS * width, head: width },
        Lying { rows, width, row: HEADS * (width + 24) + 40, head: width + 24 },
        Lying { rows, width, row: width + 8, head: rows * (width + 8) },
    ]
}

/// bf16 numbers of both signs between 2^-7 and 2, the same for the same seed.
fn numbers(count: usize, seed: u32) -> Vec<u16> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = state >> 16;
        (bits & 0x8000) as u16 | (0x3c00 + (bits & 0x3ff) as u16)
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn kernel<D: Device>(device: &mut D, body: impl FnOnce(&mut Machine<'_, D>)) {
    let mut code = Code::new(Library::built_in().unwrap());
    let shared = i64::from(device.limits().shared_per_block);
    let scalars = GEOMETRY.into_iter().chain([("SHARED", shared)]).collect();
    body(&mut Machine::new(device, &mut code, scalars));
}

fn output<D: Device>(machine: &mut Machine<'_, D>, elements: usize) -> Held {
    let held = machine.allocate(elements * 2, "output").unwrap();
    machine.device.fill(held.buffer, poison(0, DType::Bf16)).unwrap();
    held
}

fn lse<D: Device>(machine: &mut Machine<'_, D>) -> Held {
    machine.allocate(TOKENS * HEADS * 4, "lse").unwrap()
}

/// Runs both forms in every layout.
pub fn attention<D: Device>(device: &mut D) {
    fused(device);
    absorbed(device);
}

fn fused<D: Device>(device: &mut D) {
    let (key, value) = (192, 128);
    let all = [layouts(TOKENS, key), layouts(KEYS, key), layouts(KEYS, value), layouts(TOKENS, value)];
    let data: Vec<_> = (0..3).map(|i| numbers(all[i][0].elements(), 1 + i as u32)).collect();
    let work = [0, TOKENS, 0, 0, 0, KEYS, KEYS - TOKENS + 1, 0].map(|w| w as u32);
    kernel(device, |m| {
        let mut packed = None;
        for layout in 0..3 {
            let at = all.map(|l| l[layout]);
            let operands: Vec<_> =
                (0..3).map(|i| m.upload(&at[i].spread(&data[i]), "operand").unwrap()).collect();
            let (list, o, lse) = (m.upload_words(work, "work").unwrap(), output(m, at[3].elements()), lse(m));
            let mut arguments: Vec<Arg> = operands.iter().map(|h| Arg::In(h.buffer)).collect();
            arguments.extend([Arg::In(list.buffer), Arg::InOut(o.buffer), Arg::Out(lse.buffer)]);
            arguments.extend(at.map(|l| Arg::from(l.row as i64)));
            arguments.extend(at.map(|l| Arg::from(l.head as i32)));
            arguments.extend([Arg::from(HEADS as i32), C2.into()]);
            m.launch("fused", &[("items", 1), ("heads", HEADS)], &arguments).unwrap();
            let found = (at[3].gathered(&m.read(o).unwrap()), m.read(lse).unwrap());
            assert!(found.0.iter().all(|v| *v & 0x7f80 != 0x7f80), "not finite");
            assert_eq!(*packed.get_or_insert_with(|| found.clone()), found, "layout {layout}");
            assert_eq!(m.device.take_findings(), [""; 0]);
        }
    });
}

fn absorbed<D: Device>(device: &mut D) {
    let (latent, rope, nope) = (512, 64, 128);
    let all = [layouts(TOKENS, latent), layouts(TOKENS, nope + rope), layouts(TOKENS, latent)];
    let data: Vec<_> = (0..2).map(|i| numbers(all[i][0].elements(), 5 + i as u32)).collect();
    let keys = numbers(KEYS * (latent + rope), 9);
    let all_rows = TOKENS * HEADS;
    let entries = [("absorbed_16", 16), ("absorbed_32", 32), ("absorbed_64", 64)];
    kernel(device, |m| {
        let mut first = None;
        // Rows of the cache together, with a gap, and as far apart as in shared memory: then 16 are copied at once.
        let pitches = [(576, 64), (600, 16), (584, 16), (584, 7)];
        let cases = (0..3).flat_map(|l| pitches.map(|p| (l, p)));
        for ((layout, (pitch, page)), (entry, rows)) in cases.flat_map(|c| entries.map(|e| (c, e))) {
            let starts = (0..all_rows).step_by(rows);
            let item = |r: usize| [r, rows.min(all_rows - r), r, 0, 0, KEYS, KEYS - TOKENS + 1, 0];
            let work: Vec<u32> = starts.flat_map(item).map(|w| w as u32).collect();
            // The last pages first.
            let pages = KEYS.div_ceil(page);
            let mut cache = vec![NAN; pages * page * pitch];
            for (key, values) in keys.chunks_exact(latent + rope).enumerate() {
                let slot = (pages - 1 - key / page) * page + key % page;
                cache[slot * pitch..slot * pitch + values.len()].copy_from_slice(values);
            }
            let cache: Vec<u8> = cache.into_iter().flat_map(u16::to_le_bytes).collect();
            let at = all.map(|l| l[layout]);
            let q: Vec<_> = (0..2).map(|i| m.upload(&at[i].spread(&data[i]), "operand").unwrap()).collect();
            let cache = m.upload(&cache, "cache").unwrap();
            let table = m.upload_words((0..pages as u32).rev(), "pages").unwrap();
            let (list, o, lse) = (m.upload_words(work, "work").unwrap(), output(m, at[2].elements()), lse(m));
            let mut arguments: Vec<Arg> = q.iter().map(|h| Arg::In(h.buffer)).collect();
            arguments.extend([cache, table, list].map(|h| Arg::In(h.buffer)));
            arguments.extend([Arg::InOut(o.buffer), Arg::Out(lse.buffer)]);
            arguments.extend(at.map(|l| Arg::from(l.row as i64)));
            arguments.extend(at.map(|l| Arg::from(l.head as i32)));
            arguments.extend([pitch, nope, HEADS, page].map(|n| Arg::from(n as i32)));
            arguments.push(C2.into());
            let items = all_rows.div_ceil(rows);
            m.launch(entry, &[("items", items), ("heads", HEADS)], &arguments).unwrap();
            let found = (at[2].gathered(&m.read(o).unwrap()), m.read(lse).unwrap());
            assert!(found.0.iter().all(|v| *v & 0x7f80 != 0x7f80), "not finite");
            assert_eq!(
                *first.get_or_insert_with(|| found.clone()),
                found,
                "{entry}, layout {layout}, rows {pitch} apart"
            );
            assert_eq!(m.device.take_findings(), [""; 0]);
        }
    });
}
