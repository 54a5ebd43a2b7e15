/*! Memory that outlives a launch ([`global`]) and the windows of the generic address space. */

pub mod global;

/// Windows of the generic address space are 2^40 bytes wide.
pub const WINDOW_BITS: u32 = 40;
/// Generic address of the block's shared memory.
pub const SHARED: u64 = 1 << WINDOW_BITS;
/// Generic address of a thread's local memory.
pub const LOCAL: u64 = 2 << WINDOW_BITS;
/// Address of the module's own variables.
pub const MODULE: u64 = 8 << WINDOW_BITS;
/// Window of the first allocation.
pub const FIRST: u64 = 16;

/// The place within a window.
pub const fn within(address: u64) -> u64 {
    address & ((1 << WINDOW_BITS) - 1)
}
