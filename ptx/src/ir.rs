/*!
What a kernel is after lowering: instructions whose operands are places in dense register files.

Registers are untyped: 16- and 32-bit ones share a file of 32-bit rows, 64-bit ones have their own, predicates are one
bit a lane. An operation reads the width it needs from whatever row it is given (a wider row gives its low half, a
narrower one is zero-extended), as PTX compilers rely on. Immediates and special registers are rows too, filled once.
*/

use crate::exec::mma::Shape;
use crate::exec::regs::{Compare, Kern};
use crate::ty::Ty;

/// A place in a register file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reg {
    /// Absent, or `_`.
    None,
    /// Row of the 32-bit file.
    R(u16),
    /// Row of the 64-bit file.
    D(u16),
    /// Predicate.
    P(u16),
    /// Predicate, negated.
    NotP(u16),
}

/// Registers that the machine sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    LaneMask(MaskKind),
    DynamicShared,
}

/// Which lanes a `%lanemask_*` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    Eq,
    Lt,
    Le,
    Gt,
    Ge,
}

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
}

/// How a setp joins its comparison with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    None,
    And,
    Or,
    Xor,
}

/// Operation of `atom`, `red` and `redux`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

/// `shfl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `vote` and `bar.red` with a predicate result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// What `bar.red` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    And,
    Or,
    Popc,
}

/// Operations on an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mbarrier {
    Init,
    Inval,
    /// `arrive`: count in `src[1]` or 1; `tx` bytes expected in `src[2]`; `drop` lowers the expected count.
    Arrive {
        drop: bool,
    },
    ExpectTx,
    /// `src[1]`: state, or parity. `patient`: try_wait, which here sleeps until the phase is over.
    Wait {
        patient: bool,
    },
}

/// The closed set of operations.
#[derive(Clone, Debug)]
pub enum Op {
    /// A function of each lane's sources.
    Lanes(Kern),
    /// A comparison; `dst[0]` is it, `dst[1]` its complement, each joined with `src[2]`.
    Compare(Compare, Join),
    /// Sources side by side, least significant first, `bits` each.
    Pack {
        parts: u8,
        bits: u8,
    },
    Unpack {
        parts: u8,
        bits: u8,
    },
    /// `src[0]` and the offset give the address; `dst[..count]`.
    Load {
        space: Space,
        ty: Ty,
        count: u8,
    },
    /// The same from the kernel's parameters.
    Parameter {
        ty: Ty,
        count: u8,
    },
    Store {
        space: Space,
        ty: Ty,
        count: u8,
    },
    Atomic {
        space: Space,
        ty: Ty,
        update: Update,
    },
    Shuffle(Shuffle),
    Vote(Vote),
    Match {
        all: bool,
        wide: bool,
    },
    Redux {
        update: Update,
        signed: bool,
    },
    ActiveMask,
    Branch(u32),
    Table(Box<[u32]>),
    Exit,
    Trap,
    Barrier {
        arrive: bool,
        reduce: Option<Reduce>,
    },
    WarpBarrier,
    LoadMatrix {
        count: u8,
        transposed: bool,
    },
    StoreMatrix {
        count: u8,
        transposed: bool,
    },
    Mma(Shape),
    /// `src`: shared address, global address, bytes to read or absent.
    CopyAsync {
        bytes: u8,
    },
    CommitCopies,
    /// Groups that may stay outstanding; `None`: `wait_all`.
    WaitCopies(Option<u32>),
    /// `src`: shared address, global address, bytes, mbarrier.
    CopyBulk,
    Mbarrier(Mbarrier),
    Nothing,
}

/// A lowered instruction.
#[derive(Clone, Debug)]
pub struct Inst {
    pub op: Op,
    /// Predicate and whether it is negated.
    pub guard: Option<(u16, bool)>,
    pub dst: [Reg; 4],
    pub src: [Reg; 10],
    /// Added to the address in `src[0]`; `offset2` to the one in `src[1]`.
    pub offset: i64,
    pub offset2: i64,
    pub line: u32,
    /// File and line of the source by `.loc`; 0 where there is none.
    pub source: (u32, u32),
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// As in the PTX.
    pub name: String,
    /// From the start of the parameter space.
    pub offset: u32,
    /// Bytes it takes.
    pub bytes: u32,
    /// Element type.
    pub ty: Ty,
}

/// A kernel ready to run.
#[derive(Clone, Debug)]
pub struct Program {
    pub name: String,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: u32,
    pub code: Vec<Inst>,
    /// Rows of each file.
    pub rows: [u32; 3],
    pub constants: Vec<(Reg, u64)>,
    pub specials: Vec<(Reg, Special)>,
    pub shared_bytes: u32,
    pub dynamic_shared: bool,
    pub local_bytes: u32,
    pub max_threads: Option<[u32; 3]>,
    pub exact_threads: bool,
    /// Bytes of the smallest access that may touch shared memory: what the shadow counts in.
    pub granule: u32,
}
