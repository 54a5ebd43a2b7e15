/*!
The kernels that decode ggml's types, on the PTX machine: every element is the exact value rounded once, for every type, and the
machine finds nothing wrong. To bf16; where NVRTC is, to f16 and f32 too.

The exact values are those of `reference/src/dequant`, which is held to ggml's own float32 results; here the kernels are
held to ggml's results too, wherever these are exact. The PTX is the committed one, so that no compiler is needed;
`tests/kernels.rs` compares it with what the compiler gives.
*/

mod common;
#[path = "common/nvrtc.rs"]
mod environment;

use common::fixture;
use environment::nvrtc;
use mla_check::device::ptx::PtxMachine;
use mla_check::device::{Arg, Device, Launch, Limits, Module};
use mla_check::engine::kernels::code::{COMMITTED, committed_name, options};
use mla_check::engine::kernels::header::{Entry, Header};
use mla_check::engine::kernels::library::{File, Library};
use mla_check::nvrtc::stamp::Stamp;
use mla_check::nvrtc::{Compiled, Nvrtc, PINNED, Target};
use mla_numeric::DType;
use mla_reference::dequant::{self, DECODERS};
use mla_reference::ggml::GgmlType;
use safetensors::SafeTensors;
use std::collections::BTreeSet;

const TARGET: Target = Target::compute(120);

/// The files whose kernels decode.
fn files(dtype: DType) -> Vec<File> {
    let library = Library::built_in_for(dtype).unwrap();
    let decodes = |f: &File| f.header.kernels.iter().any(|k| k.ty.is_some());
    library.files().map(|(_, f)| f.clone()).filter(decodes).collect()
}

/// The committed PTX, if it belongs to the source.
fn ptx(file: &File) -> &'static str {
    let name = committed_name(file, &[], TARGET);
    let text =
        COMMITTED.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("{name} is not committed")).1;
    let stamp = Stamp::of(&file.source, TARGET, &options(file, &[]).unwrap(), PINNED);
    stamp.check(text).unwrap_or_else(|e| panic!("{name}: {e}; tests/kernels.rs says how to write it anew"))
}

/// A type's entry point.
struct Kernel {
    ty: GgmlType,
    entry: Entry,
    header: Header,
    module: Module,
}

impl Kernel {
    fn grid(&self, blocks: usize) -> u32 {
        self.header.value(&self.entry.grid[0], &[("blocks", blocks as i64)]).unwrap() as u32
    }
    /// Blocks of the type that a block of threads decodes.
    fn per_grid(&self) -> usize {
        (1..).take_while(|n| self.grid(*n) == 1).last().unwrap()
    }
}

/// A machine with the kernels.
struct Kernels {
    machine: PtxMachine,
    dtype: DType,
    all: Vec<Kernel>,
}

impl Kernels {
    /// To bf16, without a compiler.
    fn new() -> Kernels {
        Kernels::of_code(DType::Bf16, |file| Compiled::of_ptx(&file.source.name, TARGET, ptx(file)))
    }

    fn compiled(nvrtc: &Nvrtc, dtype: DType) -> Kernels {
        let compile =
            |file: &File| nvrtc.compile(&file.source, TARGET, &options(file, &[]).unwrap()).unwrap();
        Kernels::of_code(dtype, compile)
    }

    fn of_code(dtype: DType, code: impl Fn(&File) -> Compiled) -> Kernels {
        let mut machine = PtxMachine::new(TARGET).unwrap();
        let mut all = Vec::new();
        for file in files(dtype) {
            let code = code(&file);
            let module = machine.load(&code).unwrap();
            for entry in &file.header.kernels {
                let ty = *GgmlType::ALL.iter().find(|t| Some(t.name()) == entry.ty.as_deref()).unwrap();
                all.push(Kernel { ty, entry: entry.clone(), header: file.header.clone(), module });
            }
        }
        Kernels { machine, dtype, all }
    }

    fn of(&self, ty: GgmlType) -> &Kernel {
        self.all.iter().find(|k| k.ty == ty).unwrap()
    }

    /// Bits of all elements of whole blocks. Buffers are no larger than they must be, the output is poisoned and must be
    /// written whole, and nothing may be found.
    fn decode(&mut self, ty: GgmlType, bytes: &[u8]) -> Vec<u64> {
        let blocks = bytes.len() / ty.block_bytes();
        assert_eq!(blocks * ty.block_bytes(), bytes.len());
        let kernel = self.all.iter().find(|k| k.ty == ty).unwrap();
        let mut out = vec![0; self.dtype.bytes() * blocks * ty.block_elements()];
        let from = self.machine.allocate(bytes.len() as u64, "blocks").unwrap();
        let to = self.machine.allocate(out.len() as u64, "out").unwrap();
        self.machine.write(from, 0, bytes).unwrap();
        let launch = Launch {
            module: kernel.module,
            kernel: &kernel.entry.entry,
            grid: [kernel.grid(blocks), 1, 1],
            block: [kernel.entry.threads.parse().unwrap(), 1, 1],
            dynamic_shared: 0,
            arguments: &[Arg::In(from), Arg::Out(to), (blocks as u64).into()],
        };
        self.machine.launch(&launch).unwrap();
        self.machine.read(to, 0, &mut out).unwrap();
        assert_eq!(self.machine.take_findings(), [], "{ty}, {blocks} blocks");
        self.machine.free(from).unwrap();
        self.machine.free(to).unwrap();
        let bits = |b: &[u8]| b.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        out.chunks(self.dtype.bytes()).map(bits).collect()
    }

    /// Whether two elements are the same bits, or both NaN.
    fn same(&self, a: u64, b: u64) -> bool {
        let nan = |v| self.dtype.from_bits(v).is_nan();
        a == b || nan(a) && nan(b)
    }

    /// Decodes, and compares with the exact values rounded once. Gives how many elements of them rounding to float32 first
    /// gets wrong.
    fn check(&mut self, ty: GgmlType, bytes: &[u8], what: &str) -> usize {
        let got = self.decode(ty, bytes);
        let exact = exact(ty, bytes);
        assert_eq!(got.len(), exact.len());
        for (i, (&got, &x)) in got.iter().zip(&exact).enumerate() {
            let (want, dtype) = (self.dtype.to_bits(x), self.dtype);
            let place = || format!("{ty} to {dtype}, {what}, element {i}");
            assert!(self.same(got, want), "{}: {got:#06x}, exact {x:e}: {want:#06x}", place());
        }
        let twice = |x: f64| self.dtype.to_bits(f64::from(x as f32));
        exact.iter().filter(|&&x| !self.same(self.dtype.to_bits(x), twice(x))).count()
    }
}

fn exact(ty: GgmlType, bytes: &[u8]) -> Vec<f64> {
    let mut exact = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_elements()];
    dequant::decode(ty, bytes, &mut exact).unwrap();
    exact
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut out: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.word().to_le_bytes()).collect();
        out.truncate(count);
        out
    }
    fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.word() as usize % from.len()]
    }
}

/// Where a type has its f16 scales: d, and the minimum's.
fn scales(ty: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match ty {
        Q4_0 | Q5_0 | Q8_0 | Q8_1 | IQ4_NL | IQ4_XS => &[0],
        Q1_0 | Q2_0 | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ1_S => &[0],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        _ => &[],
    }
}

/// Random blocks whose scales `scale` draws, given which of the scales it is.
fn drawn(
    ty: GgmlType,
    blocks: usize,
    r: &mut Random,
    mut scale: impl FnMut(&mut Random, usize) -> u16,
) -> Vec<u8> {
    let mut bytes = r.bytes(blocks * ty.block_bytes());
    for block in bytes.chunks_mut(ty.block_bytes()) {
        for (which, &at) in scales(ty).iter().enumerate() {
            block[at..at + 2].copy_from_slice(&scale(r, which).to_le_bytes());
        }
    }
    bytes
}

/// f16: ±0, the smallest and largest subnormal and normal, infinities, NaN quiet and signalling.
const SPECIAL: [u16; 16] = [
    0, 0x8000, 1, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x8400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe00,
    0x7c01, 0x3c00,
];

#[test]
fn there_is_a_kernel_for_every_type_that_can_be_decoded() {
    let (mut types, mut entries) = (BTreeSet::new(), BTreeSet::new());
    for file in files(DType::Bf16) {
        for k in &file.header.kernels {
            let ty = k.ty.clone().unwrap();
            assert_eq!(k.entry, format!("dequant_{}", ty.to_lowercase()));
            assert!(types.insert(ty) && entries.insert(k.entry.clone()));
        }
        let module = mla_ptx::Module::parse(ptx(&file)).unwrap();
        let mut names: Vec<_> = module.kernels().map(|k| k.name.to_string()).collect();
        let mut expected: Vec<_> = file.header.kernels.iter().map(|k| k.entry.clone()).collect();
        names.sort();
        expected.sort();
        assert_eq!(names, expected);
    }
    assert_eq!(types, DECODERS.iter().map(|d| d.ty().name().to_string()).collect());
}

/// The codebooks of the kernels are those of the reference.
#[test]
fn codebooks_are_the_references() {
    let text = include_str!("../kernels/codebooks.cuh");
    let numbers = text.split("0x").skip(1).map(|t| u16::from_str_radix(&t[..4], 16).unwrap());
    let bytes = include_bytes!("../reference/src/dequant/codebooks.bin");
    assert!(numbers.eq(bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b))));
}

/// Blocks that ggml decoded: bf16 of the exact value, and of ggml's float32 wherever that is exact.
#[test]
fn blocks_that_ggml_decoded() {
    let mut kernels = Kernels::new();
    let file = std::fs::read(fixture("quant/blocks.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut missing = Vec::new();
    for ty in DECODERS.iter().map(|d| d.ty()) {
        let mut held = 0;
        for part in ["", "quantised_"] {
            let tensor = |key: &str| file.tensor(&format!("{ty}.{part}{key}"));
            let (Ok(bytes), Ok(floats)) = (tensor("bytes"), tensor("f32")) else { continue };
            let got = kernels.decode(ty, bytes.data());
            kernels.check(ty, bytes.data(), part);
            let floats = floats.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
            for (i, ((got, x), ggml)) in got.iter().zip(exact(ty, bytes.data())).zip(floats).enumerate() {
                if f64::from(ggml) == x || ggml.is_nan() {
                    held += 1;
                    let want = u64::from(half::bf16::from_f32(ggml).to_bits());
                    assert!(
                        kernels.same(*got, want),
                        "{ty} {part}{i}: {got:#06x}, ggml {ggml:e}: {want:#06x}"
                    );
                }
            }
        }
        if held == 0 {
            missing.push(ty);
        }
    }
    // ggml decodes none of these; their layout says what they are.
    use GgmlType::*;
    assert_eq!(missing, [F32, Q8_1, F64, I8, I16, I32, I64]);
}

/// Blocks whose values follow from their layout.
#[test]
fn blocks_of_types_that_ggml_does_not_decode() {
    let mut kernels = Kernels::new();
    let file = std::fs::read(fixture("quant/layouts.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    for ty in ["F32", "Q8_1", "F64", "I8", "I16", "I32", "I64"] {
        let ty = *GgmlType::ALL.iter().find(|t| t.name() == ty).unwrap();
        let bytes = file.tensor(&format!("{ty}.bytes")).unwrap();
        let values = file.tensor(&format!("{ty}.f64")).unwrap();
        let got = kernels.decode(ty, bytes.data());
        for (i, (got, x)) in got.iter().zip(values.data().as_chunks().0).enumerate() {
            let want = DType::Bf16.to_bits(f64::from_le_bytes(*x));
            assert!(kernels.same(*got, want), "{ty} {i}: {got:#06x}, not {want:#06x}");
        }
    }
}

/// Random bytes; then with scales that are zero, subnormal, largest, infinite or NaN.
#[test]
fn random_blocks_with_any_scale() {
    let mut kernels = Kernels::new();
    for (seed, ty) in DECODERS.iter().map(|d| d.ty()).enumerate() {
        let mut r = Random(seed as u64);
        let blocks = 65_536 / ty.block_elements();
        let bytes = r.bytes(blocks * ty.block_bytes());
        kernels.check(ty, &bytes, "random");
        let bytes = drawn(ty, blocks, &mut r, |r, _| r.of(&SPECIAL));
        kernels.check(ty, &bytes, "special");
    }
}

/// The types whose elements are numbers of a format: every f16 and bf16; f32 at and beside ties, and beyond bf16's largest.
#[test]
fn all_halves_and_ties_of_float32() {
    let mut kernels = Kernels::new();
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    kernels.check(GgmlType::F16, &halves, "all");
    kernels.check(GgmlType::BF16, &halves, "all");
    let low = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let floats = (0..=u16::MAX).flat_map(|h| low.map(|l| u32::from(h) << 16 | l).map(u32::to_le_bytes));
    kernels.check(GgmlType::F32, floats.collect::<Vec<_>>().as_flattened(), "ties");
}

/// A scale that makes ties of bf16 (nine bits of significand, the last one 1) against one so small that float32 drops its
/// part, and the other way round: rounding twice is wrong in many elements, and the kernels are right in all.
#[test]
fn sums_at_ties_are_rounded_once() {
    let mut kernels = Kernels::new();
    for ty in [GgmlType::Q4_1, GgmlType::Q5_1, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::Q5_K] {
        let mut wrong = 0;
        for large in [0, 1] {
            let mut r = Random(77 + large as u64);
            let bytes = drawn(ty, 32_768 / ty.block_elements(), &mut r, |r, which| {
                let w = r.word() as u16;
                // 2^9 to 2^15, fraction xxxxxxx1'00; or 0 to 3 times 2^-24.
                if which == large { (0x6000 | w & 0x9bf8) | 4 } else { w & 0x8003 }
            });
            wrong += kernels.check(ty, &bytes, "ties");
        }
        assert!(wrong > 500, "{ty}: {wrong}");
    }
}

/// Fewer blocks than threads, one more than fill a warp or a block of threads, odd numbers.
#[test]
fn any_number_of_blocks() {
    let mut kernels = Kernels::new();
    for ty in DECODERS.iter().map(|d| d.ty()) {
        let per = kernels.of(ty).per_grid();
        let bytes = Random(5).bytes((2 * per + 3) * ty.block_bytes());
        for blocks in (1..=9).chain([per - 1, per, per + 1, 2 * per + 3]) {
            kernels.check(ty, &bytes[..blocks * ty.block_bytes()], "tail");
        }
    }
}

/// What the kernels' arithmetic rests on: without a minimum the value is a float32, or NaN.
#[test]
fn float32_holds_what_has_no_minimum() {
    for ty in DECODERS.iter().map(|d| d.ty()).filter(|ty| scales(ty.to_owned()).len() == 1) {
        let mut r = Random(9);
        let random = r.bytes(4096 * ty.block_bytes());
        // The largest and smallest significands and exponents.
        let extreme = drawn(ty, 4096, &mut r, |r, _| r.of(&[0x7bff, 0x07ff, 0x03ff, 1, 0x77ff]));
        for x in exact(ty, &[random, extreme].concat()) {
            assert!(f64::from(x as f32) == x || x.is_nan(), "{ty}: {x:e}");
        }
    }
}

/// Nothing spills, nothing lies in local or shared memory, and as many threads fit as the device takes.
#[test]
fn kernels_are_small() {
    let Some(nvrtc) = nvrtc("kernels_are_small") else { return };
    let targets = [90, 100, 120].map(Target::sm);
    for file in [DType::Bf16, DType::F16, DType::F32].into_iter().flat_map(files) {
        let options = options(&file, &[]).unwrap();
        for (target, code) in targets.iter().zip(nvrtc.compile_all(&file.source, &targets, &options)) {
            let code = code.unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(code.diagnostics(), "");
            assert_eq!(code.kernels.len(), file.header.kernels.len());
            let limits = Limits::of(*target).unwrap();
            for k in &code.kernels {
                let what = format!(
                    "{} on {target} to {}, {} registers, {} B of code",
                    k.kernel, file.dtype, k.registers, k.code_bytes
                );
                assert_eq!((k.spill_store_bytes, k.spill_load_bytes), (Some(0), Some(0)), "{what}");
                assert_eq!((k.frame_bytes, k.static_shared_bytes, k.parameter_bytes), (0, 0, 24), "{what}");
                assert!(k.registers * limits.threads_per_sm <= limits.registers_per_sm, "{what}");
            }
        }
    }
}

/// Numbers longer than float32's, beside ties of bf16 (nine bits of significand, the last one 1) by so little that float32 drops
/// it: rounding twice is wrong in many elements, and the kernels are right in all.
#[test]
fn long_numbers_at_ties_are_rounded_once() {
    let mut kernels = Kernels::new();
    let mut r = Random(3);
    let mut ties =
        || f64::from((r.word() as u32 & 0x7f) << 1 | 0x101) * if r.word() & 1 == 0 { 1.0 } else { -1.0 };
    // float32 of a third of a tie, times codes of 3: no more than half a bit of float32 from the tie.
    let blocks = (0..128).flat_map(|_| {
        let d = (ties() / 3.0) as f32;
        d.to_le_bytes().into_iter().chain([3; 256]).chain([0; 32]).collect::<Vec<u8>>()
    });
    let mut wrong = [kernels.check(GgmlType::Q8_K, &blocks.collect::<Vec<_>>(), "ties"), 0, 0, 0];
    let doubles = (0..4096).flat_map(|_| (ties() * (1.0 + 2f64.powi(-40))).to_le_bytes());
    wrong[1] = kernels.check(GgmlType::F64, &doubles.collect::<Vec<_>>(), "ties");
    let words = (0..4096).flat_map(|_| (ties() as i32 * (1 << 20) + 1).to_le_bytes());
    wrong[2] = kernels.check(GgmlType::I32, &words.collect::<Vec<_>>(), "ties");
    let longs = (0..4096).flat_map(|_| (ties() as i64 * (1 << 40) + 1).to_le_bytes());
    wrong[3] = kernels.check(GgmlType::I64, &longs.collect::<Vec<_>>(), "ties");
    assert!(wrong.iter().all(|n| *n > 500), "{wrong:?}");
}

/// To f16 and to f32: random blocks, extreme scales, every half, and numbers longer than float32's beside ties.
#[test]
fn other_dtypes_are_rounded_once_too() {
    let Some(nvrtc) = nvrtc("other_dtypes_are_rounded_once_too") else { return };
    for (dtype, precision) in [(DType::F16, 11), (DType::F32, 24)] {
        let mut kernels = Kernels::compiled(&nvrtc, dtype);
        let mut r = Random(11);
        for ty in DECODERS.iter().map(|d| d.ty()) {
            let blocks = 16_384 / ty.block_elements();
            kernels.check(ty, &r.bytes(blocks * ty.block_bytes()), "random");
            kernels.check(ty, &drawn(ty, blocks, &mut r, |r, _| r.of(&SPECIAL)), "special");
            kernels.check(ty, &r.bytes(3 * ty.block_bytes()), "tail");
        }
        let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        kernels.check(GgmlType::F16, &halves, "all");
        kernels.check(GgmlType::BF16, &halves, "all");
        // A significand whose last bit lies behind the dtype's, moved by less than a float32 holds; then beside the largest number
        // and among the smallest ones.
        let mut ties = || (1u64 << precision | (r.word() & ((1 << (precision - 1)) - 1)) << 1 | 1) as f64;
        let mut doubles: Vec<f64> = (0..4096).map(|_| ties() * (1.0 + f64::powi(2.0, -50))).collect();
        let largest = dtype.largest();
        doubles.extend([0.999_999, 1.0, 1.000_1, 1.000_3, 2.0].map(|f| largest * f));
        let least = f64::powi(2.0, dtype.min_exponent() - precision);
        doubles.extend((0..64).map(|n| least * f64::from(n) * (1.0 + f64::powi(2.0, -45))));
        let bytes: Vec<u8> = doubles.iter().flat_map(|v| v.to_le_bytes()).collect();
        let wrong = kernels.check(GgmlType::F64, &bytes, "ties");
        assert_eq!(wrong > 500, dtype == DType::F16, "{dtype}: {wrong}");
    }
}
