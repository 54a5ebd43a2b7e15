/*!
Where output goes: stdout for reports, stderr for progress, warnings and errors.

Colour is stripped where it is not wanted; a closed pipe ends the program quietly.
*/

use super::{Colour, Format, Global};
use crate::judge::Verdict;
use crate::report::Lack;
use crate::report::terminal::Page;
use anstream::{AutoStream, ColorChoice};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::Duration;

/// Why a command ended without its result.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The input can't be read or makes no sense.
    #[error("{0}")]
    Input(String),
    /// The engine asked for is not available here.
    #[error("{0}")]
    Unavailable(String),
    /// The engine broke.
    #[error("{0}")]
    Broke(String),
    /// What was found is a fault in itself.
    #[error("{0}")]
    Fault(String),
    /// The reader of stdout went away.
    #[error("stdout was closed")]
    ClosedPipe,
}

impl Failure {
    /// Any error whose message says what, where and what to do.
    pub fn input(e: impl std::fmt::Display) -> Failure {
        Failure::Input(e.to_string())
    }

    /// What it leaves undone, for a report.
    pub fn lack(&self) -> Option<Lack> {
        let verdict = match self {
            Failure::Input(_) => Verdict::Usage,
            Failure::Unavailable(_) => Verdict::Unavailable,
            Failure::Broke(_) => Verdict::Broke,
            Failure::Fault(_) => Verdict::Fault,
            Failure::ClosedPipe => return None,
        };
        Some(Lack { verdict, what: self.to_string() })
    }

    /// Exit code.
    pub fn exit(&self, bisect: bool) -> u8 {
        match self {
            Failure::Input(_) => Verdict::Usage.exit(bisect),
            Failure::Unavailable(_) => Verdict::Unavailable.exit(bisect),
            Failure::Broke(_) => Verdict::Broke.exit(bisect),
            Failure::Fault(_) => Verdict::Fault.exit(bisect),
            Failure::ClosedPipe => 0,
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Failure {
        if e.kind() == ErrorKind::BrokenPipe {
            return Failure::ClosedPipe;
        }
        Failure::Input(format!(
            "writing the report failed: {e}\n  where: stdout\n  do: check that there is room and that the output may be written"
        ))
    }
}

/// Output of one command.
pub struct Output {
    global: Global,
    choice: ColorChoice,
}

impl Output {
    /// By the global options.
    pub fn new(global: Global) -> Output {
        let choice = match global.color {
            _ if global.plain => ColorChoice::Never,
            Colour::Auto => ColorChoice::Auto,
            Colour::Always => ColorChoice::Always,
            Colour::Never => ColorChoice::Never,
        };
        choice.write_global();
        Output { global, choice }
    }

    /// Whether the report is wanted as JSON.
    pub fn json(&self) -> bool {
        self.global.format == Format::Json
    }

    /// Whether only the verdict is wanted.
    pub fn quiet(&self) -> bool {
        self.global.quiet
    }

    /// Columns of the terminal; 80 where stdout is none.
    pub fn width(&self) -> usize {
        match terminal_size::terminal_size() {
            Some((terminal_size::Width(w), _)) if std::io::stdout().is_terminal() => usize::from(w),
            _ => 80,
        }
    }

    /// How a report is set.
    pub fn page(&self) -> Page {
        Page { width: self.width(), plain: self.global.plain }
    }

    /// Prints a report, which may hold colours.
    pub fn print(&mut self, text: &str) -> Result<(), Failure> {
        let mut out = AutoStream::new(std::io::stdout(), self.choice);
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(())
    }

    /// Prints a value as JSON.
    pub fn print_json(&mut self, value: &impl serde::Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_string_pretty(value).map_err(|e| Failure::Input(e.to_string()))?;
        text.push('\n');
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        Ok(())
    }

    /// Says something on stderr, unless quiet.
    pub fn warn(&mut self, text: &str) {
        if !self.global.quiet {
            let _ = writeln!(AutoStream::new(std::io::stderr(), self.choice), "warning: {text}");
        }
    }

    /// A remark on stderr, unless quiet.
    pub fn say(&mut self, text: &str) {
        if !self.global.quiet {
            let _ = writeln!(AutoStream::new(std::io::stderr(), self.choice), "{text}");
        }
    }

    /// A line for whatever reads stderr, quiet or not.
    pub fn tell(&mut self, line: &str) {
        let _ = writeln!(std::io::stderr(), "{line}");
    }

    /// An error on stderr.
    pub fn error(&mut self, text: &str) {
        let red = anstyle::AnsiColor::Red.on_default().effects(anstyle::Effects::BOLD);
        let _ = writeln!(AutoStream::new(std::io::stderr(), self.choice), "{red}error{red:#}: {text}");
    }

    /// A progress line on stderr, where stderr is a terminal. `length` 0: a spinner.
    pub fn progress(&self, length: u64) -> ProgressBar {
        let hidden = self.global.quiet || self.global.plain || !std::io::stderr().is_terminal();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target((length > 0).then_some(length), target);
        let template =
            if length > 0 { "{msg} [{bar:30}] {pos}/{len} {elapsed}" } else { "{spinner} {msg} {elapsed}" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}
