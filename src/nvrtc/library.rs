/*!
The shared library itself: the only `unsafe` of the compiler.

The builtins library is opened first, by its path and for everybody: libnvrtc of 13.0 asks the system for it by name and
has no path to its own folder. Both stay open for the life of the process: NVRTC keeps threads and caches of its own.
*/

use super::error::Problem;
use super::version::Version;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

#[cfg(not(unix))]
use libloading::Library as Shared;
#[cfg(unix)]
use libloading::os::unix::Library as Shared;

type Handle = *mut c_void;
type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

/// `NVRTC_SUCCESS` and those results that are told apart.
const SUCCESS: c_int = 0;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;
const BUILTINS: c_int = 7;

/// The functions of an opened NVRTC. Plain function pointers of a library that is never closed.
pub(super) struct Library {
    version: Version,
    architectures: Vec<u32>,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: Create,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    log: (SizeOf, BytesOf),
    ptx: (SizeOf, BytesOf),
    cubin: (SizeOf, BytesOf),
}

/// What a compilation ended with.
pub(super) enum End {
    /// Code; the CUBIN is empty for a virtual architecture.
    Done { log: String, ptx: Vec<u8>, cubin: Vec<u8> },
    /// The code is at fault.
    BadCode { log: String },
    /// An option is at fault.
    BadOption { log: String },
    /// The builtins library is.
    NoBuiltins { log: String },
}

/// A call that failed.
pub(super) struct Failed {
    pub call: &'static str,
    pub why: String,
}

/// One compilation's text, ready for C.
pub(super) struct Input {
    pub source: CString,
    pub name: CString,
    /// Names by which they are included, and texts.
    pub headers: Vec<(CString, CString)>,
    pub options: Vec<CString>,
}

impl Library {
    /// Opens the library; `builtins` first, if its path is known.
    pub fn open(library: &Path, builtins: Option<&Path>) -> Result<Library, Problem> {
        if let Some(builtins) = builtins {
            std::mem::forget(shared(builtins, true)?); // stays open, see above
        }
        let opened = shared(library, false)?;
        let found = Library::resolve(&opened);
        // Also when it lacks a function: closing would run code of a library that is not what we took it for.
        std::mem::forget(opened);
        found
    }

    fn resolve(shared: &Shared) -> Result<Library, Problem> {
        /// A function by its name.
        ///
        /// # Safety
        /// The type must be the function's.
        unsafe fn get<T: Copy>(shared: &Shared, name: &'static str) -> Result<T, Problem> {
            // SAFETY: passed on to the caller.
            unsafe { shared.get::<T>(name) }.map(|symbol| *symbol).map_err(|_| Problem::Symbol { name })
        }
        type Counted = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Numbers = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: the types are those of nvrtc.h, the same from 11.2 to 13.x (nvrtcResult is a C enum, nvrtcProgram a
        // pointer); the pointers are copied out and outlive `shared`, because the library is never closed.
        let (mut found, numbers, count, list) = unsafe {
            let found = Library {
                version: Version { major: 0, minor: 0 },
                architectures: Vec::new(),
                error_string: get(shared, "nvrtcGetErrorString")?,
                create: get(shared, "nvrtcCreateProgram")?,
                destroy: get(shared, "nvrtcDestroyProgram")?,
                compile: get(shared, "nvrtcCompileProgram")?,
                log: (get(shared, "nvrtcGetProgramLogSize")?, get(shared, "nvrtcGetProgramLog")?),
                ptx: (get(shared, "nvrtcGetPTXSize")?, get(shared, "nvrtcGetPTX")?),
                cubin: (get(shared, "nvrtcGetCUBINSize")?, get(shared, "nvrtcGetCUBIN")?),
            };
            let numbers: Numbers = get(shared, "nvrtcVersion")?;
            let count: Counted = get(shared, "nvrtcGetNumSupportedArchs")?;
            let list: Counted = get(shared, "nvrtcGetSupportedArchs")?;
            (found, numbers, count, list)
        };
        let failed = |f: Failed| Problem::Open { why: format!("{}: {}", f.call, f.why) };
        let (mut major, mut minor, mut architectures) = (0, 0, 0);
        // SAFETY: both point to an int each.
        found.check("nvrtcVersion", unsafe { numbers(&mut major, &mut minor) }).map_err(failed)?;
        // SAFETY: it points to an int.
        found.check("nvrtcGetNumSupportedArchs", unsafe { count(&mut architectures) }).map_err(failed)?;
        let mut values = vec![0; usize::try_from(architectures).unwrap_or(0)];
        if !values.is_empty() {
            // SAFETY: it points to as many ints as the library said it would write.
            found.check("nvrtcGetSupportedArchs", unsafe { list(values.as_mut_ptr()) }).map_err(failed)?;
        }
        found.version = Version { major: unsigned(major), minor: unsigned(minor) };
        found.architectures = values.into_iter().map(unsigned).collect();
        Ok(found)
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Numbers of the architectures it compiles for.
    pub fn architectures(&self) -> &[u32] {
        &self.architectures
    }

    /// Compiles. Several threads may do so at once, each with a program of its own.
    pub fn run(&self, input: &Input) -> Result<End, Failed> {
        let program = self.program(input)?;
        let options: Vec<*const c_char> = input.options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: `program` is live; `options` holds that many pointers to strings that end in NUL and outlive the call.
        let result = unsafe { (self.compile)(program.handle, length(&options), pointer(&options)) };
        let log = self.text(&program)?;
        match result {
            SUCCESS => Ok(End::Done {
                log,
                ptx: self.bytes(&program, self.ptx, "nvrtcGetPTX")?,
                cubin: self.bytes(&program, self.cubin, "nvrtcGetCUBIN")?,
            }),
            COMPILATION => Ok(End::BadCode { log }),
            INVALID_OPTION => Ok(End::BadOption { log }),
            BUILTINS => Ok(End::NoBuiltins { log }),
            other => self
                .check("nvrtcCompileProgram", other)
                .and(Err(Failed { call: "nvrtcCompileProgram", why: "it failed without an error".into() })),
        }
    }

    fn program(&self, input: &Input) -> Result<Program<'_>, Failed> {
        let names: Vec<*const c_char> = input.headers.iter().map(|h| h.0.as_ptr()).collect();
        let texts: Vec<*const c_char> = input.headers.iter().map(|h| h.1.as_ptr()).collect();
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: all strings end in NUL and live until the program is destroyed, since `input` does; both lists have
        // the length that is passed, or are null with length 0; `handle` is written by the call.
        let result = unsafe {
            (self.create)(
                &mut handle,
                input.source.as_ptr(),
                input.name.as_ptr(),
                length(&names),
                pointer(&texts),
                pointer(&names),
            )
        };
        self.check("nvrtcCreateProgram", result)?;
        Ok(Program { library: self, handle })
    }

    fn text(&self, program: &Program<'_>) -> Result<String, Failed> {
        let bytes = self.bytes(program, self.log, "nvrtcGetProgramLog")?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string())
    }

    fn bytes(
        &self,
        program: &Program<'_>,
        (size_of, bytes_of): (SizeOf, BytesOf),
        call: &'static str,
    ) -> Result<Vec<u8>, Failed> {
        let mut size = 0usize;
        // SAFETY: `program` is live and `size` is a size_t.
        self.check(call, unsafe { size_of(program.handle, &mut size) })?;
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(size).is_err() {
            return Err(Failed { call, why: format!("{size} bytes do not fit into memory") });
        }
        bytes.resize(size, 0u8);
        if size > 0 {
            // SAFETY: `program` is live and `bytes` has room for as many bytes as the library said it would write.
            self.check(call, unsafe { bytes_of(program.handle, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), Failed> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any number; gives a string that ends in NUL and lives as long as the library.
        let text = unsafe { (self.error_string)(result) };
        let text = if text.is_null() {
            "no text".into()
        } else {
            // SAFETY: not null, and as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Failed { call, why: format!("{text} ({result})") })
    }
}

/// A live program, destroyed when dropped.
struct Program<'l> {
    library: &'l Library,
    handle: Handle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram` of the same library and destroyed here only. What it answers changes
        // nothing any more.
        unsafe { (self.library.destroy)(&mut self.handle) };
    }
}

fn pointer(list: &[*const c_char]) -> *const *const c_char {
    if list.is_empty() { ptr::null() } else { list.as_ptr() }
}

fn length(list: &[*const c_char]) -> c_int {
    c_int::try_from(list.len()).unwrap_or(c_int::MAX)
}

fn unsigned(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// Opens a library; `global`: others find its symbols.
fn shared(path: &Path, global: bool) -> Result<Shared, Problem> {
    #[cfg(unix)]
    // SAFETY: opening a library runs its code. It is the one that the user named, or NVIDIA's by its name and place;
    // NVRTC's and its builtins' initialisers do nothing that this process relies on not being done.
    let opened = unsafe {
        use libloading::os::unix::{RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
        Shared::open(Some(path.as_os_str()), RTLD_NOW | if global { RTLD_GLOBAL } else { RTLD_LOCAL })
    };
    #[cfg(not(unix))]
    let _ = global;
    #[cfg(not(unix))]
    // SAFETY: as above.
    let opened = unsafe { Shared::new(path.as_os_str()) };
    opened.map_err(|e| Problem::Open { why: e.to_string() })
}
