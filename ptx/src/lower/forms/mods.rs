/*! Reading an opcode's modifiers, each from a closed list. */

use super::{Result, UNKNOWN};
use crate::ir::Space;
use crate::text::ast::Instruction;
use crate::ty::Ty;

/// Modifiers still to be read.
pub struct Mods<'t> {
    pub parts: Vec<&'t str>,
    pub at: usize,
}

impl<'t> Mods<'t> {
    pub fn new(opcode: &'t str) -> Self {
        Mods { parts: opcode.split('.').collect(), at: 1 }
    }
    pub fn peek(&self) -> &'t str {
        self.parts.get(self.at).copied().unwrap_or("")
    }
    /// The next modifier, if it is one of these.
    pub fn opt(&mut self, choices: &[&str]) -> Option<&'t str> {
        let p = self.peek();
        choices.contains(&p).then(|| {
            self.at += 1;
            p
        })
    }
    pub fn need(&mut self, choices: &[&str]) -> Result<&'t str> {
        self.opt(choices).ok_or_else(|| UNKNOWN.to_owned())
    }
    /// At most one of each list, whatever their order.
    pub fn any_order<const N: usize>(&mut self, lists: [&[&str]; N]) -> [Option<&'t str>; N] {
        let mut found = [None; N];
        while let Some(i) = (0..N).find(|&i| found[i].is_none() && lists[i].contains(&self.peek())) {
            found[i] = self.opt(lists[i]);
        }
        found
    }
    pub fn all(&mut self, words: &[&str]) -> Result<()> {
        words.iter().try_for_each(|w| self.need(&[w]).map(drop))
    }
    pub fn ty(&mut self) -> Result<Ty> {
        let t = Ty::parse(self.peek()).ok_or(UNKNOWN)?;
        self.at += 1;
        Ok(t)
    }
    pub fn end(&self) -> Result<()> {
        if self.at == self.parts.len() { Ok(()) } else { Err(UNKNOWN.into()) }
    }
    /// Ordering and scope, which change nothing where blocks are sequentially consistent.
    pub fn order(&mut self) {
        if self.opt(&["weak", "relaxed", "acquire", "release", "acq_rel", "volatile"]).is_some() {
            self.opt(&["cta", "cluster", "gpu", "sys"]);
        }
    }
    pub fn space(&mut self) -> Space {
        match self.opt(&["global", "const", "shared", "shared::cta", "local"]) {
            Some("global" | "const") => Space::Global,
            Some("shared" | "shared::cta") => Space::Shared,
            Some("local") => Space::Local,
            _ => Space::Generic,
        }
    }
    pub fn hints(&mut self) {
        const HINTS: [&str; 11] = [
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::evict_first",
            "L1::evict_last",
            "L1::no_allocate",
            "L2::evict_normal",
            "L2::evict_first",
            "L2::evict_last",
            "L2::64B",
            "L2::128B",
            "L2::256B",
        ];
        while self.opt(&HINTS).is_some() {}
    }
    pub fn vector(&mut self) -> u8 {
        match self.opt(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        }
    }
}

/// Whether there are as many operands.
pub fn count(i: &Instruction, range: std::ops::RangeInclusive<usize>) -> Result<()> {
    if range.contains(&i.operands.len()) {
        return Ok(());
    }
    Err(format!("{} operands", i.operands.len()))
}
