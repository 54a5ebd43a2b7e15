/*!
NVIDIA's own matrix product, cuBLAS, opened at run time where it is: what a GPU's tensor cores reach in practice. Nothing is
judged by it and nothing needs it.
*/

use super::{Buffer, Cuda, Device, Error, Problem};
use crate::nvrtc::Search;
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type Version = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
#[rustfmt::skip]
type Gemm = unsafe extern "C" fn(
    Handle, c_int, c_int, c_int, c_int, c_int, *const c_void, u64, c_int, c_int, u64, c_int, c_int,
    *const c_void, u64, c_int, c_int, c_int, c_int,
) -> c_int;

/// `CUBLAS_OP_T`, `CUBLAS_OP_N`.
const OPERATIONS: [c_int; 2] = [1, 0];
/// `CUDA_R_16BF`, `CUBLAS_COMPUTE_32F`, `CUBLAS_GEMM_DEFAULT`.
const BF16: c_int = 14;
const COMPUTE: c_int = 68;
const DEFAULT: c_int = -1;

/// An opened cuBLAS with a handle on the context of a device.
pub struct Blas {
    handle: Handle,
    destroy: Destroy,
    gemm: Gemm,
    version: c_int,
    place: String,
    /// Kept: the functions are theirs. The second is what the first needs.
    _libraries: (Library, Option<Library>),
}

impl Blas {
    /// The first that can be opened of those that lie beside NVRTC, in toolkits and Python environments, or where the system
    /// looks.
    ///
    /// # Errors
    /// In a sentence: none was found, or what it answered.
    pub fn open(device: &mut Cuda) -> Result<Blas, String> {
        device.synchronise().and_then(|()| device.bind()).map_err(|e| e.to_string())?;
        let mut why = "no libcublas was found".to_string();
        let names = ["libcublas.so.13", "libcublas.so.12"];
        let found = Search::from_environment().libraries(&names);
        for path in found.into_iter().chain(names.map(PathBuf::from)) {
            match Blas::of(&path) {
                Ok(blas) => return Ok(blas),
                Err(e) if path.is_absolute() => why = e,
                Err(_) => {}
            }
        }
        Err(why)
    }

    fn of(path: &Path) -> Result<Blas, String> {
        let place = path.display().to_string();
        let name = path.file_name().map(|n| n.to_string_lossy().replace("cublas", "cublasLt"));
        // The wheels' libraries find each other only where this one is open already.
        let light = name.and_then(|n| shared(&path.with_file_name(n)).ok());
        let library = shared(path).map_err(|e| format!("{place}: {e}"))?;
        let lacks = |e: libloading::Error| format!("{place}: {e}");
        // SAFETY: the types are those of cuBLAS's header for these names, the same since CUDA 11.
        let (create, destroy, version_of, gemm) = unsafe {
            (
                *library.get::<Create>(b"cublasCreate_v2").map_err(lacks)?,
                *library.get::<Destroy>(b"cublasDestroy_v2").map_err(lacks)?,
                *library.get::<Version>(b"cublasGetVersion_v2").map_err(lacks)?,
                *library.get::<Gemm>(b"cublasGemmEx").map_err(lacks)?,
            )
        };
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is written by the call; the caller made the device's context this thread's.
        match unsafe { create(&mut handle) } {
            0 => {}
            status => return Err(format!("{place}: cublasCreate answered {status}")),
        }
        let mut version = 0;
        // SAFETY: the handle was made above, and `version` is an int. What it answers is for show only.
        unsafe { version_of(handle, &mut version) };
        Ok(Blas { handle, destroy, gemm, version, place, _libraries: (library, light) })
    }

    /// Its version, as 13.1.0 is 130100, and where it lies.
    pub fn describe(&self) -> String {
        let v = self.version;
        format!("cuBLAS {}.{}.{} ({})", v / 10_000, v / 100 % 100, v % 100, self.place)
    }

    /// Starts c = a · b of square bf16 matrices of `n` rows, accumulated in float32, behind all that was asked for before.
    ///
    /// # Errors
    /// [`Problem::Buffer`]; [`Problem::Range`] where a buffer is too small; [`Problem::Call`].
    pub fn multiply(&self, device: &mut Cuda, [a, b, c]: [Buffer; 3], n: u32) -> Result<(), Error> {
        device.alive()?;
        device.bind()?;
        let mut address = [0; 3];
        for (address, buffer) in address.iter_mut().zip([a, b, c]) {
            let held = device.held(buffer)?;
            super::range(0, n as usize * n as usize * 2, held.bytes)
                .map_err(|p| Error::new(p, &*held.what))?;
            *address = held.memory.address() + held.first() as u64;
        }
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = (ptr::from_ref(&one).cast::<c_void>(), ptr::from_ref(&zero).cast::<c_void>());
        let n = n as c_int;
        let [left, right] = OPERATIONS;
        device.queued = true;
        // SAFETY: the three ranges lie in live memory of the device whose context is bound; both factors are floats, as the
        // compute type asks for, and are read before the call returns (pointers to host memory are the handle's default).
        let status = unsafe {
            (self.gemm)(
                self.handle,
                left,
                right,
                n,
                n,
                n,
                one,
                address[0],
                BF16,
                n,
                address[1],
                BF16,
                n,
                zero,
                address[2],
                BF16,
                n,
                COMPUTE,
                DEFAULT,
            )
        };
        let why = format!("it answered {status}");
        if status == 0 {
            Ok(())
        } else {
            Err(Error::new(Problem::Call { call: "cublasGemmEx", why }, &*self.place))
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made by `cublasCreate_v2` of this library and destroyed here only. It waits for what was started, which its
        // owner has waited for. What it answers changes nothing any more.
        unsafe { (self.destroy)(self.handle) };
    }
}

fn shared(path: &Path) -> Result<Library, libloading::Error> {
    #[cfg(unix)]
    // SAFETY: opening a library runs its code. It is NVIDIA's by its name and place, and its initialisers do nothing that this
    // process relies on not being done.
    return unsafe {
        use libloading::os::unix::{Library as Unix, RTLD_GLOBAL, RTLD_NOW};
        Unix::open(Some(path.as_os_str()), RTLD_NOW | RTLD_GLOBAL).map(Library::from)
    };
    #[cfg(not(unix))]
    // SAFETY: as above.
    unsafe {
        Library::new(path.as_os_str())
    }
}
