//! The binary's entry, nothing else.

fn main() -> std::process::ExitCode {
    mla_check::cli::main()
}
