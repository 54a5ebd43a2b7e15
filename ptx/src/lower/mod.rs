/*!
From statements to programs: names are resolved, registers laid out, calls copied in, and every instruction is looked
up in the closed table ([`crate::table`]) or in the grammars of [`forms`]. What is in neither is an [`Issue`].
*/

mod body;
mod forms;
mod operands;

use crate::error::Issue;
use crate::ir::Program;
use crate::mem::MODULE;
use crate::text::ast::{File, Function, Init, Space, Variable};
use std::collections::{BTreeMap, HashMap};

pub use body::Usage;

/// Bytes of module variables that are taken.
const MOST_DATA: u64 = 64 << 20;

/// What a name at module scope is.
#[derive(Clone, Debug)]
pub enum Global {
    /// At this address of the module's window.
    Data(u64),
    /// Static shared memory, laid out in each kernel that uses it: alignment and bytes.
    Shared(u64, u64),
    /// The dynamic shared block.
    Dynamic,
}

/// A file's names at module scope.
pub struct Scope<'a> {
    pub globals: HashMap<String, Global>,
    pub functions: HashMap<&'a str, &'a Function>,
    pub sm: u32,
}

/// A kernel that was lowered, or as far as it could be.
pub struct Lowered {
    pub program: Program,
    pub issues: Vec<Issue>,
    pub usage: Usage,
}

/// Bytes and alignment of a variable.
fn extent(v: &Variable) -> Result<(u64, u64), String> {
    let element = u64::from(v.ty.bytes());
    let align = if v.align == 0 { element.max(1) } else { v.align };
    if !align.is_power_of_two() || align > 4096 {
        return Err(format!("an alignment of {align}"));
    }
    let bytes = v.count.unwrap_or(0).checked_mul(element).filter(|&b| b <= MOST_DATA);
    Ok((bytes.ok_or("too large")?, align))
}

/// Lays out variables; the image of the module's data.
pub fn module<'a>(file: &'a File, sm: u32, issues: &mut Vec<Issue>) -> (Scope<'a>, Vec<u8>) {
    let mut globals = HashMap::new();
    let mut image: Vec<u8> = Vec::new();
    let mut places: Vec<(usize, &Variable)> = Vec::new();
    for v in &file.variables {
        let mut complain = |why: String| {
            let what = v.name.clone();
            issues.push(Issue { line: v.line, function: String::new(), what, why });
        };
        let (bytes, align) = match extent(v) {
            Ok(e) => e,
            Err(why) => {
                complain(why);
                continue;
            }
        };
        let global = match v.space {
            Space::Shared if v.external || v.count.is_none() => Global::Dynamic,
            Space::Shared => Global::Shared(align, bytes),
            Space::Global | Space::Const if v.external => {
                complain("variables of other modules are not supported".into());
                continue;
            }
            Space::Global | Space::Const => {
                let element = u64::from(v.ty.bytes()).max(1);
                // `name[] = {…}` has as many elements as its initialiser.
                let bytes = if v.count.is_none() { v.init.len() as u64 * element } else { bytes };
                let at = (image.len() as u64).next_multiple_of(align.max(4));
                if at + bytes > MOST_DATA {
                    complain(format!("the module's variables take more than {MOST_DATA} bytes"));
                    continue;
                }
                if v.init.len() as u64 * element > bytes {
                    complain("more initial values than elements".into());
                    continue;
                }
                image.resize((at + bytes) as usize, 0);
                places.push((at as usize, v));
                Global::Data(MODULE + at)
            }
            space => {
                complain(format!("a variable in {space:?} space at module scope"));
                continue;
            }
        };
        globals.insert(v.name.clone(), global);
    }
    for (at, v) in places {
        let n = v.ty.bytes() as usize;
        for (i, init) in v.init.iter().enumerate() {
            let value = match init {
                Init::Value(x) => *x,
                Init::Address(name, offset) => match globals.get(name) {
                    Some(Global::Data(a)) => a.wrapping_add(*offset as u64),
                    _ => {
                        let (what, why) =
                            (v.name.clone(), format!("its initial value {name:?} is no variable"));
                        issues.push(Issue { line: v.line, function: String::new(), what, why });
                        continue;
                    }
                },
            };
            image[at + i * n..at + (i + 1) * n].copy_from_slice(&value.to_le_bytes()[..n]);
        }
    }
    let functions =
        file.functions.iter().filter(|f| f.body.is_some()).map(|f| (f.name.as_str(), f)).collect();
    (Scope { globals, functions, sm }, image)
}

/// Lowers every kernel of a file.
pub fn kernels(file: &File, scope: &Scope<'_>) -> BTreeMap<String, Lowered> {
    file.functions
        .iter()
        .filter(|f| f.entry && f.body.is_some())
        .map(|f| (f.name.clone(), body::kernel(f, scope)))
        .collect()
}
