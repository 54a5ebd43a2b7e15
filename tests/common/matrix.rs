//! The matrix of the program itself.

use mla_check::check::EngineKind;
use mla_check::harness::{Harness, Source};
use std::path::{Path, PathBuf};

/// Requests for engines that emulate, with these small models: in each phase one without context and some with it; keys of
/// several tiles, a page's end, more than one split in decode. Every tensor keeps the power to show 1e-3 in gain and scale,
/// else its case would be `inconclusive` and fail. (A GPU gets the default batch.)
const CPU: &str = "0+3,64+17,0+1,65+1,257+1";
const PTX: &str = "0+3,64+5,0+1,65+1,200+1";

/// The models that are part of the repository. A binary that was carried elsewhere runs in the root of a checkout.
pub fn models() -> PathBuf {
    let here = Path::new("fixtures/models");
    if here.exists() { here.into() } else { Path::new(env!("CARGO_MANIFEST_DIR")).join(here) }
}

/// All engines of the program with all of these.
pub fn harness() -> Harness {
    Harness::new()
        .model(models())
        .engine(Source::of(EngineKind::Reference).batch(CPU.parse().unwrap()))
        .engine(Source::of(EngineKind::Cpu).batch(CPU.parse().unwrap()).splits(2))
        .engine(Source::of(EngineKind::Ptx).batch(PTX.parse().unwrap()).splits(2))
        .engine(Source::of(EngineKind::Cuda))
}
