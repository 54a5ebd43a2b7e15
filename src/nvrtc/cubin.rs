/*!
What a CUBIN says of its kernels: an ELF file whose `.nv.info` sections hold the figures that a driver shows.

`.nv.info` and `.nv.info.KERNEL` are lists of records: format, attribute (a byte each), then a u16. In format 4 it is the
length of a payload that follows; in all others it is the value. The layout is NVIDIA's, not documented: figures were
compared with ptxas's log and, on an H200, with the driver's attributes. Nothing here trusts a length in the file.
*/

use std::collections::HashMap;

/// What a CUBIN says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Architecture it runs on, ten times the compute capability; none where the file's ABI is not known.
    pub number: Option<u32>,
    /// Kernels, by name.
    pub kernels: Vec<Kernel>,
}

/// Figures of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Name as a driver looks it up.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack frame (arrays and spills).
    pub frame_bytes: u32,
    /// Bytes of static shared memory of a block, without what the system reserves.
    pub static_shared_bytes: u32,
    /// Threads a block may have by `__launch_bounds__`; none where the kernel has no bounds.
    pub threads_bound: Option<u32>,
    /// Parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Bytes of all parameters, up to the end of the last one.
    pub parameter_bytes: u32,
    /// Bytes of machine code.
    pub code_bytes: u64,
}

/// Where a kernel's parameter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Parameter {
    /// Bytes from the start of the parameters.
    pub offset: u32,
    /// Its bytes.
    pub bytes: u32,
}

/// Reads a CUBIN. The error says what is wrong with the bytes.
pub fn parse(bytes: &[u8]) -> Result<Cubin, String> {
    let elf = Elf::open(bytes)?;
    let number = elf.number();
    let sections = elf.sections()?;
    let by_name: HashMap<&str, &Section> = sections.iter().map(|s| (s.name, s)).collect();
    let global = by_name.get(".nv.info").ok_or("it has no section .nv.info")?;
    let names = elf.symbols(&sections, global)?;
    let mut figures: HashMap<(u8, &str), u32> = HashMap::new();
    for record in records(global.data)? {
        let (Some(symbol), Some(value)) = (word(record.payload, 0), word(record.payload, 4)) else {
            continue;
        };
        if let Some(Some(name)) = names.get(symbol as usize) {
            figures.insert((record.attribute, name), value);
        }
    }
    let mut kernels = Vec::new();
    for section in &sections {
        let Some(name) = section.name.strip_prefix(".nv.info.") else { continue };
        let Some(text) = by_name.get(format!(".text.{name}").as_str()) else { continue };
        let figure = |attribute, what: &str| {
            figures.get(&(attribute, name)).copied().ok_or(format!("it has no {what} for kernel {name}"))
        };
        let shared = by_name.get(format!(".nv.shared.{name}").as_str()).map_or(0, |s| s.size);
        let own = Own::read(section.data)?;
        kernels.push(Kernel {
            name: name.to_string(),
            registers: figure(REGISTERS, "number of registers")?,
            frame_bytes: figure(FRAME, "stack frame")?,
            static_shared_bytes: without_reserve(shared, number)?,
            threads_bound: own.threads,
            parameters: own.parameters,
            parameter_bytes: own.parameter_bytes,
            code_bytes: text.size,
        });
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Cubin { number, kernels })
}

const REGISTERS: u8 = 0x2f;
const FRAME: u8 = 0x11;
const MAX_THREADS: u8 = 0x05;
const PARAMETER: u8 = 0x17;
const PARAMETER_BYTES: u8 = 0x19;

/// From sm_90 on the first 1,024 bytes of a kernel's shared section are the system's.
fn without_reserve(bytes: u64, number: Option<u32>) -> Result<u32, String> {
    let reserved = if number.is_some_and(|n| n >= 90) { 1024 } else { 0 };
    u32::try_from(bytes.saturating_sub(reserved))
        .map_err(|_| format!("a kernel has {bytes} bytes of shared memory"))
}

/// What stands in a kernel's own `.nv.info.KERNEL`.
#[derive(Default)]
struct Own {
    threads: Option<u32>,
    parameters: Vec<Parameter>,
    parameter_bytes: u32,
}

impl Own {
    fn read(data: &[u8]) -> Result<Own, String> {
        let mut own = Own::default();
        let mut parameters: Vec<(u16, Parameter)> = Vec::new();
        for record in records(data)? {
            let payload = record.payload;
            match record.attribute {
                MAX_THREADS => {
                    let axes = [0, 4, 8].map(|at| word(payload, at));
                    let [Some(x), Some(y), Some(z)] = axes else { continue };
                    own.threads = x.checked_mul(y).and_then(|xy| xy.checked_mul(z));
                }
                // u32 index, u16 ordinal, u16 offset, u32 whose top 14 bits are the size.
                PARAMETER => {
                    let (Some(ordinal), Some(offset), Some(size)) =
                        (half(payload, 4), half(payload, 6), word(payload, 8))
                    else {
                        continue;
                    };
                    parameters.push((ordinal, Parameter { offset: offset.into(), bytes: size >> 18 }));
                }
                PARAMETER_BYTES => own.parameter_bytes = record.value.into(),
                _ => {}
            }
        }
        parameters.sort_by_key(|p| p.0);
        own.parameters = parameters.into_iter().map(|p| p.1).collect();
        Ok(own)
    }
}

struct Record<'b> {
    attribute: u8,
    value: u16,
    payload: &'b [u8],
}

fn records(mut data: &[u8]) -> Result<Vec<Record<'_>>, String> {
    let mut out = Vec::new();
    while let Some((&[format, attribute, low, high], rest)) = data.split_first_chunk() {
        let value = u16::from_le_bytes([low, high]);
        let length = if format == 4 { usize::from(value) } else { 0 };
        let (payload, rest) =
            rest.split_at_checked(length).ok_or_else(|| format!("attribute {attribute:#x} is cut short"))?;
        out.push(Record { attribute, value, payload });
        data = rest;
    }
    if data.is_empty() { Ok(out) } else { Err("its attributes end in the middle of one".into()) }
}

struct Section<'b> {
    name: &'b str,
    data: &'b [u8],
    size: u64,
    link: usize,
}

struct Elf<'b> {
    bytes: &'b [u8],
}

/// `SHT_NOBITS`: a size in memory and no bytes in the file.
const NO_BITS: u32 = 8;

impl<'b> Elf<'b> {
    fn open(bytes: &'b [u8]) -> Result<Elf<'b>, String> {
        if !bytes.starts_with(b"\x7fELF\x02\x01") {
            return Err("it is no little-endian 64-bit ELF file".into());
        }
        let machine = half(bytes, 18).ok_or("it is cut short")?;
        if machine != 190 {
            return Err(format!("its machine is {machine}, expected 190 (CUDA)"));
        }
        // The table of segments is a driver's, and comes last in the file.
        let end = || {
            let (at, size, count) = (long(bytes, 32)?, half(bytes, 54)?, half(bytes, 56)?);
            at.checked_add(u64::from(size) * u64::from(count))
        };
        match end() {
            Some(end) if end <= bytes.len() as u64 => Ok(Elf { bytes }),
            _ => Err("its table of segments is cut short".into()),
        }
    }

    /// By the ABI's place for it in `e_flags`.
    fn number(&self) -> Option<u32> {
        let flags = word(self.bytes, 48)?;
        match self.bytes.get(7)? {
            0x33 => Some(flags & 0xff),
            0x41 => Some((flags >> 8) & 0xff),
            _ => None,
        }
    }

    fn sections(&self) -> Result<Vec<Section<'b>>, String> {
        let cut = || "its table of sections is cut short".to_string();
        let table = long(self.bytes, 40).and_then(|v| usize::try_from(v).ok()).ok_or_else(cut)?;
        let field = |at| half(self.bytes, at).map(usize::from).ok_or_else(cut);
        let (size, count, names) = (field(58)?, field(60)?, field(62)?);
        let header = |i: usize| {
            let at = i.checked_mul(size)?.checked_add(table)?;
            self.bytes.get(at..at.checked_add(64)?)
        };
        let strings =
            self.data(header(names).ok_or_else(cut)?).ok_or("its section names lie outside of it")?;
        (0..count)
            .map(|i| {
                let h = header(i).ok_or_else(cut)?;
                let fields = (word(h, 0), long(h, 32), word(h, 40));
                let (Some(name), Some(size), Some(link)) = fields else { return Err(cut()) };
                let name = text(strings, name).ok_or_else(|| format!("section {i} has no name"))?;
                let data = self.data(h).ok_or_else(|| format!("section {name} lies outside of it"))?;
                Ok(Section { name, data, size, link: link as usize })
            })
            .collect()
    }

    /// A section's bytes by its header.
    fn data(&self, header: &[u8]) -> Option<&'b [u8]> {
        if word(header, 4)? == NO_BITS {
            return Some(&[]);
        }
        let (at, size) = (usize::try_from(long(header, 24)?).ok()?, usize::try_from(long(header, 32)?).ok()?);
        self.bytes.get(at..at.checked_add(size)?)
    }

    /// Names of the symbols of the table that a section's numbers count in.
    fn symbols(&self, all: &[Section<'b>], of: &Section<'b>) -> Result<Vec<Option<&'b str>>, String> {
        let table = all.get(of.link).ok_or("its .nv.info has no table of symbols")?;
        let strings = all.get(table.link).ok_or("its symbols have no names")?;
        Ok(table.data.chunks_exact(24).map(|s| text(strings.data, word(s, 0)?)).collect())
    }
}

fn text(strings: &[u8], at: u32) -> Option<&str> {
    let rest = strings.get(at as usize..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|&b| b == 0)?]).ok()
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::super::log;
    use super::*;

    const SM_120: &[u8] = include_bytes!("../../fixtures/nvrtc/small.sm_120.cubin");
    const SM_90: &[u8] = include_bytes!("../../fixtures/nvrtc/small.sm_90.cubin");

    fn parameters(bytes: &[(u32, u32)]) -> Vec<Parameter> {
        bytes.iter().map(|&(offset, bytes)| Parameter { offset, bytes }).collect()
    }

    /// Figures equal what ptxas wrote into the log of the same compilation; parameters are those of the source.
    #[test]
    fn figures_are_those_of_the_log_and_of_the_source() {
        let sm_120 = (SM_120, 120, include_str!("../../fixtures/nvrtc/small.sm_120.log"));
        let sm_90 = (SM_90, 90, include_str!("../../fixtures/nvrtc/small.sm_90.log"));
        for (bytes, number, log) in [sm_120, sm_90] {
            let cubin = parse(bytes).unwrap();
            assert_eq!(cubin.number, Some(number));
            let names: Vec<&str> = cubin.kernels.iter().map(|k| k.name.as_str()).collect();
            assert_eq!(names, ["centre", "crowded"]);
            for entry in log::parse(log) {
                let kernel = cubin.kernels.iter().find(|k| k.name == entry.kernel).unwrap();
                assert_eq!(Some(kernel.registers), entry.registers);
                assert_eq!(Some(kernel.frame_bytes), entry.frame_bytes);
                assert_eq!(kernel.static_shared_bytes, entry.static_shared_bytes);
                assert!(kernel.code_bytes > 0);
            }
            let [centre, crowded] = &cubin.kernels[..] else { panic!() };
            assert_eq!((centre.threads_bound, crowded.threads_bound), (Some(256), Some(1024)));
            assert_eq!(centre.parameters, parameters(&[(0, 8), (8, 8), (16, 4), (20, 4)]));
            assert_eq!(crowded.parameters, parameters(&[(0, 8), (8, 8), (16, 8), (24, 4)]));
            assert_eq!((centre.parameter_bytes, crowded.parameter_bytes), (24, 28));
            assert_eq!(centre.static_shared_bytes, 32 * 4);
        }
    }

    /// Cut anywhere, or with any byte of the headers and tables changed: an error or figures, never a panic.
    #[test]
    fn damage_is_an_error_or_is_survived() {
        for end in (0..SM_90.len()).step_by(7) {
            assert!(parse(&SM_90[..end]).is_err(), "cut at {end}");
        }
        let mut bytes = SM_90.to_vec();
        let table = long(SM_90, 40).unwrap() as usize;
        for at in (0..64).chain(table..SM_90.len()).chain(2000..5400) {
            for value in [0, 1, 0x7f, 0xff] {
                let before = std::mem::replace(&mut bytes[at], value);
                let _ = parse(&bytes);
                bytes[at] = before;
            }
        }
        for (bytes, word) in [(&b""[..], "ELF"), (b"PTX", "ELF"), (b"\x7fELF\x02\x01", "cut short")] {
            assert!(parse(bytes).unwrap_err().contains(word));
        }
        let mut other = SM_90.to_vec();
        other[18] = 62;
        assert!(parse(&other).unwrap_err().contains("machine is 62"));
        other[18] = 190;
        other[7] = 0;
        assert_eq!(parse(&other).unwrap().number, None);
    }
}
