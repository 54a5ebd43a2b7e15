/*!
The part of Python's pickle that tensors need, and nothing else.

A pickle is a program for a stack machine that may call anything. This reader builds values: numbers, strings, tuples,
lists, dictionaries, storages and tensors. A name of Python is looked up in a closed list ([`Global`]); what is not in
it, and any opcode beyond those that `torch.save` writes, is an error that names it. Nothing is imported, nothing is called.

Opcodes: CPython's pickletools, protocols 2 to 5.
*/

use super::Stored;
use mla_numeric::DType;
use std::collections::HashMap;

/// Depth and number of values that a file of tensors never reaches.
const MOST_VALUES: usize = 1 << 22;
const MOST_DEPTH: usize = 64;

/// Names of Python that are known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Global {
    /// A class of storage: the dtype of its elements (None: bytes, the tensor says).
    Storage(Option<Stored>),
    /// A torch.dtype.
    DType(Stored),
    /// torch._utils._rebuild_tensor_v2 or _v3.
    Tensor,
    /// torch._utils._rebuild_parameter.
    Parameter,
    /// collections.OrderedDict.
    Dict,
    /// torch.Size.
    Size,
    /// torch.device: an argument of what is left out.
    Device,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// None, a bool, a float or a large number: nothing that tensors are read from.
    Other,
    /// An integer.
    Int(i64),
    /// A string.
    Text(String),
    /// A tuple or list.
    List(Vec<Value>),
    /// A dictionary, in order.
    Dict(Vec<(Value, Value)>),
    /// A name.
    Global(Global),
    /// A storage: its key in the archive, dtype, elements.
    Storage(String, Option<Stored>, usize),
    /// A tensor.
    Tensor(Box<Strided>),
}

/// A tensor as a view of a storage.
#[derive(Clone, Debug, PartialEq)]
pub struct Strided {
    /// Key of the storage.
    pub key: String,
    /// Elements.
    pub stored: Stored,
    /// First element.
    pub offset: usize,
    /// Lengths.
    pub shape: Vec<usize>,
    /// Elements from one index to the next.
    pub strides: Vec<usize>,
}

/// What stands in the pickle that is not read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// An opcode.
    #[error("its pickle has opcode {0:#04x} at byte {1}, which no file of tensors needs")]
    Opcode(u8, usize),
    /// A name.
    #[error("its pickle names {0}, which is no tensor, and nothing else is read")]
    Global(String),
    /// It ends early, or values are not where they should be.
    #[error("its pickle is damaged at byte {0}: {1}")]
    Damaged(usize, &'static str),
}

use PickleError::Damaged;

/// The dtype of a torch name, without `Storage` for storages.
fn dtype(name: &str) -> Option<Stored> {
    Some(match name {
        "Double" | "float64" | "double" => Stored::Float(DType::F64),
        "Float" | "float32" | "float" => Stored::Float(DType::F32),
        "Half" | "float16" | "half" => Stored::Float(DType::F16),
        "BFloat16" | "bfloat16" => Stored::Float(DType::Bf16),
        "float8_e4m3fn" => Stored::Float(DType::E4m3),
        "Long" | "int64" | "long" => Stored::Int(8),
        "Int" | "int32" | "int" => Stored::Int(4),
        "Short" | "int16" | "short" => Stored::Int(2),
        "Char" | "int8" => Stored::Int(1),
        "Byte" | "uint8" => Stored::UInt(1),
        "uint16" => Stored::UInt(2),
        "uint32" => Stored::UInt(4),
        "uint64" => Stored::UInt(8),
        "Bool" | "bool" => Stored::Bool,
        _ => return None,
    })
}

fn global(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3") => Global::Tensor,
        ("torch._utils", "_rebuild_parameter") => Global::Parameter,
        ("collections", "OrderedDict") => Global::Dict,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch.storage", "UntypedStorage") | ("torch", "UntypedStorage") => Global::Storage(None),
        ("torch", name) => match name.strip_suffix("Storage") {
            Some(kind) => Global::Storage(Some(dtype(kind)?)),
            None => Global::DType(dtype(name)?),
        },
        _ => return None,
    })
}

struct Machine<'a> {
    code: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u64, Value>,
    made: usize,
}

/// Reads a pickle.
pub fn parse(code: &[u8]) -> Result<Value, PickleError> {
    let mut m = Machine { code, at: 0, stack: Vec::new(), marks: Vec::new(), memo: HashMap::new(), made: 0 };
    while !m.step()? {}
    m.pop()
}

impl<'a> Machine<'a> {
    fn damaged(&self, what: &'static str) -> PickleError {
        Damaged(self.at, what)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(n).filter(|e| *e <= self.code.len());
        let end = end.ok_or(Damaged(self.at, "it ends too early"))?;
        let part = &self.code[self.at..end];
        self.at = end;
        Ok(part)
    }

    /// A little-endian number of n bytes.
    fn number(&mut self, n: usize) -> Result<u64, PickleError> {
        Ok(self.take(n)?.iter().rev().fold(0, |a, b| a << 8 | u64::from(*b)))
    }

    fn line(&mut self) -> Result<&'a str, PickleError> {
        let rest = &self.code[self.at..];
        let n = rest.iter().position(|b| *b == b'\n').ok_or(self.damaged("a name has no end"))?;
        let line = self.take(n)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| self.damaged("a name is no text"))
    }

    fn text(&mut self, width: usize) -> Result<(), PickleError> {
        let n = self.number(width)?;
        let n = usize::try_from(n).map_err(|_| self.damaged("a text is too long"))?;
        let text = self.take(n)?;
        self.push(Value::Text(String::from_utf8_lossy(text).into_owned()))
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        // Copies of what was remembered count with all they hold: else a small file could grow without end.
        self.made += size(&value, MOST_DEPTH).ok_or(self.damaged("it is nested too deep"))?;
        if self.made > MOST_VALUES {
            return Err(self.damaged("it holds too many values"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.damaged("a value is missing"));
        }
        self.stack.pop().ok_or(self.damaged("a value is missing"))
    }

    /// What stands above the last mark.
    fn marked(&mut self) -> Result<Vec<Value>, PickleError> {
        let at = self.marks.pop().ok_or(self.damaged("a mark is missing"))?;
        if at > self.stack.len() {
            return Err(self.damaged("a mark is misplaced"));
        }
        Ok(self.stack.split_off(at))
    }

    fn top(&mut self) -> Result<&mut Value, PickleError> {
        let at = self.at;
        self.stack.last_mut().ok_or(Damaged(at, "a value is missing"))
    }

    fn extend(&mut self, items: Vec<Value>, dict: bool) -> Result<(), PickleError> {
        let at = self.at;
        // What is appended may have grown since it was pushed.
        if items.iter().any(|v| size(v, MOST_DEPTH - 1).is_none()) {
            return Err(Damaged(at, "it is nested too deep"));
        }
        match (self.top()?, dict) {
            (Value::List(list), false) => list.extend(items),
            (Value::Dict(all), true) if items.len().is_multiple_of(2) => {
                let mut items = items.into_iter();
                while let (Some(k), Some(v)) = (items.next(), items.next()) {
                    all.push((k, v));
                }
            }
            _ => return Err(Damaged(at, "items belong to nothing")),
        }
        Ok(())
    }

    fn tuple(&mut self, n: usize) -> Result<(), PickleError> {
        let mut items = Vec::new();
        for _ in 0..n {
            items.insert(0, self.pop()?);
        }
        self.push(Value::List(items))
    }

    fn name(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        let known = global(module, name);
        let known = known
            .ok_or_else(|| PickleError::Global(format!("{module}.{name}").escape_debug().to_string()))?;
        self.push(Value::Global(known))
    }

    fn remember(&mut self, key: u64) -> Result<(), PickleError> {
        let value = self.top()?.clone();
        // The memo holds a copy; containers are remembered before they are filled, and nobody reads them back then.
        self.memo.insert(key, value);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<(), PickleError> {
        let value =
            self.memo.get(&key).cloned().ok_or(self.damaged("it recalls what it never remembered"))?;
        self.push(value)
    }

    /// One opcode; true at the end.
    fn step(&mut self) -> Result<bool, PickleError> {
        let at = self.at;
        match self.take(1)?[0] {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'.' => return Ok(true),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b']' => self.push(Value::List(Vec::new()))?,
            b')' => self.push(Value::List(Vec::new()))?,
            b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
            b'G' => {
                self.take(8)?;
                self.push(Value::Other)?;
            }
            b'J' => {
                let n = self.number(4)? as u32 as i32;
                self.push(Value::Int(i64::from(n)))?;
            }
            b'K' => {
                let n = self.number(1)?;
                self.push(Value::Int(n as i64))?;
            }
            b'M' => {
                let n = self.number(2)?;
                self.push(Value::Int(n as i64))?;
            }
            0x8a => {
                let n = self.number(1)? as usize;
                let bytes = self.take(n)?;
                let value = match n {
                    0 => Value::Int(0),
                    1..=8 => {
                        let bits = bytes.iter().rev().fold(0u64, |a, b| a << 8 | u64::from(*b));
                        let free = 64 - 8 * n as u32;
                        Value::Int((bits << free) as i64 >> free)
                    }
                    _ => Value::Other,
                };
                self.push(value)?;
            }
            b'X' => self.text(4)?,
            0x8c => self.text(1)?,
            0x8d => self.text(8)?,
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.name(module, name)?;
            }
            0x93 => match (self.pop()?, self.pop()?) {
                (Value::Text(name), Value::Text(module)) => self.name(&module, &name)?,
                _ => return Err(self.damaged("a name is no text")),
            },
            b't' => {
                let items = self.marked()?;
                self.push(Value::List(items))?;
            }
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item], false)?;
            }
            b'e' => {
                let items = self.marked()?;
                self.extend(items, false)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend(vec![key, value], true)?;
            }
            b'u' => {
                let items = self.marked()?;
                self.extend(items, true)?;
            }
            b'q' => {
                let key = self.number(1)?;
                self.remember(key)?;
            }
            b'r' => {
                let key = self.number(4)?;
                self.remember(key)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' => {
                let key = self.number(1)?;
                self.recall(key)?;
            }
            b'j' => {
                let key = self.number(4)?;
                self.recall(key)?;
            }
            b'Q' => {
                let id = self.pop()?;
                let storage = storage(id).ok_or(self.damaged("a reference is to no storage"))?;
                self.push(storage)?;
            }
            b'R' => {
                let (args, what) = (self.pop()?, self.pop()?);
                let made = call(what, args).ok_or(self.damaged("a tensor's parts are not those of one"))?;
                self.push(made)?;
            }
            b'b' => {
                // A state dictionary carries notes on its modules' versions; nothing else has a state here.
                self.pop()?;
                if !matches!(self.top()?, Value::Dict(_)) {
                    return Err(self.damaged("a state belongs to nothing"));
                }
            }
            op => return Err(PickleError::Opcode(op, at)),
        }
        Ok(false)
    }
}

/// Values in a value; None where it is deeper than `depth`.
fn size(value: &Value, depth: usize) -> Option<usize> {
    let depth = depth.checked_sub(1)?;
    match value {
        Value::List(all) => all.iter().try_fold(1, |n, v| Some(n + size(v, depth)?)),
        Value::Dict(all) => all.iter().try_fold(1, |n, (k, v)| Some(n + size(k, depth)? + size(v, depth)?)),
        _ => Some(1),
    }
}

/// ('storage', class, key, device, elements)
fn storage(id: Value) -> Option<Value> {
    let Value::List(parts) = id else { return None };
    match parts.as_slice() {
        [Value::Text(kind), Value::Global(Global::Storage(stored)), Value::Text(key), _, Value::Int(n)]
            if kind == "storage" =>
        {
            Some(Value::Storage(key.clone(), *stored, usize::try_from(*n).ok()?))
        }
        _ => None,
    }
}

fn call(what: Value, args: Value) -> Option<Value> {
    let (Value::Global(what), Value::List(args)) = (what, args) else { return None };
    match (what, args.as_slice()) {
        (Global::Dict, []) => Some(Value::Dict(Vec::new())),
        (Global::Dict, [Value::List(pairs)]) => {
            let pair = |p: &Value| match p {
                Value::List(kv) if kv.len() == 2 => Some((kv[0].clone(), kv[1].clone())),
                _ => None,
            };
            Some(Value::Dict(pairs.iter().map(pair).collect::<Option<_>>()?))
        }
        (Global::Size, [Value::List(lens)]) => Some(Value::List(lens.clone())),
        (Global::Device, _) => Some(Value::Other),
        (Global::Parameter, [tensor @ Value::Tensor(_), ..]) => Some(tensor.clone()),
        (Global::Tensor, [Value::Storage(key, of, _), Value::Int(offset), shape, strides, rest @ ..]) => {
            let named = rest.iter().find_map(|v| match v {
                Value::Global(Global::DType(d)) => Some(*d),
                _ => None,
            });
            let tensor = Strided {
                key: key.clone(),
                stored: named.or(*of)?,
                offset: usize::try_from(*offset).ok()?,
                shape: lengths(shape)?,
                strides: lengths(strides)?,
            };
            (tensor.shape.len() == tensor.strides.len()).then(|| Value::Tensor(Box::new(tensor)))
        }
        _ => None,
    }
}

fn lengths(of: &Value) -> Option<Vec<usize>> {
    let Value::List(all) = of else { return None };
    let length = |v: &Value| match v {
        Value::Int(n) => usize::try_from(*n).ok(),
        _ => None,
    };
    all.iter().map(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python's pickle.dumps([1, -2, 300, 1 << 40, 'a', None, {'k': (True, 2.5)}], protocol=p) writes.
    #[test]
    fn plain_values() {
        let two = b"\x80\x02]q\x00(K\x01J\xfe\xff\xff\xffM,\x01\x8a\x06\x00\x00\x00\x00\x00\x01X\x01\x00\x00\x00aq\x01N}q\x02X\x01\x00\x00\x00kq\x03\x88G@\x04\x00\x00\x00\x00\x00\x00\x86q\x04se.";
        let four = b"\x80\x04\x95/\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01J\xfe\xff\xff\xffM,\x01\x8a\x06\x00\x00\x00\x00\x00\x01\x8c\x01a\x94N}\x94\x8c\x01k\x94\x88G@\x04\x00\x00\x00\x00\x00\x00\x86\x94se.";
        let text = |t: &str| Value::Text(t.into());
        let wanted = Value::List(vec![
            Value::Int(1),
            Value::Int(-2),
            Value::Int(300),
            Value::Int(1 << 40),
            text("a"),
            Value::Other,
            Value::Dict(vec![(text("k"), Value::List(vec![Value::Other, Value::Other]))]),
        ]);
        assert_eq!(parse(two).unwrap(), wanted);
        assert_eq!(parse(four).unwrap(), wanted);
    }

    /// What would run a command is named, not run; what no file of tensors has is named too.
    #[test]
    fn nothing_is_executed() {
        let e = parse(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap_err();
        assert_eq!(e, PickleError::Global("os.system".into()));
        let e = parse(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.").unwrap_err();
        assert_eq!(e, PickleError::Global("builtins.eval".into()));
        assert_eq!(
            parse(b"\x80\x02c__main__\nA\n)\x81.").unwrap_err(),
            PickleError::Global("__main__.A".into())
        );
        assert_eq!(parse(b"\x80\x02)\x81.").unwrap_err(), PickleError::Opcode(0x81, 3));
    }

    /// Doubling a list by its memo thirty times would take all memory.
    #[test]
    fn a_small_file_stays_small() {
        let mut code = b"\x80\x02]q\x00(".to_vec();
        code.extend(b"K\x01e0");
        code.extend(b"K\x01q\x00");
        for _ in 0..40 {
            code.extend(b"h\x00h\x00\x86q\x00");
        }
        code.push(b'.');
        assert!(matches!(parse(&code), Err(PickleError::Damaged(..))));
        let lists: Vec<u8> = std::iter::repeat_n(b']', 100_000)
            .chain(std::iter::repeat_n(b'a', 99_999))
            .chain(*b".")
            .collect();
        assert!(matches!(parse(&lists), Err(PickleError::Damaged(..))));
        let deep: Vec<u8> =
            std::iter::once(b'N').chain(std::iter::repeat_n(0x85, 100_000)).chain(*b".").collect();
        assert!(matches!(parse(&deep), Err(PickleError::Damaged(..))));
    }
}
