/*! Every model of the repository × both forms × both phases, as tests with names of their own. */

use mla_check::harness::gate::lacking_gpu;
use mla_check::harness::{Harness, Source};
use mla_numeric::DType;

/// Requests of both phases: a prompt, more tokens on top of a context, decode steps.
const REQUESTS: &str = "0+3,64+17,0+1,65+1,257+1";

fn main() -> std::process::ExitCode {
    let batch = || REQUESTS.parse().expect("requests, CONTEXT+NEW");
    Harness::new()
        .model(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"))
        .engine(Source::new("own", &[DType::Bf16, DType::F16], own_kernel::on_cpu).batch(batch()).splits(2))
        .engine(Source::new("own-gpu", &[DType::Bf16, DType::F16], own_kernel::on_gpu).on_gpu(lacking_gpu()))
        .main()
}
