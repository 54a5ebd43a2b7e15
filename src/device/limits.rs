/*!
What a device of a named target allows a kernel, known without the device.

A table, not a question to a driver: whether a kernel fits an RTX PRO 6000 is decided on a machine that has none.
*/

use crate::nvrtc::{Resources, Target};
use serde::Serialize;
use std::fmt;

/// Limits of a launch and of a multiprocessor. Bytes and 32-bit registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Ten times the compute capability.
    pub number: u32,
    /// Shared memory of a multiprocessor.
    pub shared_per_sm: u32,
    /// Most shared memory of a block, static and dynamic together, where the kernel opted in.
    pub shared_per_block: u32,
    /// Most shared memory of a block that did not opt in.
    pub shared_per_block_default: u32,
    /// Shared memory that the system takes for each block beside the block's own.
    pub shared_reserved: u32,
    /// Threads of a block.
    pub threads_per_block: u32,
    /// Threads that may live on a multiprocessor.
    pub threads_per_sm: u32,
    /// Registers of a thread.
    pub registers_per_thread: u32,
    /// Registers of a multiprocessor, and of a block.
    pub registers_per_sm: u32,
}

const KIB: u32 = 1024;

/// The columns in which targets differ: number, KiB of shared memory of a multiprocessor and of a block, threads of a
/// multiprocessor.
const fn row(number: u32, shared_per_sm: u32, shared_per_block: u32, threads_per_sm: u32) -> Limits {
    Limits {
        number,
        shared_per_sm: shared_per_sm * KIB,
        shared_per_block: shared_per_block * KIB,
        // The same for all of them. CUDA Programming Guide, "Compute Capabilities", tables of technical specifications
        // and of memory per compute capability: 48 KiB without opting in, 1,024 threads of a block, 255 registers of a
        // thread, 64 Ki registers of a multiprocessor and of a block. 1 KiB reserved for each block from 8.0 on: the
        // same guide, and the difference of the two columns here.
        shared_per_block_default: 48 * KIB,
        shared_reserved: KIB,
        threads_per_block: 1024,
        threads_per_sm,
        registers_per_thread: Limits::REGISTERS_PER_THREAD,
        registers_per_sm: 64 * KIB,
    }
}

/// CUDA Programming Guide, "Compute Capabilities", tables of technical specifications and of memory: shared memory of a
/// multiprocessor and most of a thread block, resident threads of a multiprocessor.
const TABLE: [Limits; 7] = [
    row(80, 164, 163, 2048),
    row(89, 100, 99, 1536),
    // Also read on an H200 through the driver's attributes: 233,472 bytes, 232,448 by opting in, 49,152 without,
    // 65,536 registers, 2,048 threads.
    row(90, 228, 227, 2048),
    row(100, 228, 227, 2048),
    row(103, 228, 227, 2048),
    // 101,376 bytes by opting in is also what the driver's attribute is reported to be on RTX 50 devices.
    row(120, 100, 99, 1536),
    // The guide has one column for all of 12.x.
    row(121, 100, 99, 1536),
];

impl Limits {
    /// Registers that a thread of any target may have (the same guide); a driver has no answer for it.
    pub const REGISTERS_PER_THREAD: u32 = 255;

    /// Numbers of the targets that are known.
    pub fn known() -> impl Iterator<Item = u32> {
        TABLE.iter().map(|l| l.number)
    }

    /// Of a target; none where the table lacks it. Suffixes and PTX only do not matter.
    pub fn of(target: Target) -> Option<Limits> {
        TABLE.into_iter().find(|l| l.number == target.number)
    }

    /// What keeps a kernel from being launched with so many threads of a block and bytes of dynamic shared memory.
    pub fn exceeded(&self, kernel: &Resources, threads: u32, dynamic_shared: u32) -> Vec<Excess> {
        let shared = u64::from(kernel.static_shared_bytes) + u64::from(dynamic_shared);
        // Registers are given to whole warps, 256 at a time.
        let warps = u64::from(threads.div_ceil(32));
        let registers = warps * (u64::from(kernel.registers) * 32).next_multiple_of(256);
        let bound = kernel.threads_bound.unwrap_or(self.threads_per_block);
        let rows = [
            ("threads of a block", u64::from(threads), u64::from(self.threads_per_block)),
            ("threads of a block, by the kernel's __launch_bounds__,", u64::from(threads), u64::from(bound)),
            ("bytes of shared memory of a block", shared, u64::from(self.shared_per_block)),
            ("registers of a thread", u64::from(kernel.registers), u64::from(self.registers_per_thread)),
            ("registers of a block", registers, u64::from(self.registers_per_sm)),
        ];
        let over = rows.into_iter().filter(|&(_, asked, allowed)| asked > allowed);
        over.map(|(what, asked, allowed)| Excess { what, asked, allowed }).collect()
    }
}

/// A limit that is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// Of what.
    pub what: &'static str,
    /// How much is asked for.
    pub asked: u64,
    /// How much there is.
    pub allowed: u64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} where {} are allowed", self.asked, self.what, self.allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(registers: u32, shared: u32, bound: Option<u32>) -> Resources {
        Resources {
            kernel: "k".into(),
            registers,
            frame_bytes: 0,
            spill_store_bytes: Some(0),
            spill_load_bytes: Some(0),
            static_shared_bytes: shared,
            threads_bound: bound,
            parameters: Vec::new(),
            parameter_bytes: 0,
            code_bytes: 0,
        }
    }

    /// Figures read on an H200 through the driver, and the one that is reported for sm_120.
    #[test]
    fn the_table_has_what_devices_answer() {
        let h200 = Limits::of("sm_90a".parse().unwrap()).unwrap();
        assert_eq!((h200.shared_per_sm, h200.shared_per_block), (233_472, 232_448));
        assert_eq!((h200.shared_per_block_default, h200.registers_per_sm), (49_152, 65_536));
        assert_eq!(h200.threads_per_sm, 2048);
        assert_eq!(Limits::of(Target::compute(120)).unwrap().shared_per_block, 101_376);
        assert_eq!(Limits::of(Target::sm(75)), None);
        for limits in TABLE {
            assert_eq!(limits.shared_per_sm, limits.shared_per_block + limits.shared_reserved);
        }
    }

    #[test]
    fn each_limit_is_met_and_passed_by_one() {
        let l = Limits::of(Target::sm(120)).unwrap();
        assert_eq!(l.exceeded(&kernel(64, 1024, Some(1024)), 1024, 101_376 - 1024), []);
        let over = |k: Resources, threads, shared| {
            l.exceeded(&k, threads, shared).iter().map(Excess::to_string).collect::<Vec<_>>().join("; ")
        };
        let shared = over(kernel(64, 1024, None), 128, 101_377 - 1024);
        assert_eq!(shared, "101377 bytes of shared memory of a block where 101376 are allowed");
        assert!(over(kernel(32, 0, None), 1025, 0).starts_with("1025 threads of a block where 1024"));
        assert!(over(kernel(32, 0, Some(128)), 129, 0).contains("__launch_bounds__, where 128"));
        // 65 registers of 32 threads are 2,080, given out as 2,304; 32 warps take 73,728.
        assert_eq!(over(kernel(65, 0, None), 1024, 0), "73728 registers of a block where 65536 are allowed");
        assert!(over(kernel(256, 0, None), 32, 0).starts_with("256 registers of a thread"));
        assert!(over(kernel(8, 0, None), 32, u32::MAX).contains("4294967295 bytes"));
    }
}
