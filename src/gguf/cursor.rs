/*!
A reader over the bytes of a file that cannot pass their end.

Every length is compared with the bytes that are left before anything is added, multiplied or allocated.
*/

use super::error::{GgufError, Place, Problem};
use std::path::Path;
use std::sync::Arc;

pub(super) struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
    path: &'a Arc<Path>,
    /// The tensor or key being read, for error messages.
    pub subject: Option<String>,
}

impl<'a> Cursor<'a> {
    pub fn new(path: &'a Arc<Path>, data: &'a [u8]) -> Cursor<'a> {
        Cursor { data, at: 0, path, subject: None }
    }
    pub fn offset(&self) -> u64 {
        self.at as u64
    }
    pub fn left(&self) -> u64 {
        (self.data.len() - self.at) as u64
    }
    pub fn place(&self, offset: u64) -> Place {
        Place { path: self.path.clone(), offset: Some(offset), subject: self.subject.clone() }
    }
    pub fn error(&self, offset: u64, problem: Problem) -> GgufError {
        GgufError::new(problem, self.place(offset))
    }

    pub fn take(&mut self, needed: u64, field: &'static str) -> Result<&'a [u8], GgufError> {
        let end = usize::try_from(needed).ok().and_then(|n| self.at.checked_add(n));
        match end.and_then(|end| self.data.get(self.at..end)) {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(self.error(self.offset(), Problem::Truncated { field, needed, left: self.left() })),
        }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, field)?);
        Ok(out)
    }
    pub fn u32(&mut self, field: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }
    pub fn u64(&mut self, field: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }
    /// A count of things that take at least `least` bytes each.
    pub fn count(&mut self, field: &'static str, least: u64) -> Result<u64, GgufError> {
        let offset = self.offset();
        let found = self.u64(field)?;
        self.check_count(offset, field, found, least)?;
        Ok(found)
    }
    pub fn check_count(
        &self,
        offset: u64,
        field: &'static str,
        found: u64,
        least: u64,
    ) -> Result<(), GgufError> {
        let left = self.left();
        let most = left / least;
        if found > most {
            return Err(self.error(offset, Problem::Count { field, found, left, most }));
        }
        Ok(())
    }
    /// A length, then that many bytes.
    pub fn string(&mut self, field: &'static str) -> Result<&'a [u8], GgufError> {
        let length = self.u64(field)?;
        self.take(length, field)
    }
}
