/*! The statements of a PTX module as written, with lines; names are not resolved. */

use crate::ty::Ty;

/// Where a variable lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Reg,
    Param,
    Global,
    Const,
    Shared,
    Local,
}

/// A declared variable, register range or parameter.
#[derive(Clone, Debug)]
pub struct Variable {
    pub space: Space,
    pub ty: Ty,
    pub name: String,
    /// Bytes; 0 where none was written.
    pub align: u64,
    /// Elements; `None` for `name[]`.
    pub count: Option<u64>,
    /// `%r<10>`: ten registers.
    pub range: bool,
    pub external: bool,
    pub init: Vec<Init>,
    pub line: u32,
}

/// An element of an initialiser.
#[derive(Clone, Debug)]
pub enum Init {
    Value(u64),
    /// The address of a variable, plus a number.
    Address(String, i64),
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    Name(String),
    /// `!%p`.
    Not(String),
    /// Raw bits: of the 64-bit two's complement, of `0f…`, or of `0d…`.
    Number(u64),
    /// `[base + offset]`.
    Memory(Box<Operand>, i64),
    /// `{a, b}`.
    Group(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `(a, b)` of a call.
    Arguments(Vec<Operand>),
}

/// `@!%p`.
#[derive(Clone, Debug)]
pub struct Guard {
    pub register: String,
    pub negated: bool,
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub line: u32,
    pub guard: Option<Guard>,
    pub opcode: String,
    pub operands: Vec<Operand>,
}

/// A statement of a body.
#[derive(Clone, Debug)]
pub enum Statement {
    Declare(Variable),
    Label(String),
    /// `name: .branchtargets a, b;`
    Targets(String, Vec<String>),
    Instruction(Instruction),
    Open,
    Close,
    /// `.loc file line column`: file and line of the source.
    Location(u32, u32),
}

/// `.entry` or `.func`.
#[derive(Clone, Debug)]
pub struct Function {
    pub name: String,
    pub entry: bool,
    pub results: Vec<Variable>,
    pub parameters: Vec<Variable>,
    /// `.maxntid`, `.reqntid` …: name without dot and numbers.
    pub directives: Vec<(String, Vec<u64>)>,
    /// `None` for a declaration.
    pub body: Option<Vec<Statement>>,
}

/// A whole file.
#[derive(Clone, Debug, Default)]
pub struct File {
    pub version: String,
    pub target: String,
    pub variables: Vec<Variable>,
    pub functions: Vec<Function>,
    /// Names of `.file` by number.
    pub sources: Vec<(u32, String)>,
}
