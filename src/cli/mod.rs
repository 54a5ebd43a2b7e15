/*!
The command line: parsing and printing only.

One file a command. Reports go to stdout, progress and warnings to stderr. Every error is three lines: what,
where, what to do. Exit codes are those of [`judge::TABLE`](crate::judge::TABLE).
*/

mod bench;
mod bisect;
mod calibrate;
mod case;
mod compare;
mod copies;
mod devices;
mod diff;
mod explain;
mod faults;
mod inspect;
mod layers;
mod merge;
mod norms;
mod out;
mod packaging;
mod ptx;
mod run;
mod sensitivity;
mod synth;
mod text;

pub use out::{Failure, Output};

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::process::ExitCode;

/// An offline correctness harness for MLA attention: a model file in, a verdict out, tensor by tensor.
#[derive(Parser)]
#[command(name = "mla-check", version, max_term_width = 100, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 clean, 1 fault, 2 usage or unreadable input, 3 no verdict, 4 engine broke, 5 engine not available.\n\nStart with: mla-check run MODEL.gguf"
)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Args, Clone, Copy)]
pub struct Global {
    /// Form of the report
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, help_heading = "Output")]
    pub format: Format,
    /// Print the verdict line and errors only
    #[arg(long, short, global = true, help_heading = "Output")]
    pub quiet: bool,
    /// Colours: `auto` means when stdout is a terminal and NO_COLOR is not set
    #[arg(long, global = true, value_enum, default_value_t = Colour::Auto, help_heading = "Output")]
    pub color: Colour,
    /// Words in place of drawings, no colours, no progress: for screen readers and logs
    #[arg(long, global = true, help_heading = "Output")]
    pub plain: bool,
}

/// Form of a report on stdout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Colour {
    Auto,
    Always,
    Never,
}

#[derive(Subcommand)]
enum Command {
    /// Load weights, run an engine, judge every tensor
    Run(Box<run::RunArgs>),
    /// Judge tensors that other software computed, or that `run --save` wrote
    Compare(compare::CompareArgs),
    /// Write a test case for a kernel that lives elsewhere: Triton, CUTLASS, Python
    Case(case::CaseArgs),
    /// Show every term behind one element of a report
    Explain(explain::ExplainArgs),
    /// Put JSON reports of several machines together: layer ranges, shards of a matrix
    Merge(merge::MergeArgs),
    /// Hold two reports of the same case against each other: what got better or worse, and whether it matters
    Diff(diff::DiffArgs),
    /// Show what a model file holds, and what is wrong with it
    Inspect(inspect::InspectArgs),
    /// Write a model file with real dimensions and random weights
    Synth(synth::SynthArgs),
    /// Plant every fault of the catalogue: caught, found at the right tensor, named rightly
    Faults(faults::FaultsArgs),
    /// Judge many clean runs: no alarm, and p-values as rare as they say
    Calibrate(calibrate::CalibrateArgs),
    /// Find the smallest fault of each kind that the judge sees
    Sensitivity(sensitivity::SensitivityArgs),
    /// Check a kernel file, CUDA C++ or PTX, with no GPU: what its kernels take, and one launch of them
    Ptx(ptx::PtxArgs),
    /// Time each stage's kernel on a GPU, or show what kernels take of registers and shared memory
    Bench(Box<bench::BenchArgs>),
    /// Show which engines this machine can run, and what is missing
    Devices(devices::DevicesArgs),
    /// Print a completion script for a shell
    Completions(packaging::CompletionsArgs),
    /// Print the man page, or write one for each command
    Man(packaging::ManArgs),
}

/// Parses the command line, runs the command, prints errors, and chooses the exit code.
pub fn main() -> ExitCode {
    // A usage error under `--bisect` must not mark a commit bad: git stops at 128 and above.
    let bisect = std::env::args_os().any(|a| a == "--bisect");
    let usage = if bisect { 128 } else { 2 };
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(usage) } else { ExitCode::SUCCESS };
        }
    };
    crate::gguf::end_on_lost_pages(usage);
    let mut output = Output::new(cli.global);
    let result = match &cli.command {
        Command::Run(args) => run::main(args, &mut output),
        Command::Compare(args) => compare::main(args, &mut output),
        Command::Case(args) => case::main(args, &mut output),
        Command::Explain(args) => explain::main(args, &mut output),
        Command::Merge(args) => merge::main(args, &mut output),
        Command::Diff(args) => diff::main(args, &mut output),
        Command::Inspect(args) => inspect::main(args, &mut output),
        Command::Synth(args) => synth::main(args, &mut output),
        Command::Faults(args) => faults::main(args, &mut output),
        Command::Calibrate(args) => calibrate::main(args, &mut output),
        Command::Sensitivity(args) => sensitivity::main(args, &mut output),
        Command::Ptx(args) => ptx::main(args, &mut output),
        Command::Bench(args) => bench::main(args, &mut output),
        Command::Devices(args) => devices::main(args, &mut output),
        Command::Completions(args) => packaging::completions(args, &mut output),
        Command::Man(args) => packaging::man(args, &mut output),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        // Whoever reads our output had enough (`| head`): not an error of ours.
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(f) => {
            output.error(&f.to_string());
            ExitCode::from(f.exit(bisect))
        }
    }
}
