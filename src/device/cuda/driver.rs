/*!
The driver's library: the only `unsafe` of the device.

cudarc opens libcuda at its first call and panics where the library or a function is missing. So [`Driver::open`] comes
first and looks for both; everything else here needs the [`Driver`] that it gives, or what was made with it. Memory,
code and events are owned handles without `Drop`: freeing waits for the device, and a device that hangs must not keep
the process. Their owner frees them, or leaves them to the end of the process.

Of cudarc only the bare calls are used. Its safe layer takes memory from a pool, where old results come back, and keeps
errors of `Drop` for later.
*/

use super::super::error::Problem;
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;

/// Every function that is called here, under the name that the library has it by.
const FUNCTIONS: [&str; 31] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemsetD8_v2",
    "cuMemsetD16_v2",
    "cuMemsetD32_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
];

/// A call that the driver refused, or in which it told of a kernel that broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failed {
    pub call: &'static str,
    /// CUresult.
    pub code: u32,
    /// Its name and text.
    pub why: String,
}

impl Failed {
    /// Whether a kernel, or the hardware under it, broke: from then on every call of this process fails (seen on an H200:
    /// no new context and no reset of the device mends it). ECC and NVLink errors, what a kernel can do wrong while it
    /// runs, and the driver's "unknown".
    pub fn is_fault(&self) -> bool {
        matches!(self.code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 911 | 999)
    }

    pub fn is_out_of_memory(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }

    pub fn problem(self) -> Problem {
        Problem::Call { call: self.call, why: self.why }
    }
}

fn check(call: &'static str, result: sys::CUresult) -> Result<(), Failed> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, result)) }
}

fn failed(call: &'static str, result: sys::CUresult) -> Failed {
    type Text = unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult;
    let text = |get: Text| {
        let mut text = ptr::null();
        // SAFETY: takes any result; writes a pointer to a string that ends in NUL and lives as long as the library, or
        // null. `check` runs only behind calls, so that the library is open and has these functions.
        let known = unsafe { get(result, &mut text) };
        if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
            return "no text".into();
        }
        // SAFETY: as above, and not null.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let why = format!("{}, {}", text(sys::cuGetErrorName), text(sys::cuGetErrorString));
    Failed { call, code: result as u32, why }
}

/// The opened and initialised library, with all functions that are called here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Driver(());

impl Driver {
    /// Looks for the library and its functions, then initialises it (100 to 230 ms with a GPU).
    pub fn open() -> Result<Driver, Problem> {
        // SAFETY: opening a library runs its code. These are the driver's names; its initialisers do nothing that this
        // process relies on not being done.
        if !unsafe { sys::is_culib_present() } {
            return Err(Problem::NoDriver);
        }
        // SAFETY: as above; the same names are tried again, so one is found and this does not panic.
        let library = unsafe { sys::culib() };
        for name in FUNCTIONS {
            // SAFETY: only whether the symbol is there is asked; it is not called.
            if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
                return Err(Problem::OldDriver { missing: name });
            }
        }
        // SAFETY: takes no pointer; 0 is the one value of its flags.
        match check("cuInit", unsafe { sys::cuInit(0) }) {
            Ok(()) => Ok(Driver(())),
            Err(f) if f.code == sys::CUresult::CUDA_ERROR_STUB_LIBRARY as u32 => Err(Problem::Stub),
            Err(f) => Err(Problem::NoDevice { why: f.why }),
        }
    }

    /// The newest CUDA that the driver runs: 13000 for 13.0.
    pub fn cuda(self) -> Result<u32, Failed> {
        let mut version = 0;
        // SAFETY: `version` is an int.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        Ok(unsigned(version))
    }

    pub fn count(self) -> Result<u32, Failed> {
        let mut count = 0;
        // SAFETY: `count` is an int.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(unsigned(count))
    }

    pub fn device(self, ordinal: u32) -> Result<RawDevice, Failed> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: `device` is a CUdevice; any ordinal may be asked for.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, number) })?;
        Ok(RawDevice(device))
    }
}

/// A device that the driver listed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawDevice(sys::CUdevice);

impl RawDevice {
    pub fn name(self) -> Result<String, Failed> {
        let mut name = [0; 256];
        // SAFETY: `name` has room for 256 chars; the driver ends the text in NUL within them.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, self.0) })?;
        let bytes: Vec<u8> = name.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn attribute(self, attribute: sys::CUdevice_attribute) -> Result<u32, Failed> {
        let mut value = 0;
        // SAFETY: `value` is an int.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.0) })?;
        Ok(unsigned(value))
    }

    pub fn memory(self) -> Result<u64, Failed> {
        let mut bytes = 0;
        // SAFETY: `bytes` is a size_t.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.0) })?;
        Ok(bytes as u64)
    }
}

/// The device's primary context, retained.
#[derive(Debug)]
pub(super) struct Context {
    device: RawDevice,
    raw: sys::CUcontext,
}

impl Context {
    pub fn new(device: RawDevice) -> Result<Context, Failed> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a CUcontext, written by the call; the driver is initialised, since there is a `RawDevice`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.0) })?;
        Ok(Context { device, raw })
    }

    /// Gives the context back. It waits where something still runs.
    pub fn release(&self) {
        // SAFETY: retained by `new`; the owner calls this once, last. What it answers changes nothing any more.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.0) };
    }

    /// Makes it this thread's: all calls below work on the thread's context.
    pub fn bind(&self) -> Result<(), Failed> {
        // SAFETY: `raw` is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Bytes that are free, and all.
    pub fn memory(&self) -> Result<(u64, u64), Failed> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are a size_t.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub fn allocate(&self, bytes: usize) -> Result<Memory, Failed> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: `address` is a CUdeviceptr.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(Memory { address, bytes })
    }

    /// Frees memory. It waits where something still runs.
    pub fn free(&self, memory: Memory) -> Result<(), Failed> {
        self.bind()?;
        // SAFETY: allocated by `allocate` and not freed before, since `Memory` can't be copied.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(memory.address) })
    }

    /// Copies bytes to the device. It waits where something still runs.
    pub fn write(&self, memory: &Memory, at: usize, bytes: &[u8]) -> Result<(), Failed> {
        let address = memory.range("cuMemcpyHtoD", at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies in live memory of the device, and `bytes` holds as many.
        let result = unsafe { sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()) };
        check("cuMemcpyHtoD", result)
    }

    /// Copies bytes from the device. It waits where something still runs.
    pub fn read(&self, memory: &Memory, at: usize, into: &mut [u8]) -> Result<(), Failed> {
        let address = memory.range("cuMemcpyDtoH", at, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies in live memory of the device, and `into` has room for as many bytes.
        let result = unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), address, into.len()) };
        check("cuMemcpyDtoH", result)
    }

    /// Copies bytes from a place of some memory to a place of other memory, in order with launches.
    pub fn copy(&self, from: (&Memory, usize), to: (&Memory, usize), count: usize) -> Result<(), Failed> {
        let call = "cuMemcpyDtoDAsync";
        let (source, target) = (from.0.range(call, from.1, count)?, to.0.range(call, to.1, count)?);
        if count == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: both ranges lie in live memory of the device; the null stream is the one that everything here goes to.
        check(call, unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, count, ptr::null_mut()) })
    }

    /// Sets bytes from `at` on to `count` repetitions of a value, in order with launches.
    pub fn set(&self, memory: &Memory, at: usize, value: Value, count: usize) -> Result<(), Failed> {
        let (call, bytes) = match value {
            Value::Bits8(_) => ("cuMemsetD8", 1),
            Value::Bits16(_) => ("cuMemsetD16", 2),
            Value::Bits32(_) => ("cuMemsetD32", 4),
        };
        let address = memory.range(call, at, count.saturating_mul(bytes))?;
        if count == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the range lies in live memory of the device.
        let result = unsafe {
            match value {
                Value::Bits8(v) => sys::cuMemsetD8_v2(address, v, count),
                Value::Bits16(v) => sys::cuMemsetD16_v2(address, v, count),
                Value::Bits32(v) => sys::cuMemsetD32_v2(address, v, count),
            }
        };
        check(call, result)
    }

    /// Loads machine code.
    pub fn load(&self, cubin: &[u8]) -> Result<Code, Failed> {
        self.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a CUmodule; `cubin` was read to its end as ELF by the parser of CUBINs, so the driver, which is
        // given no length, finds its end.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) })?;
        Ok(Code(raw))
    }

    /// Unloads code. It waits where something still runs.
    pub fn unload(&self, code: Code) {
        if self.bind().is_ok() {
            // SAFETY: loaded by `load` and not unloaded before. What it answers changes nothing any more.
            unsafe { sys::cuModuleUnload(code.0) };
        }
    }

    pub fn function(&self, code: &Code, name: &str) -> Result<Function, Failed> {
        self.bind()?;
        let name = CString::new(name).unwrap_or_default();
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a CUfunction, the module is loaded, the name ends in NUL.
        let result = unsafe { sys::cuModuleGetFunction(&mut raw, code.0, name.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        Ok(Function(raw))
    }

    /// Lets a kernel have so many bytes of dynamic shared memory.
    pub fn opt_in(&self, function: Function, bytes: u32) -> Result<(), Failed> {
        self.bind()?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is loaded.
        let result = unsafe { sys::cuFuncSetAttribute(function.0, attribute, bytes) };
        check("cuFuncSetAttribute", result)
    }

    /// Starts a kernel behind all that was asked for before. `fields` are offsets of `bytes`.
    ///
    /// # Safety
    /// The function's module is loaded. `fields` are as many as the kernel's parameters, and behind each offset lie as many
    /// bytes as its parameter has. The kernel is code whose loads and stores this process stands for: on systems where
    /// the device sees the host's memory, it could write there.
    pub unsafe fn launch(
        &self,
        function: Function,
        [grid, block]: [[u32; 3]; 2],
        dynamic_shared: u32,
        bytes: &[u8],
        fields: &[usize],
    ) -> Result<(), Failed> {
        self.bind()?;
        let mut pointers: Vec<*mut c_void> =
            fields.iter().map(|&at| bytes[at..].as_ptr().cast::<c_void>().cast_mut()).collect();
        // SAFETY: the driver reads the parameters before it returns, and writes none; the rest is the caller's promise.
        let result = unsafe {
            sys::cuLaunchKernel(
                function.0,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                dynamic_shared,
                ptr::null_mut(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }

    pub fn event(&self, timed: bool) -> Result<Event, Failed> {
        self.bind()?;
        let flags = if timed {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        };
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a CUevent.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Event(raw))
    }

    /// The event is reached when everything that was asked for before is done.
    pub fn record(&self, event: &Event) -> Result<(), Failed> {
        self.bind()?;
        // SAFETY: the event is live; the null stream is the one that everything here goes to.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0, ptr::null_mut()) })
    }

    /// Whether a recorded event is reached. Never waits.
    pub fn is_reached(&self, event: &Event) -> Result<bool, Failed> {
        self.bind()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(event.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Milliseconds of the device's clock between two events that are reached; half a microsecond fine.
    pub fn elapsed(&self, from: &Event, to: &Event) -> Result<f64, Failed> {
        self.bind()?;
        let mut milliseconds = 0f32;
        // SAFETY: both are live, and `milliseconds` is a float.
        let result = unsafe { sys::cuEventElapsedTime(&mut milliseconds, from.0, to.0) };
        check("cuEventElapsedTime", result)?;
        Ok(f64::from(milliseconds))
    }

    /// Destroys an event, which is not used again.
    pub fn destroy(&self, event: &Event) {
        if self.bind().is_ok() {
            // SAFETY: created by `event`; the owner calls this once, last. What it answers changes nothing any more.
            unsafe { sys::cuEventDestroy_v2(event.0) };
        }
    }
}

/// Memory of a context.
#[derive(Debug)]
pub(super) struct Memory {
    address: u64,
    bytes: usize,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// The address of a range that lies inside.
    fn range(&self, call: &'static str, at: usize, count: usize) -> Result<u64, Failed> {
        if at.checked_add(count).is_some_and(|end| end <= self.bytes) {
            return Ok(self.address + at as u64);
        }
        let why = format!("bytes {at} and {count} more lie outside of {}", self.bytes);
        Err(Failed { call, code: sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32, why })
    }
}

/// What memory is set to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Bits8(u8),
    Bits16(u16),
    Bits32(u32),
}

/// Loaded code.
#[derive(Debug)]
pub(super) struct Code(sys::CUmodule);

/// A kernel of loaded code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function(sys::CUfunction);

/// A point in the order of what the device does.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

fn unsigned(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}
