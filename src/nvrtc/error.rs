/*! Why code could not be compiled: what, where, what to do. */

use super::version::{PINNED, Version};
use std::borrow::Cow;

/// NVRTC is not there, or did not compile; the place is a file, a library or an environment variable.
pub type Error = crate::problem::Error<Problem>;

impl Error {
    /// Whether it is the compiler that is missing, rather than code or options that are wrong.
    pub fn is_unavailable(&self) -> bool {
        use Problem::*;
        matches!(
            self.problem(),
            Absent { .. } | NotThere { .. } | Open { .. } | Symbol { .. } | Builtins { .. }
        )
    }
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages say they are
pub enum Problem {
    #[error("NVRTC, NVIDIA's compiler library, was not found")]
    Absent { looked: Vec<String> },
    #[error("there is no NVRTC library here: {why}")]
    NotThere { why: String },
    #[error("the library can't be opened: {why}")]
    Open { why: String },
    #[error("the library has no function {name}")]
    Symbol { name: &'static str },
    #[error("NVRTC can't use its builtins library: {log}")]
    Builtins { log: String },
    #[error("the {what} has a NUL byte at offset {at}, where the compiler would cut it")]
    Nul { what: String, at: usize },
    #[error("NVRTC {version} can't compile for {target}; it knows {known}")]
    Target { target: String, version: Version, known: String },
    #[error("NVRTC {version} refused the options: {log}")]
    Options { version: Version, log: String },
    #[error("the code does not compile for {target}:\n{log}")]
    Code { target: String, log: String },
    #[error("NVRTC {version} failed: {call}: {why}")]
    Call { version: Version, call: &'static str, why: String },
    #[error("NVRTC reported success for {target} but delivered no {what}")]
    Empty { target: String, what: &'static str },
    #[error("the PTX is not UTF-8 from byte {at} on")]
    NotUtf8 { at: usize },
    #[error("the CUBIN can't be read: {what}")]
    Cubin { what: String },
}

impl crate::problem::Problem for Problem {
    fn advice(&self) -> Cow<'static, str> {
        use Problem::*;
        Cow::Owned(match self {
            Absent { looked } => format!(
                "{} (no GPU or driver is needed), or set MLA_CHECK_NVRTC to a libnvrtc.so or its folder; looked in: {}",
                install(),
                if looked.is_empty() { "nothing (no place is known)".into() } else { looked.join(", ") }
            ),
            NotThere { .. } => format!(
                "{} and let MLA_CHECK_NVRTC name its libnvrtc.so.{} or the folder that holds it; or unset it to search this machine",
                install(),
                PINNED.major
            ),
            Open { .. } => format!(
                "it is damaged, or made for another processor or system: install it again ({})",
                install()
            ),
            Symbol { .. } => format!("this is no NVRTC, or one older than 11.2: {}", install()),
            Builtins { .. } => {
                "keep libnvrtc-builtins.so.* in the same folder as libnvrtc.so.*: install NVRTC again".into()
            }
            Nul { .. } => "remove the NUL byte: source, names and options are text".into(),
            Target { .. } => format!("choose one that it knows, or install another NVRTC ({})", install()),
            Options { .. } => "correct the option, or install the NVRTC that knows it".into(),
            Code { .. } => "correct the code: the lines above name the places".into(),
            Call { .. } | Empty { .. } | NotUtf8 { .. } => {
                format!("try NVRTC {PINNED}, the version this program is made for ({})", install())
            }
            Cubin { .. } => {
                format!("it is damaged, or made by an NVRTC of another layout: compile with NVRTC {PINNED}")
            }
        })
    }
}

/// How the pinned version comes onto a machine.
fn install() -> String {
    format!("pip install 'nvidia-cuda-nvrtc=={PINNED}.*'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_compiler_says_what_to_install_and_where_it_was_looked_for() {
        let problem = Problem::Absent { looked: vec!["/opt/cuda/lib64".into()] };
        let error = Error::new(problem, "this machine");
        let text = error.to_string();
        for part in
            ["nvidia-cuda-nvrtc==13.0.*", "MLA_CHECK_NVRTC", "/opt/cuda/lib64", "\n  where: ", "\n  do: "]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(error.is_unavailable());
        assert!(!Error::new(Problem::NotUtf8 { at: 3 }, "a.cu").is_unavailable());
    }
}
