/*! Names, registers and constants of one kernel. */

use super::{Global, Scope};
use crate::exec::regs::Width;
use crate::ir::{MaskKind, Reg, Special};
use crate::text::ast::{Operand, Space, Variable};
use crate::ty::Ty;
use std::collections::HashMap;

/// Rows that a register file may have.
const MOST_ROWS: u64 = 1 << 16;
/// Bytes of static shared or local memory that are taken.
const MOST_BYTES: u64 = 1 << 20;

/// What a name in a body is.
#[derive(Clone, Debug)]
pub enum Symbol {
    Register(Reg),
    /// Offset in shared memory, or in the thread's local memory.
    Shared(u64),
    Local(u64),
    /// Offset in the kernel's parameters.
    Parameter(u64),
    /// Instruction.
    Label(u32),
    Targets(Vec<String>),
}

/// `{ … }` with what it declares.
#[derive(Default)]
struct Braces {
    parent: Option<usize>,
    names: HashMap<String, Symbol>,
    /// `%r<10>`: file, first row, how many.
    ranges: HashMap<String, (Reg, u64)>,
}

/// Everything that names of a kernel resolve to.
pub struct Names<'a> {
    pub scope: &'a Scope<'a>,
    braces: Vec<Braces>,
    pub current: usize,
    /// Rows of the three files so far.
    rows: [u64; 3],
    pub constants: Vec<(Reg, u64)>,
    by_value: HashMap<(u64, u8), Reg>,
    pub specials: Vec<(Reg, Special)>,
    /// Rows that hold the address of the dynamic shared block plus an offset.
    pub dynamic: Vec<(Reg, i64)>,
    shared_globals: HashMap<String, u64>,
    pub shared_bytes: u64,
    pub local_bytes: u64,
}

impl<'a> Names<'a> {
    pub fn new(scope: &'a Scope<'a>) -> Self {
        Names {
            scope,
            braces: vec![Braces::default()],
            current: 0,
            rows: [0; 3],
            constants: Vec::new(),
            by_value: HashMap::new(),
            specials: Vec::new(),
            dynamic: Vec::new(),
            shared_globals: HashMap::new(),
            shared_bytes: 0,
            local_bytes: 0,
        }
    }

    /// Opens braces; `nested` in the current ones, or a function body of its own.
    pub fn open(&mut self, nested: bool) {
        let parent = nested.then_some(self.current);
        self.braces.push(Braces { parent, ..Braces::default() });
        self.current = self.braces.len() - 1;
    }

    pub fn close(&mut self) {
        self.current = self.braces[self.current].parent.unwrap_or(self.current);
    }

    pub fn rows(&self) -> [u32; 3] {
        self.rows.map(|n| n as u32)
    }

    fn row(&mut self, width: Width, n: u64) -> Result<Reg, String> {
        let i = width as usize;
        let first = self.rows[i];
        if n > MOST_ROWS || first + n > MOST_ROWS {
            return Err(format!("more than {MOST_ROWS} registers of one kind"));
        }
        self.rows[i] += n;
        Ok(nth(width, first))
    }

    pub fn bind(&mut self, name: &str, s: Symbol) {
        self.braces[self.current].names.insert(name.to_owned(), s);
    }

    /// Declares a variable of a body.
    pub fn declare(&mut self, v: &Variable) -> Result<(), String> {
        let (bytes, align) = super::extent(v)?;
        match v.space {
            Space::Reg => {
                let width = match v.ty {
                    Ty::Pred => Width::Bit,
                    t if t.bytes() == 8 => Width::W64,
                    _ => Width::W32,
                };
                let n = v.count.unwrap_or(1);
                let reg = self.row(width, n)?;
                if v.range {
                    self.braces[self.current].ranges.insert(v.name.clone(), (reg, n));
                } else {
                    self.bind(&v.name, Symbol::Register(reg));
                }
            }
            Space::Shared if v.external => self.bind(&v.name, Symbol::Shared(u64::MAX)),
            Space::Shared => {
                let at = reserve(&mut self.shared_bytes, align, bytes)?;
                self.bind(&v.name, Symbol::Shared(at));
            }
            // Parameters of calls are the thread's own memory.
            Space::Local | Space::Param => {
                let at = reserve(&mut self.local_bytes, align, bytes)?;
                self.bind(&v.name, Symbol::Local(at));
            }
            Space::Global | Space::Const => return Err("a global variable inside of a body".into()),
        }
        Ok(())
    }

    /// What a name stands for in some braces.
    pub fn find_from(&self, mut at: usize, name: &str) -> Option<Symbol> {
        loop {
            let b = &self.braces[at];
            if let Some(s) = b.names.get(name) {
                return Some(s.clone());
            }
            let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
            if prefix.len() < name.len()
                && let Some(&(first, n)) = b.ranges.get(prefix)
                && let Ok(i) = name[prefix.len()..].parse::<u64>()
                && i < n
            {
                return Some(Symbol::Register(step(first, i)));
            }
            at = b.parent?;
        }
    }

    pub fn find(&self, name: &str) -> Option<Symbol> {
        self.find_from(self.current, name)
    }

    /// A row that holds a number.
    pub fn constant(&mut self, v: u64, width: Width) -> Result<Reg, String> {
        let v = if width == Width::W32 { v & 0xffff_ffff } else { v };
        if let Some(&r) = self.by_value.get(&(v, width as u8)) {
            return Ok(r);
        }
        let r = self.row(width, 1)?;
        self.constants.push((r, v));
        self.by_value.insert((v, width as u8), r);
        Ok(r)
    }

    fn special(&mut self, s: Special) -> Result<Reg, String> {
        if let Some(&(r, _)) = self.specials.iter().find(|(_, k)| *k == s) {
            return Ok(r);
        }
        let r = self.row(Width::W32, 1)?;
        self.specials.push((r, s));
        Ok(r)
    }

    /// The row that holds the dynamic shared block's address plus an offset.
    fn dynamic(&mut self, offset: i64) -> Result<Reg, String> {
        if let Some(&(r, _)) = self.dynamic.iter().find(|(_, o)| *o == offset) {
            return Ok(r);
        }
        let r = self.row(Width::W32, 1)?;
        self.dynamic.push((r, offset));
        Ok(r)
    }

    /// The row of an operand, read as `width`.
    pub fn operand(&mut self, o: &Operand, width: Width) -> Result<Reg, String> {
        let r = match o {
            Operand::Number(v) => self.constant(*v, width)?,
            Operand::Not(name) => match self.find(name) {
                Some(Symbol::Register(Reg::P(i))) => Reg::NotP(i),
                _ => return Err(format!("`!{name}` is no predicate")),
            },
            Operand::Name(name) if name == "_" => return Ok(Reg::None),
            Operand::Name(name) => self.named(name, width, 0)?,
            Operand::Memory(base, offset) => match &**base {
                Operand::Name(name) if self.find(name).is_none_or(|s| !matches!(s, Symbol::Register(_))) => {
                    self.named(name, width, *offset)?
                }
                _ => return Err("an address where a value belongs".into()),
            },
            _ => return Err("a list where a value belongs".into()),
        };
        if matches!(r, Reg::P(_) | Reg::NotP(_)) != (width == Width::Bit) {
            return Err(format!(
                "{} where {} belongs",
                kind(r),
                if width == Width::Bit { "a predicate" } else { "a value" }
            ));
        }
        Ok(r)
    }

    fn named(&mut self, name: &str, width: Width, offset: i64) -> Result<Reg, String> {
        match self.find(name) {
            Some(Symbol::Register(r)) => return Ok(r),
            Some(Symbol::Shared(u64::MAX)) => return self.dynamic(offset),
            Some(Symbol::Shared(a) | Symbol::Local(a) | Symbol::Parameter(a)) => {
                return self.constant(a.wrapping_add(offset as u64), width);
            }
            Some(Symbol::Label(_) | Symbol::Targets(_)) => return Err(format!("label `{name}` is no value")),
            None => {}
        }
        match self.scope.globals.get(name) {
            Some(Global::Data(a)) => return self.constant(a.wrapping_add(offset as u64), width),
            Some(Global::Dynamic) => return self.dynamic(offset),
            Some(&Global::Shared(align, bytes)) => {
                let at = match self.shared_globals.get(name) {
                    Some(&at) => at,
                    None => reserve(&mut self.shared_bytes, align, bytes)?,
                };
                self.shared_globals.insert(name.to_owned(), at);
                return self.constant(at.wrapping_add(offset as u64), width);
            }
            None => {}
        }
        match special(name) {
            Some(Named::Row(s)) => self.special(s),
            Some(Named::Value(v)) => self.constant(v, width),
            None if name.starts_with('%') => {
                Err(format!("register `{name}` is not declared and no special one that is supported"))
            }
            None => Err(format!("`{name}` is not declared")),
        }
    }
}

/// A register in words.
fn kind(r: Reg) -> &'static str {
    match r {
        Reg::P(_) | Reg::NotP(_) => "a predicate",
        _ => "a value",
    }
}

fn nth(width: Width, i: u64) -> Reg {
    let i = i as u16;
    match width {
        Width::W32 => Reg::R(i),
        Width::W64 => Reg::D(i),
        Width::Bit => Reg::P(i),
    }
}

fn step(first: Reg, i: u64) -> Reg {
    let add = |b: u16| b.wrapping_add(i as u16);
    match first {
        Reg::R(b) => Reg::R(add(b)),
        Reg::D(b) => Reg::D(add(b)),
        Reg::P(b) => Reg::P(add(b)),
        r => r,
    }
}

/// Room for `bytes` at an aligned place.
fn reserve(used: &mut u64, align: u64, bytes: u64) -> Result<u64, String> {
    let at = used.next_multiple_of(align);
    if at + bytes > MOST_BYTES {
        return Err(format!("more than {MOST_BYTES} bytes of its space"));
    }
    *used = at + bytes;
    Ok(at)
}

enum Named {
    Row(Special),
    Value(u64),
}

fn special(name: &str) -> Option<Named> {
    let axis = |a: &str| match a {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((what, a)) = name.split_once('.') {
        let a = axis(a)?;
        return Some(Named::Row(match what {
            "%tid" => Special::Tid(a),
            "%ntid" => Special::Ntid(a),
            "%ctaid" => Special::Ctaid(a),
            "%nctaid" => Special::Nctaid(a),
            _ => return None,
        }));
    }
    Some(Named::Row(match name {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%lanemask_eq" => Special::LaneMask(MaskKind::Eq),
        "%lanemask_lt" => Special::LaneMask(MaskKind::Lt),
        "%lanemask_le" => Special::LaneMask(MaskKind::Le),
        "%lanemask_gt" => Special::LaneMask(MaskKind::Gt),
        "%lanemask_ge" => Special::LaneMask(MaskKind::Ge),
        "%dynamic_smem_size" => Special::DynamicShared,
        // Time stands still; a block is a cluster of its own, on multiprocessor 0 of 1.
        "%clock" | "%clock_hi" | "%clock64" | "%globaltimer" | "%globaltimer_lo" | "%smid"
        | "%cluster_ctarank" => {
            return Some(Named::Value(0));
        }
        "%nsmid" | "%cluster_nctarank" => return Some(Named::Value(1)),
        "WARP_SZ" => return Some(Named::Value(32)),
        _ => return None,
    }))
}
