/*!
The matrix of the program itself: the models of `fixtures/models` and those of `MLA_CHECK_MODELS`, by every engine, dtype, form
and phase. docs/ci.md says how to use it; `tests/harness_cli.rs` tests it.
*/

#[path = "common/matrix.rs"]
mod matrix;

fn main() -> std::process::ExitCode {
    matrix::harness().main()
}
