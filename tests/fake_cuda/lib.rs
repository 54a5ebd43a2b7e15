//! A libcuda without a GPU, for tests of what the program makes of a driver's answers: memory is the host's, and kernels
//! are functions here, by the names that fixtures/device/probe.cu has them by. Compiled by the tests that need it.
//!
//! `FAKE_CUDA` says how it behaves: `stub` and `none` at cuInit; anything else is an H200. `engine` knows kernels of every
//! name, and those that are no functions here do nothing. `fault:NAME` and `hang:NAME` are that, but a launch of NAME reads
//! where nothing is, or never ends; `fault:NAME:FILE` only where FILE is not, and makes it. `bare` is `engine`, and refuses to
//! fill memory.
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};

/// What sticks: an error that every call answers from then on.
static FAULT: AtomicU32 = AtomicU32::new(0);
static HUNG: AtomicBool = AtomicBool::new(false);
static LAST: AtomicUsize = AtomicUsize::new(0);
static NAMES: Mutex<Vec<&str>> = Mutex::new(Vec::new());
static SHARED: AtomicUsize = AtomicUsize::new(49_152);

fn mode() -> String {
    std::env::var("FAKE_CUDA").unwrap_or_default()
}
/// Whether kernels of any name are known.
fn knows_all() -> bool {
    let mode = mode();
    ["engine", "bare"].contains(&mode.as_str()) || mode.starts_with("fault:") || mode.starts_with("hang:")
}
/// What a launch of a kernel that is no function here does.
fn strike(kernel: &str) {
    let mode = mode();
    let mut parts = mode.splitn(3, ':');
    let (what, name, file) = (parts.next(), parts.next(), parts.next());
    if name != Some(kernel) {
        return;
    }
    match (what, file) {
        (Some("hang"), _) => HUNG.store(true, SeqCst),
        (Some("fault"), Some(file)) if std::path::Path::new(file).exists() => {}
        (Some("fault"), file) => {
            if let Some(file) = file {
                let _ = std::fs::write(file, kernel);
            }
            FAULT.store(700, SeqCst);
        }
        _ => {}
    }
}

/// A call that would wait for a kernel that hangs waits for ever.
fn waits() -> c_uint {
    while HUNG.load(SeqCst) {
        std::thread::park();
    }
    FAULT.load(SeqCst)
}
fn now() -> c_uint {
    FAULT.load(SeqCst)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> c_uint {
    match std::env::var("FAKE_CUDA").as_deref() {
        Ok("stub") => 34,
        Ok("none") => 100,
        _ => 0,
    }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(v: *mut c_int) -> c_uint {
    unsafe { *v = 13_000 };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(e: c_uint, text: *mut *const c_char) -> c_uint {
    let name = match e {
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => c"CUDA_ERROR_OTHER",
    };
    unsafe { *text = name.as_ptr() };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_: c_uint, text: *mut *const c_char) -> c_uint {
    unsafe { *text = c"a text".as_ptr() };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(n: *mut c_int) -> c_uint {
    unsafe { *n = 1 };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_uint {
    unsafe { *device = ordinal };
    if ordinal == 0 { 0 } else { 101 }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, _: c_int, _: c_int) -> c_uint {
    let text = c"Fake H200\x1b".to_bytes_with_nul();
    unsafe { std::ptr::copy(text.as_ptr(), name.cast(), text.len()) };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _: c_int) -> c_uint {
    let answer = match attribute {
        1 => 1024,
        8 => 49_152,
        12 | 82 => 65_536,
        16 => 132,
        39 => 2048,
        75 => 9,
        76 => 0,
        81 => 233_472,
        97 => 232_448,
        111 => 1024,
        _ => return 1,
    };
    unsafe { *value = answer };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> c_uint {
    unsafe { *bytes = 139 << 30 };
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _: c_int) -> c_uint {
    unsafe { *context = 8 };
    now()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> c_uint {
    waits()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_: usize) -> c_uint {
    0
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_uint {
    unsafe { (*free, *total) = (138 << 30, 139 << 30) };
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_uint {
    if now() != 0 {
        return now();
    }
    if bytes > 1 << 32 {
        return 2;
    }
    // 512 bytes aligned, and with what another program had there.
    let memory = vec![0x5au64; bytes / 8 + 65].leak();
    unsafe { *address = (memory.as_ptr() as u64).next_multiple_of(512) };
    0
}
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(_: u64) -> c_uint {
    waits()
}
unsafe fn set<T: Copy>(at: u64, value: T, n: usize) -> c_uint {
    if mode() == "bare" {
        return 1;
    }
    if now() == 0 {
        unsafe { std::slice::from_raw_parts_mut(at as *mut T, n) }.fill(value);
    }
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(at: u64, value: u8, n: usize) -> c_uint {
    unsafe { set(at, value, n) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD16_v2(at: u64, value: u16, n: usize) -> c_uint {
    unsafe { set(at, value, n) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32_v2(at: u64, value: u32, n: usize) -> c_uint {
    unsafe { set(at, value, n) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(at: u64, from: *const u8, n: usize) -> c_uint {
    if waits() == 0 {
        unsafe { std::ptr::copy(from, at as *mut u8, n) };
    }
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(into: *mut u8, at: u64, n: usize) -> c_uint {
    if waits() == 0 {
        unsafe { std::ptr::copy(at as *const u8, into, n) };
    }
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(into: u64, at: u64, n: usize, _: usize) -> c_uint {
    if now() == 0 {
        unsafe { std::ptr::copy(at as *const u8, into as *mut u8, n) };
    }
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut usize, _: *const c_void) -> c_uint {
    unsafe { *module = 16 };
    now()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_: usize) -> c_uint {
    waits()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(f: *mut usize, _: usize, name: *const c_char) -> c_uint {
    let known = ["copy", "take_each", "take_struct", "reverse", "place", "poke", "stray", "hang", "spin"];
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let found = known.into_iter().find(|k| k.as_bytes() == name);
    let any = || knows_all().then(|| &*String::from_utf8_lossy(name).into_owned().leak());
    let Some(found) = found.or_else(any) else { return 500 };
    let Ok(mut names) = NAMES.lock() else { return 999 };
    names.push(found);
    unsafe { *f = names.len() };
    now()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_: usize, attribute: c_uint, value: c_int) -> c_uint {
    if attribute != 8 || value > 232_448 {
        return 1;
    }
    SHARED.store(value as usize, SeqCst);
    now()
}
/// The parameter `i` of type T.
unsafe fn parameter<T: Copy>(parameters: *const *const c_void, i: usize) -> T {
    unsafe { (*parameters.add(i)).cast::<T>().read_unaligned() }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    f: usize,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    _: usize,
    p: *const *const c_void,
    extra: *const c_void,
) -> c_uint {
    if shared as usize > SHARED.load(SeqCst) || !extra.is_null() {
        return 1;
    }
    let name = match NAMES.lock() {
        Ok(names) => names.get(f.wrapping_sub(1)).copied().unwrap_or(""),
        Err(_) => "",
    };
    let threads = (bx * by * bz) as usize;
    unsafe {
        let words = |i| parameter::<u64>(p, i) as *mut u32;
        match name {
            "copy" => {
                let n = (parameter::<u32>(p, 2) as usize).min((gx * gy * gz) as usize * threads);
                std::ptr::copy(words(0), words(1), n);
            }
            "take_each" | "take_struct" => {
                let one = *p;
                let offsets = [0, 8, 16, 24, 32, 40, 48, 56, 64];
                let at = |i: usize| {
                    if name == "take_each" { *p.add(i) } else { one.byte_add(offsets[i]) }.cast::<u8>()
                };
                let (a, b, c) = (at(0).cast::<u32>(), at(1).cast::<u64>(), at(2).cast::<i32>());
                let (d, e, f) = (at(3).cast::<u64>(), at(4).cast::<u32>(), at(5).cast::<u64>());
                let input = *at(6).cast::<u64>().cast::<*const u32>();
                let last = if name == "take_each" { bx } else { at(8).cast::<u32>().read_unaligned() };
                let out = at(7).cast::<*mut u64>().read_unaligned();
                let bits = [
                    u64::from(a.read_unaligned()),
                    b.read_unaligned(),
                    i64::from(c.read_unaligned()) as u64,
                    d.read_unaligned(),
                    u64::from(e.read_unaligned()),
                    f.read_unaligned(),
                    u64::from(*input),
                    u64::from(last),
                ];
                for (i, v) in bits.into_iter().enumerate() {
                    *out.add(i) = v;
                }
            }
            "reverse" => {
                let n = parameter::<u32>(p, 2) as usize;
                for i in 0..n {
                    *words(1).add(i) = *words(0).add(n - 1 - i);
                }
            }
            "place" => {
                for block in 0..(gx * gy * gz) as usize {
                    for thread in 0..threads {
                        *words(0).add(block * threads + thread) = (block << 16 | thread) as u32;
                    }
                }
            }
            "poke" => {
                *words(0).cast::<u8>().offset(parameter::<i64>(p, 1) as isize) = parameter::<u32>(p, 2) as u8
            }
            "stray" => FAULT.store(700, SeqCst),
            "hang" => HUNG.store(true, SeqCst),
            "spin" => {
                LAST.fetch_add(parameter::<u32>(p, 1) as usize, SeqCst);
            }
            other if knows_all() => strike(other),
            _ => return 500,
        }
    }
    0 // what breaks shows at the next call
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut usize, _: c_uint) -> c_uint {
    unsafe { *event = Box::leak(Box::new(0)) };
    now()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(_: usize) -> c_uint {
    now()
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut usize, _: usize) -> c_uint {
    unsafe { *event = LAST.fetch_add(1, SeqCst) };
    now()
}
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(_: usize) -> c_uint {
    if HUNG.load(SeqCst) { 600 } else { now() }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(ms: *mut f32, from: *const usize, to: *const usize) -> c_uint {
    unsafe { *ms = *to as f32 - *from as f32 };
    now()
}
