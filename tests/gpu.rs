/*!
Tests on a GPU. Without one each is listed by name as skipped, with the reason; `MLA_CHECK_REQUIRE_GPU=1` makes that a
failure. Build the binary anywhere and run it where the GPU is, in the root of a checkout: tests of the engine read
`fixtures/models`, and compile with the NVRTC that is there; all else is in the binary.

    cargo test --release --test gpu --no-run
*/

#[path = "common/gpu.rs"]
mod gpu;

fn main() -> std::process::ExitCode {
    gpu::main()
}
