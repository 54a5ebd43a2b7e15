/*!
Tests on a GPU. Without one each is listed by name as skipped, with the reason; `MLA_CHECK_REQUIRE_GPU=1` makes that a
failure. The binary needs no file beside it: build it anywhere, run it where the GPU is.

    cargo test --release --test gpu --no-run
*/

#[path = "common/gpu.rs"]
mod gpu;

fn main() -> std::process::ExitCode {
    gpu::main()
}
