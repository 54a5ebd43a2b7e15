/*!
Register files of a warp and the lanes of an operation.

A row is one register of all 32 lanes. [`Lane`] says how a type reads and writes a row; [`kern!`] makes, of a function
of one lane, the function of a row: once for any processor, once for AVX2 and FMA, chosen when a module is loaded.
*/

use crate::fp::{CANONICAL_NAN, flush};
use crate::ir::{Inst, Program, Reg};

/// Lanes of a warp.
pub const LANES: usize = 32;
/// A row of the 32-bit file.
pub type V = [u32; LANES];
/// A row of the 64-bit file.
pub type W = [u64; LANES];

/// Registers of one warp and which lanes of each were written.
#[derive(Clone)]
pub struct Regs {
    pub r: Vec<V>,
    pub d: Vec<W>,
    pub p: Vec<u32>,
    pub r_written: Vec<u32>,
    pub d_written: Vec<u32>,
    pub p_written: Vec<u32>,
}

/// A function of whole rows.
pub type RowFn = unsafe fn(&mut Regs, &Inst, u32);
/// A comparison: a bit a lane.
pub type CompareFn = unsafe fn(&Regs, &Inst) -> u32;

/// A row function; safe to call, since the one that is kept runs on this processor.
#[derive(Clone, Copy, Debug)]
pub struct Kern(RowFn);
/// The same for comparisons.
#[derive(Clone, Copy, Debug)]
pub struct Compare(CompareFn);

/// Whether rows may be computed with AVX2 and FMA.
pub fn wide_rows() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl Kern {
    /// # Safety
    /// `f` must be callable on this processor.
    pub unsafe fn new(f: RowFn) -> Self {
        Kern(f)
    }
    #[inline(always)]
    pub fn run(self, r: &mut Regs, i: &Inst, mask: u32) {
        // SAFETY: by the contract of `new`.
        unsafe { (self.0)(r, i, mask) }
    }
}

impl Compare {
    /// # Safety
    /// `f` must be callable on this processor.
    pub unsafe fn new(f: CompareFn) -> Self {
        Compare(f)
    }
    #[inline(always)]
    pub fn run(self, r: &Regs, i: &Inst) -> u32 {
        // SAFETY: by the contract of `new`.
        unsafe { (self.0)(r, i) }
    }
}

/// What a register that was never written holds.
const STALE: u64 = 0xdead_beef_dead_beef;

impl Regs {
    /// Files of a program, constants filled.
    pub fn new(p: &Program) -> Self {
        let [r, d, q] = p.rows.map(|n| n as usize);
        let mut regs = Regs {
            r: vec![[STALE as u32; LANES]; r],
            d: vec![[STALE; LANES]; d],
            p: vec![0; q],
            r_written: vec![0; r],
            d_written: vec![0; d],
            p_written: vec![0; q],
        };
        for &(reg, v) in &p.constants {
            regs.fill(reg, v);
        }
        regs
    }

    /// The same value in every lane, as written.
    pub fn fill(&mut self, reg: Reg, v: u64) {
        match reg {
            Reg::R(_) => self.put32(reg, !0, &[v as u32; LANES]),
            Reg::P(_) => self.put_pred(reg, !0, if v != 0 { !0 } else { 0 }),
            _ => self.put64(reg, !0, &[v; LANES]),
        }
    }

    #[inline(always)]
    pub fn get32(&self, s: Reg) -> V {
        match s {
            Reg::R(i) => self.r[i as usize],
            Reg::D(i) => self.d[i as usize].map(|v| v as u32),
            Reg::P(_) | Reg::NotP(_) => {
                let p = self.pred(s);
                std::array::from_fn(|l| p >> l & 1)
            }
            Reg::None => [0; LANES],
        }
    }

    /// [`get32`](Regs::get32) without a copy where the row is one of 32 bits.
    #[inline(always)]
    pub fn row32<'a>(&'a self, s: Reg, spare: &'a mut V) -> &'a V {
        match s {
            Reg::R(i) => &self.r[i as usize],
            s => {
                *spare = self.get32(s);
                spare
            }
        }
    }

    #[inline(always)]
    pub fn get64(&self, s: Reg) -> W {
        match s {
            Reg::D(i) => self.d[i as usize],
            s => self.get32(s).map(u64::from),
        }
    }

    /// A bit a lane.
    #[inline(always)]
    pub fn pred(&self, s: Reg) -> u32 {
        match s {
            Reg::P(i) => self.p[i as usize],
            Reg::NotP(i) => !self.p[i as usize],
            _ => 0,
        }
    }

    #[inline(always)]
    pub fn put32(&mut self, d: Reg, mask: u32, v: &V) {
        match d {
            Reg::R(i) => {
                let i = i as usize;
                self.r_written[i] |= mask;
                blend(&mut self.r[i], mask, v);
            }
            Reg::D(_) => self.put64(d, mask, &v.map(u64::from)),
            _ => {}
        }
    }

    #[inline(always)]
    pub fn put64(&mut self, d: Reg, mask: u32, v: &W) {
        match d {
            Reg::D(i) => {
                let i = i as usize;
                self.d_written[i] |= mask;
                blend(&mut self.d[i], mask, v);
            }
            Reg::R(_) => self.put32(d, mask, &v.map(|v| v as u32)),
            _ => {}
        }
    }

    #[inline(always)]
    pub fn put_pred(&mut self, d: Reg, mask: u32, v: u32) {
        if let Reg::P(i) = d {
            let i = i as usize;
            self.p_written[i] |= mask;
            self.p[i] = self.p[i] & !mask | v & mask;
        }
    }

    /// Lanes of `mask` in which `s` was never written.
    #[inline(always)]
    pub fn unwritten(&self, s: Reg, mask: u32) -> u32 {
        mask & !match s {
            Reg::R(i) => self.r_written[i as usize],
            Reg::D(i) => self.d_written[i as usize],
            Reg::P(i) | Reg::NotP(i) => self.p_written[i as usize],
            Reg::None => !0,
        }
    }
}

#[inline(always)]
fn blend<T: Copy>(row: &mut [T; LANES], mask: u32, v: &[T; LANES]) {
    if mask == !0 {
        *row = *v;
    } else {
        for l in 0..LANES {
            row[l] = if mask >> l & 1 != 0 { v[l] } else { row[l] };
        }
    }
}

/// Which file an immediate of a type goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    W32,
    W64,
    Bit,
}

/// A type that operations are written in.
pub trait Lane: Copy + Default {
    const WIDTH: Width;
    fn get(r: &Regs, s: Reg) -> [Self; LANES];
    fn put(r: &mut Regs, d: Reg, mask: u32, v: &[Self; LANES]);
    /// The same, out of line: rows that are seldom used shall cost little to compile.
    #[inline(never)]
    fn get_rare(r: &Regs, s: Reg) -> [Self; LANES] {
        Self::get(r, s)
    }
    #[inline(never)]
    fn put_rare(r: &mut Regs, d: Reg, mask: u32, v: &[Self; LANES]) {
        Self::put(r, d, mask, v)
    }
}

impl Lane for u32 {
    const WIDTH: Width = Width::W32;
    #[inline(always)]
    fn get(r: &Regs, s: Reg) -> V {
        r.get32(s)
    }
    #[inline(always)]
    fn put(r: &mut Regs, d: Reg, mask: u32, v: &V) {
        r.put32(d, mask, v)
    }
}

impl Lane for u64 {
    const WIDTH: Width = Width::W64;
    #[inline(always)]
    fn get(r: &Regs, s: Reg) -> W {
        r.get64(s)
    }
    #[inline(always)]
    fn put(r: &mut Regs, d: Reg, mask: u32, v: &W) {
        r.put64(d, mask, v)
    }
}

/// Lanes that are 32 bits seen as something else.
macro_rules! lane32 {
    ($t:ty, $from:expr, $to:expr) => {
        impl Lane for $t {
            const WIDTH: Width = Width::W32;
            #[inline(always)]
            fn get(r: &Regs, s: Reg) -> [Self; LANES] {
                r.get32(s).map($from)
            }
            #[inline(always)]
            fn put(r: &mut Regs, d: Reg, mask: u32, v: &[Self; LANES]) {
                r.put32(d, mask, &v.map($to))
            }
        }
    };
}

/// A float32 whose subnormals are zero, read and written (`.ftz`).
#[derive(Clone, Copy, Default)]
pub struct Ftz(pub f32);

/// Bits of a float32 result: every NaN is 0x7fffffff.
#[inline(always)]
fn bits(v: f32) -> u32 {
    if v.is_nan() { CANONICAL_NAN } else { v.to_bits() }
}

lane32!(i32, |v| v as i32, |v| v as u32);
lane32!(f32, f32::from_bits, bits);
lane32!(Ftz, |v| Ftz(f32::from_bits(flush(v))), |v| flush(bits(v.0)));
lane32!(u16, |v| v as u16, u32::from);
lane32!(i16, |v| v as i16, |v| u32::from(v as u16));

macro_rules! lane64 {
    ($t:ty, $from:expr, $to:expr) => {
        impl Lane for $t {
            const WIDTH: Width = Width::W64;
            #[inline(always)]
            fn get(r: &Regs, s: Reg) -> [Self; LANES] {
                r.get64(s).map($from)
            }
            #[inline(always)]
            fn put(r: &mut Regs, d: Reg, mask: u32, v: &[Self; LANES]) {
                r.put64(d, mask, &v.map($to))
            }
        }
    };
}
lane64!(i64, |v| v as i64, |v| v as u64);
lane64!(f64, f64::from_bits, f64::to_bits);

impl Lane for bool {
    const WIDTH: Width = Width::Bit;
    #[inline(always)]
    fn get(r: &Regs, s: Reg) -> [Self; LANES] {
        let p = r.pred(s);
        std::array::from_fn(|l| p >> l & 1 != 0)
    }
    #[inline(always)]
    fn put(r: &mut Regs, d: Reg, mask: u32, v: &[Self; LANES]) {
        r.put_pred(d, mask, gather(v))
    }
}

/// A bit a lane.
#[inline(always)]
pub fn gather(v: &[bool; LANES]) -> u32 {
    let mut bits = 0;
    for (l, &b) in v.iter().enumerate() {
        bits |= u32::from(b) << l;
    }
    bits
}

/// A row of the table of operations: what runs, and the widths of its sources.
#[derive(Clone, Copy)]
pub struct Row {
    pub run: Run,
    pub sources: &'static [Width],
    pub result: Width,
}

/// What a row of the table does.
#[derive(Clone, Copy)]
pub enum Run {
    Lanes(Kern),
    Compare(Compare),
}

/// Picks between two versions of a function by the processor.
macro_rules! versions {
    ($wrap:ident, $plain:ident, $fast:ident) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if $crate::exec::regs::wide_rows() {
                // SAFETY: the processor was just asked for what `fast` needs.
                unsafe { $crate::exec::regs::$wrap::new($fast) }
            } else {
                // SAFETY: needs nothing of the processor.
                unsafe { $crate::exec::regs::$wrap::new($plain) }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: needs nothing of the processor.
        unsafe {
            $crate::exec::regs::$wrap::new($plain)
        }
    }};
}

/// `kern!((u32, u32) -> u32, |a, b| a.wrapping_add(b))`: a row of the table.
macro_rules! kern {
    (($($t:ty),+) -> $o:ty, |$($a:ident),+| $e:expr) => {{
        use $crate::exec::regs::{LANES, Lane, Regs};
        #[inline(always)]
        #[allow(unused_assignments)]
        fn body(r: &mut Regs, i: &$crate::ir::Inst, mask: u32) {
            let mut n = 0;
            $(
                let $a = <$t as Lane>::get(r, i.src[n]);
                n += 1;
            )+
            let mut out = [<$o>::default(); LANES];
            for l in 0..LANES {
                $(let $a = $a[l];)+
                out[l] = $e;
            }
            <$o as Lane>::put(r, i.dst[0], mask, &out);
        }
        fn plain(r: &mut Regs, i: &$crate::ir::Inst, mask: u32) {
            body(r, i, mask)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn fast(r: &mut Regs, i: &$crate::ir::Inst, mask: u32) {
            body(r, i, mask)
        }
        $crate::exec::regs::Row {
            run: $crate::exec::regs::Run::Lanes($crate::exec::regs::versions!(Kern, plain, fast)),
            sources: &[$(<$t as Lane>::WIDTH),+],
            result: <$o as Lane>::WIDTH,
        }
    }};
}

/// The same for rows that are seldom used: one version, nothing inlined.
macro_rules! rare {
    (($($t:ty),+) -> $o:ty, |$($a:ident),+| $e:expr) => {{
        use $crate::exec::regs::{Lane, Regs};
        #[allow(unused_assignments)]
        fn plain(r: &mut Regs, i: &$crate::ir::Inst, mask: u32) {
            let mut n = 0;
            $(
                let $a = <$t as Lane>::get_rare(r, i.src[n]);
                n += 1;
            )+
            let out: [$o; $crate::exec::regs::LANES] = std::array::from_fn(|l| {
                $(let $a = $a[l];)+
                $e
            });
            <$o as Lane>::put_rare(r, i.dst[0], mask, &out);
        }
        $crate::exec::regs::Row {
            // SAFETY: needs nothing of the processor.
            run: $crate::exec::regs::Run::Lanes(unsafe { $crate::exec::regs::Kern::new(plain) }),
            sources: &[$(<$t as Lane>::WIDTH),+],
            result: <$o as Lane>::WIDTH,
        }
    }};
}

/// `compare!(i32, |a, b| a < b)`.
macro_rules! compare {
    ($t:ty, |$a:ident, $b:ident| $e:expr) => {{
        use $crate::exec::regs::{LANES, Lane, Regs};
        #[inline(always)]
        fn body(r: &Regs, i: &$crate::ir::Inst) -> u32 {
            let (a, b) = (<$t as Lane>::get(r, i.src[0]), <$t as Lane>::get(r, i.src[1]));
            let mut out = [false; LANES];
            for l in 0..LANES {
                let ($a, $b) = (a[l], b[l]);
                out[l] = $e;
            }
            $crate::exec::regs::gather(&out)
        }
        fn plain(r: &Regs, i: &$crate::ir::Inst) -> u32 {
            body(r, i)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn fast(r: &Regs, i: &$crate::ir::Inst) -> u32 {
            body(r, i)
        }
        $crate::exec::regs::Row {
            run: $crate::exec::regs::Run::Compare($crate::exec::regs::versions!(Compare, plain, fast)),
            sources: &[<$t as Lane>::WIDTH, <$t as Lane>::WIDTH, $crate::exec::regs::Width::Bit],
            result: $crate::exec::regs::Width::Bit,
        }
    }};
}
/// The same, one version.
macro_rules! compare_rare {
    ($t:ty, |$a:ident, $b:ident| $e:expr) => {{
        use $crate::exec::regs::{LANES, Lane, Regs};
        fn plain(r: &Regs, i: &$crate::ir::Inst) -> u32 {
            let (a, b) = (<$t as Lane>::get_rare(r, i.src[0]), <$t as Lane>::get_rare(r, i.src[1]));
            let out: [bool; LANES] = std::array::from_fn(|l| {
                let ($a, $b) = (a[l], b[l]);
                $e
            });
            $crate::exec::regs::gather(&out)
        }
        $crate::exec::regs::Row {
            // SAFETY: needs nothing of the processor.
            run: $crate::exec::regs::Run::Compare(unsafe { $crate::exec::regs::Compare::new(plain) }),
            sources: &[<$t as Lane>::WIDTH, <$t as Lane>::WIDTH, $crate::exec::regs::Width::Bit],
            result: $crate::exec::regs::Width::Bit,
        }
    }};
}
pub(crate) use {compare, compare_rare, kern, rare, versions};
