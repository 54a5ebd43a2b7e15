//! An allocator that counts what each thread holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread holds, and the most it has held.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, counting.
pub struct Counting;

fn count(bytes: isize) {
    let (now, most) = HELD.get();
    HELD.set((now + bytes, most.max(now + bytes)));
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The result of some work, and the most memory that it held at a time.
pub fn memory<T>(work: impl FnOnce() -> T) -> (T, isize) {
    let before = HELD.get().0;
    HELD.set((before, before));
    let result = work();
    (result, HELD.get().1 - before)
}
