/*! The form that errors of devices and of the compiler have: what is wrong, where, what to do. */

use std::borrow::Cow;
use std::fmt;

/// What is wrong; its text says it in one sentence.
pub trait Problem: fmt::Debug + fmt::Display {
    /// What the user can do about it.
    fn advice(&self) -> Cow<'static, str>;
}

/// A problem at a place.
pub struct Error<P> {
    inner: Box<(P, String)>,
}

impl<P> Error<P> {
    /// This problem at this place: a file, a kernel, an argument, a buffer, an environment variable.
    pub fn new(problem: P, place: impl Into<String>) -> Error<P> {
        Error { inner: Box::new((problem, place.into())) }
    }
    /// What is wrong.
    pub fn problem(&self) -> &P {
        &self.inner.0
    }
    /// Where.
    pub fn place(&self) -> &str {
        &self.inner.1
    }
}

impl<P: Problem> fmt::Debug for Error<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Error").field(self.problem()).field(&self.place()).finish()
    }
}

impl<P: Problem> fmt::Display for Error<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  where: {}\n  do: {}", self.problem(), self.place(), self.problem().advice())
    }
}

impl<P: Problem> std::error::Error for Error<P> {}
