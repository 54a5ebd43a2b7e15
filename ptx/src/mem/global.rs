/*!
Global memory: every allocation has an address window of its own, so that a stray pointer is out of bounds and never
in a neighbour. Guard bands are therefore implied.

Each byte knows whether anybody wrote it, and whether the running launch did; each pair of bytes, which block wrote
it. Blocks run in parallel, so cells are relaxed atomics.
*/

use super::{FIRST, MODULE, WINDOW_BITS, within};
use crate::error::MemoryError;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Bytes that one allocation may have.
const MOST: u64 = 1 << 36;
/// What memory holds that nobody wrote.
const STALE: u32 = 0xcdcd_cdcd;

/// Where an allocation begins, as kernels see it.
pub type Address = u64;

/// Why an access can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// In no allocation.
    Nowhere,
    /// Beyond the end of one with so many bytes.
    Beyond(u64),
    Misaligned,
    ReadOnly,
}

/// What a write met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    Nothing,
    /// Bytes that this other block wrote in this launch.
    Block(u32),
}

/// One allocation.
#[derive(Debug, Default)]
pub struct Allocation {
    size: u64,
    words: Vec<AtomicU32>,
    /// A nibble of bytes ever written, above it a nibble of bytes written by this launch.
    state: Vec<AtomicU8>,
    /// Every byte is initialised; set between launches only.
    whole: bool,
    read_only: bool,
    /// Block + 1 that wrote each pair of bytes in this launch.
    writers: OnceLock<Vec<AtomicU32>>,
}

impl Allocation {
    fn new(size: u64) -> Self {
        let n = size.div_ceil(4) as usize;
        Allocation {
            size,
            words: (0..n).map(|_| AtomicU32::new(STALE)).collect(),
            state: (0..n).map(|_| AtomicU8::new(0)).collect(),
            ..Default::default()
        }
    }

    /// One that holds `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut a = Self::new(bytes.len() as u64);
        a.put(0, bytes);
        a.whole = true;
        a
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        let mut i = 0;
        while i < bytes.len() {
            let place = at + i;
            let (w, b) = (place / 4, place % 4);
            let n = (4 - b).min(bytes.len() - i);
            let word = self.words[w].get_mut();
            let mut raw = word.to_le_bytes();
            raw[b..b + n].copy_from_slice(&bytes[i..i + n]);
            *word = u32::from_le_bytes(raw);
            *self.state[w].get_mut() |= ((1u8 << n) - 1) << b;
            i += n;
        }
    }

    fn start_launch(&mut self) {
        self.writers = OnceLock::new();
        let full = self.size % 4;
        let mut whole = true;
        let last = self.state.len().saturating_sub(1);
        for (i, s) in self.state.iter_mut().enumerate() {
            let s = s.get_mut();
            *s &= 0x0f;
            let want = if i == last && full != 0 { (1 << full) - 1 } else { 0x0f };
            whole &= *s & want == want;
        }
        self.whole = whole;
    }

    fn check(&self, at: u64, n: u32) -> Result<usize, Fault> {
        if at + u64::from(n) > self.size {
            return Err(Fault::Beyond(self.size));
        }
        if at & u64::from(n - 1) != 0 {
            return Err(Fault::Misaligned);
        }
        Ok(at as usize)
    }

    /// `n` bytes (a power of two, at most 16) at `at`; whether all were initialised.
    #[inline]
    fn read(&self, at: usize, n: usize, out: &mut [u8; 16]) -> bool {
        if n < 4 {
            let (w, b) = (at / 4, at % 4);
            let raw = (self.words[w].load(Relaxed) >> (8 * b)).to_le_bytes();
            out[..n].copy_from_slice(&raw[..n]);
            let need = ((1u8 << n) - 1) << b;
            return self.whole || self.state[w].load(Relaxed) & need == need;
        }
        let mut all = 0x0f;
        for (k, w) in (at / 4..(at + n) / 4).enumerate() {
            out[4 * k..4 * k + 4].copy_from_slice(&self.words[w].load(Relaxed).to_le_bytes());
            if !self.whole {
                all &= self.state[w].load(Relaxed);
            }
        }
        all & 0x0f == 0x0f
    }

    #[inline]
    fn write(&self, at: usize, n: usize, v: &[u8], block: u32, watch: bool) -> Met {
        if n < 4 {
            let (w, b) = (at / 4, at % 4);
            let mask = ((1u64 << (8 * n)) - 1) as u32;
            let mut raw = [0; 4];
            raw[..n].copy_from_slice(&v[..n]);
            let value = u32::from_le_bytes(raw) << (8 * b);
            let _ = self.words[w].fetch_update(Relaxed, Relaxed, |o| Some(o & !(mask << (8 * b)) | value));
            let s = ((1u8 << n) - 1) << b;
            self.state[w].fetch_or(s | s << 4, Relaxed);
        } else {
            for (k, w) in (at / 4..(at + n) / 4).enumerate() {
                let raw = [v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]];
                self.words[w].store(u32::from_le_bytes(raw), Relaxed);
                self.state[w].store(0xff, Relaxed);
            }
        }
        if !watch || n < 2 {
            return Met::Nothing;
        }
        let writers =
            self.writers.get_or_init(|| (0..self.words.len() * 2).map(|_| AtomicU32::new(0)).collect());
        let mut met = Met::Nothing;
        for p in &writers[at / 2..(at + n) / 2] {
            let before = p.swap(block + 1, Relaxed);
            if before != 0 && before != block + 1 {
                met = Met::Block(before - 1);
            }
        }
        met
    }
}

/// Memory of a device, kept from launch to launch.
#[derive(Debug, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    lock: Mutex<()>,
}

impl Memory {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// `bytes` bytes that nobody has written. The address is the start of a window of its own.
    pub fn alloc(&mut self, bytes: u64) -> Result<Address, MemoryError> {
        if bytes > MOST {
            return Err(MemoryError::Size { bytes, most: MOST });
        }
        self.allocations.push(Allocation::new(bytes));
        Ok((FIRST + self.allocations.len() as u64 - 1) << WINDOW_BITS)
    }

    /// An allocation that holds `bytes`.
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Result<Address, MemoryError> {
        let a = self.alloc(bytes.len() as u64)?;
        self.write(a, bytes)?;
        Ok(a)
    }

    fn index(&self, address: Address) -> Result<usize, MemoryError> {
        let i = (address >> WINDOW_BITS).wrapping_sub(FIRST) as usize;
        if i < self.allocations.len() { Ok(i) } else { Err(MemoryError::NoAllocation { address }) }
    }

    fn range(&self, address: Address, bytes: u64) -> Result<(usize, usize), MemoryError> {
        let (i, offset) = (self.index(address)?, within(address));
        let size = self.allocations[i].size;
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(MemoryError::Bounds { offset, bytes, size });
        }
        Ok((i, offset as usize))
    }

    /// Bytes of the allocation that holds `address`.
    pub fn size(&self, address: Address) -> Result<u64, MemoryError> {
        Ok(self.allocations[self.index(address)?].size)
    }

    /// Gives an allocation's memory back. Its window stays empty: whoever still uses an address of it is out of bounds.
    pub fn free(&mut self, address: Address) -> Result<(), MemoryError> {
        let i = self.index(address)?;
        self.allocations[i] = Allocation::default();
        Ok(())
    }

    /// Where the allocation begins in whose window an address lies; `None` where there is none. For naming what a
    /// finding's address belongs to.
    pub fn start(&self, address: Address) -> Option<Address> {
        self.index(address).ok().map(|_| address - within(address))
    }

    /// From the host. The bytes count as initialised.
    pub fn write(&mut self, address: Address, bytes: &[u8]) -> Result<(), MemoryError> {
        let (i, at) = self.range(address, bytes.len() as u64)?;
        self.allocations[i].put(at, bytes);
        Ok(())
    }

    /// To the host, initialised or not.
    pub fn read(&self, address: Address, out: &mut [u8]) -> Result<(), MemoryError> {
        let (i, at) = self.range(address, out.len() as u64)?;
        for (k, o) in out.iter_mut().enumerate() {
            let p = at + k;
            *o = (self.allocations[i].words[p / 4].load(Relaxed) >> (8 * (p % 4))) as u8;
        }
        Ok(())
    }

    /// The same bytes count as never written from here on; what they hold stays.
    pub fn mark_uninitialised(&mut self, address: Address, bytes: u64) -> Result<(), MemoryError> {
        let (i, at) = self.range(address, bytes)?;
        for p in at..at + bytes as usize {
            *self.allocations[i].state[p / 4].get_mut() &= !(1 << (p % 4));
        }
        self.allocations[i].whole = false;
        Ok(())
    }

    /// Kernels may read this allocation only; a write is a finding and is not made.
    pub fn protect(&mut self, address: Address, read_only: bool) -> Result<(), MemoryError> {
        let i = self.index(address)?;
        self.allocations[i].read_only = read_only;
        Ok(())
    }

    /// Bytes of the allocation that nobody has written.
    pub fn uninitialised(&self, address: Address) -> Result<u64, MemoryError> {
        Ok(self.count_clear(self.index(address)?, 0).0)
    }

    /// Bytes of an allocation that the last launch did not store, and the first of them.
    pub(crate) fn unstored(&self, address: Address) -> Result<(u64, u64), MemoryError> {
        Ok(self.count_clear(self.index(address)?, 4))
    }

    fn count_clear(&self, i: usize, shift: u32) -> (u64, u64) {
        let a = &self.allocations[i];
        let (mut n, mut first) = (0, u64::MAX);
        for p in 0..a.size {
            if a.state[p as usize / 4].load(Relaxed) >> (shift + p as u32 % 4) & 1 == 0 {
                n += 1;
                first = first.min(p);
            }
        }
        (n, first)
    }

    pub(crate) fn start_launch(&mut self) {
        self.allocations.iter_mut().for_each(Allocation::start_launch);
    }
}

/// What a launch sees: the allocations and the module's variables.
pub struct View<'m> {
    pub memory: &'m Memory,
    pub module: &'m Allocation,
}

impl View<'_> {
    fn at(&self, address: u64, n: u32) -> Result<(&Allocation, usize), Fault> {
        let a = if address >> WINDOW_BITS == MODULE >> WINDOW_BITS {
            self.module
        } else {
            self.memory.index(address).ok().map(|i| &self.memory.allocations[i]).ok_or(Fault::Nowhere)?
        };
        Ok((a, a.check(within(address), n)?))
    }

    /// `n` bytes (1, 2, 4, 8 or 16); whether all were initialised.
    #[inline]
    pub fn read(&self, address: u64, n: u32, out: &mut [u8; 16]) -> Result<bool, Fault> {
        let (a, at) = self.at(address, n)?;
        Ok(a.read(at, n as usize, out))
    }

    /// Stores `n` bytes (1, 2, 4, 8 or 16) for `block`.
    #[inline]
    pub fn write(&self, address: u64, n: u32, v: &[u8], block: u32, watch: bool) -> Result<Met, Fault> {
        let (a, at) = self.at(address, n)?;
        if a.read_only {
            return Err(Fault::ReadOnly);
        }
        Ok(a.write(at, n as usize, v, block, watch))
    }

    /// Held while an atomic reads and writes.
    pub fn atomic(&self) -> MutexGuard<'_, ()> {
        self.memory.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
