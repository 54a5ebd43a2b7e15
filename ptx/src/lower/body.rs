/*! One kernel: its statements, with the bodies of the functions that it calls copied in. */

use super::operands::{Names, Symbol};
use super::{Lowered, Scope, extent};
use crate::error::Issue;
use crate::exec::regs::Width;
use crate::ir::{Inst, Op, Parameter, Program, Reg, Space};
use crate::text::ast::{Function, Instruction, Operand, Statement};
use crate::ty::Ty;
use std::collections::BTreeMap;

/// Instructions that a kernel may have once calls are copied in.
const MOST_CODE: usize = 1 << 20;
/// Calls inside of calls.
const MOST_DEPTH: usize = 16;

/// Which forms a kernel uses.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Form as written: how often, and the first line.
    pub forms: BTreeMap<String, (u32, u32)>,
    /// Lines of multiplications and additions that ptxas may fuse.
    pub fusible: Vec<u32>,
}

/// A branch whose target is not known yet.
pub enum Fix {
    Branch(usize, String, usize),
    Table(usize, String, usize),
}

/// A kernel in the making.
pub struct Lowerer<'a> {
    pub names: Names<'a>,
    pub code: Vec<Inst>,
    pub fixes: Vec<Fix>,
    /// Returns of the functions being copied in, to be sent to their ends; empty at the kernel's own level.
    pub returns: Vec<Vec<usize>>,
    issues: Vec<Issue>,
    usage: Usage,
    function: String,
    calls: Vec<String>,
    source: (u32, u32),
    pub granule: u32,
}

/// Lowers a kernel; what can't be lowered is listed.
pub fn kernel(f: &Function, scope: &Scope<'_>) -> Lowered {
    let mut l = Lowerer {
        names: Names::new(scope),
        code: Vec::new(),
        fixes: Vec::new(),
        returns: Vec::new(),
        issues: Vec::new(),
        usage: Usage::default(),
        function: f.name.clone(),
        calls: vec![f.name.clone()],
        source: (0, 0),
        granule: 16,
    };
    let (parameters, parameter_bytes) = l.parameters(f);
    l.body(f.body.as_deref().unwrap_or_default());
    l.resolve();

    let shared_bytes = l.names.shared_bytes;
    let dynamic_base = shared_bytes.next_multiple_of(128);
    let mut constants = l.names.constants.clone();
    for &(r, offset) in &l.names.dynamic {
        constants.push((r, dynamic_base.wrapping_add(offset as u64)));
    }
    let threads = |name: &str| {
        let (_, n) = f.directives.iter().find(|(d, _)| d == name)?;
        let at = |i: usize| n.get(i).map_or(1, |&v| v.min(1 << 20) as u32);
        Some([at(0), at(1), at(2)])
    };
    let exact = threads("reqntid");
    let program = Program {
        name: f.name.clone(),
        parameters,
        parameter_bytes,
        rows: l.names.rows(),
        constants,
        specials: l.names.specials.clone(),
        shared_bytes: shared_bytes as u32,
        dynamic_shared: !l.names.dynamic.is_empty(),
        local_bytes: l.names.local_bytes.next_multiple_of(16) as u32,
        max_threads: exact.or_else(|| threads("maxntid")),
        exact_threads: exact.is_some(),
        granule: l.granule,
        code: l.code,
    };
    Lowered { program, issues: l.issues, usage: l.usage }
}

impl Lowerer<'_> {
    pub fn issue(&mut self, line: u32, what: &str, why: String) {
        let function = self.function.clone();
        self.issues.push(Issue { line, function, what: what.to_owned(), why });
    }

    fn parameters(&mut self, f: &Function) -> (Vec<Parameter>, u32) {
        let (mut all, mut used) = (Vec::new(), 0u64);
        for p in &f.parameters {
            let (bytes, align) = match extent(p) {
                Ok(e) => e,
                Err(why) => {
                    self.issue(p.line, &p.name, why);
                    continue;
                }
            };
            // `.ptr .align 1` speaks of what the pointer points to.
            let offset = used.next_multiple_of(align.max(u64::from(p.ty.bytes()).max(1)));
            if offset + bytes > 32764 {
                self.issue(p.line, &p.name, "parameters beyond 32,764 bytes".into());
                continue;
            }
            used = offset + bytes;
            self.names.bind(&p.name, Symbol::Parameter(offset));
            all.push(Parameter {
                name: p.name.clone(),
                offset: offset as u32,
                bytes: bytes as u32,
                ty: p.ty,
            });
        }
        (all, used as u32)
    }

    fn body(&mut self, statements: &[Statement]) {
        for s in statements {
            match s {
                Statement::Open => self.names.open(true),
                Statement::Close => self.names.close(),
                Statement::Location(file, line) => self.source = (*file, *line),
                Statement::Label(name) => {
                    let pc = self.code.len() as u32;
                    self.names.bind(name, Symbol::Label(pc));
                }
                Statement::Targets(name, t) => self.names.bind(name, Symbol::Targets(t.clone())),
                Statement::Declare(v) => {
                    if let Err(why) = self.names.declare(v) {
                        self.issue(v.line, &v.name, why);
                    }
                }
                Statement::Instruction(i) => {
                    if self.code.len() >= MOST_CODE {
                        self.issue(i.line, &i.opcode, format!("more than {MOST_CODE} instructions"));
                        return;
                    }
                    if let Err(why) = self.instruction(i) {
                        self.issue(i.line, &i.opcode, why);
                    }
                }
            }
        }
    }

    fn instruction(&mut self, i: &Instruction) -> Result<(), String> {
        let used = self.usage.forms.entry(i.opcode.clone()).or_insert((0, i.line));
        used.0 += 1;
        if fusible(&i.opcode) {
            self.usage.fusible.push(i.line);
        }
        let guard = match &i.guard {
            None => None,
            Some(g) => match self.names.find(&g.register) {
                Some(Symbol::Register(Reg::P(p))) => Some((p, g.negated)),
                _ => return Err(format!("guard `{}` is no predicate", g.register)),
            },
        };
        if i.opcode == "call" || i.opcode.starts_with("call.") {
            return self.call(i, guard);
        }
        let inst = Inst {
            op: Op::Nothing,
            guard,
            dst: [Reg::None; 4],
            src: [Reg::None; 10],
            offset: 0,
            offset2: 0,
            line: i.line,
            source: self.source,
        };
        self.lower(i, inst)
    }

    /// The statements of a function in place of the call; its parameters are the caller's variables.
    fn call(&mut self, i: &Instruction, guard: Option<(u16, bool)>) -> Result<(), String> {
        if i.opcode != "call" && i.opcode != "call.uni" {
            return Err("unknown form".into());
        }
        let (mut results, mut rest) = (&[][..], &i.operands[..]);
        if let Some(Operand::Arguments(r)) = rest.first() {
            (results, rest) = (&r[..], &rest[1..]);
        }
        let Some(Operand::Name(name)) = rest.first() else {
            return Err("the function's name is missing".into());
        };
        let arguments = match rest.get(1) {
            None => &[][..],
            Some(Operand::Arguments(a)) => &a[..],
            _ => return Err("arguments belong in parentheses".into()),
        };
        if rest.len() > 2 {
            return Err("calls through a pointer are not supported".into());
        }
        let Some(&f) = self.names.scope.functions.get(name.as_str()) else {
            if let Some(system) = System::named(name) {
                return self.system_call(system, results, guard, i.line);
            }
            return Err(format!("function `{name}` has no body here"));
        };
        if self.calls.contains(name) || self.calls.len() >= MOST_DEPTH {
            return Err(format!("`{name}` is recursive or nested too deep"));
        }
        if f.results.len() != results.len() || f.parameters.len() != arguments.len() {
            return Err(format!("`{name}` takes other arguments"));
        }
        let mut bound = Vec::new();
        for (v, o) in f.results.iter().zip(results).chain(f.parameters.iter().zip(arguments)) {
            match o {
                Operand::Name(n) => match self.names.find(n) {
                    Some(s @ Symbol::Local(_)) if v.space == crate::text::ast::Space::Param => {
                        bound.push((v.name.clone(), s));
                    }
                    _ => return Err("arguments in registers are not supported".into()),
                },
                _ => return Err("an argument that is no variable".into()),
            }
        }
        // A guarded call: those that don't make it jump over it.
        let skip = guard.map(|(p, negated)| {
            let at = self.code.len();
            self.push(Op::Branch(0), Some((p, !negated)), i.line);
            at
        });
        let (outer, function, source) = (self.names.current, self.function.clone(), self.source);
        self.names.open(false);
        for (n, s) in bound {
            self.names.bind(&n, s);
        }
        self.calls.push(name.clone());
        self.returns.push(Vec::new());
        self.function = format!("{function} → {name}");
        self.body(f.body.as_deref().unwrap_or_default());
        self.function = function;
        self.calls.pop();
        self.names.current = outer;
        self.source = source;
        let end = self.code.len() as u32;
        for at in self.returns.pop().unwrap_or_default().into_iter().chain(skip) {
            self.code[at].op = Op::Branch(end);
        }
        Ok(())
    }

    /// What `assert` and `printf` in a kernel become.
    fn system_call(
        &mut self,
        system: System,
        results: &[Operand],
        guard: Option<(u16, bool)>,
        line: u32,
    ) -> Result<(), String> {
        match (system, results) {
            (System::Assertion, []) => self.push(Op::Trap, guard, line),
            (System::Print, [result]) => {
                let (to, zero) =
                    (self.names.operand(result, Width::W64)?, self.names.constant(0, Width::W32)?);
                self.push(Op::Store { space: Space::Local, ty: Ty::B32, count: 1 }, guard, line);
                if let Some(x) = self.code.last_mut() {
                    (x.src[0], x.src[1]) = (to, zero);
                }
            }
            _ => return Err("a system call with other results".into()),
        }
        Ok(())
    }

    fn push(&mut self, op: Op, guard: Option<(u16, bool)>, line: u32) {
        let source = self.source;
        self.code.push(Inst {
            op,
            guard,
            dst: [Reg::None; 4],
            src: [Reg::None; 10],
            offset: 0,
            offset2: 0,
            line,
            source,
        });
    }

    /// Branch targets, once every label is known.
    fn resolve(&mut self) {
        for fix in std::mem::take(&mut self.fixes) {
            let (Fix::Branch(pc, ref name, at) | Fix::Table(pc, ref name, at)) = fix;
            let op = match (&fix, self.names.find_from(at, name)) {
                (Fix::Branch(..), Some(Symbol::Label(to))) => Ok(Op::Branch(to)),
                (Fix::Table(..), Some(Symbol::Targets(t))) => t
                    .iter()
                    .map(|n| match self.names.find_from(at, n) {
                        Some(Symbol::Label(to)) => Ok(to),
                        _ => Err(n.clone()),
                    })
                    .collect::<Result<_, _>>()
                    .map(Op::Table),
                _ => Err(name.clone()),
            };
            match op {
                Ok(op) => self.code[pc].op = op,
                Err(n) => {
                    let line = self.code[pc].line;
                    self.issue(line, "bra", format!("there is no label `{n}`"));
                }
            }
        }
    }

    /// An access of so many bytes may touch shared memory.
    pub fn touches(&mut self, space: Space, bytes: u32) {
        if matches!(space, Space::Shared | Space::Generic) && bytes.is_power_of_two() {
            self.granule = self.granule.min(bytes);
        }
    }
}

/// Functions that the driver provides.
#[derive(Clone, Copy)]
enum System {
    /// A failed `assert`: ends the launch, as a trap does.
    Assertion,
    /// `printf`: nothing is printed, and its result is 0 values.
    Print,
}

impl System {
    fn named(name: &str) -> Option<System> {
        match name {
            "__assertfail" => Some(System::Assertion),
            "vprintf" => Some(System::Print),
            _ => None,
        }
    }
}

/// Whether ptxas may contract an instruction with another: it says no rounding.
fn fusible(opcode: &str) -> bool {
    let mut parts = opcode.split('.');
    matches!(parts.next(), Some("add" | "sub" | "mul"))
        && opcode
            .rsplit('.')
            .next()
            .is_some_and(|t| matches!(t, "f32" | "f64" | "f16" | "f16x2" | "bf16" | "bf16x2"))
        && !parts.any(|m| matches!(m, "rn" | "rz" | "rm" | "rp" | "sat"))
}
