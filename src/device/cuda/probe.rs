/*!
What the driver offers, asked without taking a device: the driver, and every GPU with its limits.
*/

use super::driver::{Driver, Failed, RawDevice};
use crate::device::{Error, Limits, Problem};
use crate::nvrtc::Target;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use serde::Serialize;

/// NVIDIA's driver and its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Installed {
    /// File of libcuda, where the system tells.
    pub library: Option<String>,
    /// The driver's own version, where the system tells: 580.159.04.
    pub driver: Option<String>,
    /// The newest CUDA that the driver runs, major and minor.
    pub cuda: (u32, u32),
    /// In the order of their numbers; at least one.
    pub gpus: Vec<Gpu>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its number for [`Cuda::open`](super::Cuda::open).
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// What it allows, by its own answers.
    pub limits: Limits,
}

impl Gpu {
    /// What code is compiled for.
    pub fn target(&self) -> Target {
        Target::sm(self.limits.number)
    }
    /// Compute capability, as NVIDIA writes it.
    pub fn capability(&self) -> String {
        format!("{}.{}", self.limits.number / 10, self.limits.number % 10)
    }
}

impl Installed {
    /// Asks the driver. Never panics; the first call of a process takes 100 to 230 ms with a GPU.
    ///
    /// # Errors
    /// [`Problem::NoDriver`], [`Problem::Stub`], [`Problem::OldDriver`], [`Problem::NoDevice`].
    pub fn look() -> Result<Installed, Error> {
        let driver = Driver::open().map_err(|p| Error::new(p, place()))?;
        let no_device = |why| Error::new(Problem::NoDevice { why }, place());
        let failed = |f: Failed| no_device(f.why);
        let count = driver.count().map_err(failed)?;
        if count == 0 {
            return Err(no_device("it counts none".into()));
        }
        let version = driver.cuda().map_err(failed)?;
        let gpus = (0..count).map(|i| gpu(driver.device(i)?, i)).collect::<Result<_, Failed>>();
        Ok(Installed {
            library: library(),
            driver: kernel_module(),
            cuda: (version / 1000, version % 1000 / 10),
            gpus: gpus.map_err(failed)?,
        })
    }
}

fn gpu(device: RawDevice, ordinal: u32) -> Result<Gpu, Failed> {
    let ask = |attribute| device.attribute(attribute);
    let number = 10 * ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
        + ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let limits = Limits {
        number,
        shared_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        shared_per_block: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_per_block_default: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
        shared_reserved: ask(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
        threads_per_block: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        threads_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        registers_per_thread: Limits::REGISTERS_PER_THREAD,
        registers_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK)?,
    };
    Ok(Gpu {
        ordinal,
        name: device.name()?,
        memory: device.memory()?,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        limits,
    })
}

/// Where an error of the driver is: its file, or what was looked for, and what hides devices.
pub(super) fn place() -> String {
    let library = library().unwrap_or_else(|| "this machine, by the system's library path".into());
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!("{library}, CUDA_VISIBLE_DEVICES={value}"),
        Err(_) => library,
    }
}

/// File of the libcuda that this process has opened, by Linux's own list.
fn library() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..]));
    paths
        .into_iter()
        .find(|p| p.rsplit('/').next().is_some_and(|n| n.starts_with("libcuda.")))
        .map(Into::into)
}

/// Version of the driver's part in the kernel.
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_string())
}
