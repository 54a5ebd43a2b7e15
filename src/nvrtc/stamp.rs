/*!
Whether committed PTX still belongs to its source.

A committed PTX file begins with a stamp: hashes of source and headers, the arguments, the NVRTC, and a hash of the PTX
itself. Comparing stamps needs no NVRTC, so every checkout can tell that somebody changed a kernel and not its PTX, or
edited the PTX. Where the pinned NVRTC is there, [`same_code`] tells whether compiling again gives the same code.

The hash is FNV-1a of 128 bits: it finds accidents, not forgery.
*/

use super::compile::{Options, Source};
use super::target::Target;
use super::version::Version;
use std::fmt;

/// First line of a stamped file.
const MAGIC: &str = "// mla-check PTX 1";

/// 128-bit FNV-1a.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(u128);

impl Hash {
    /// Of some bytes.
    pub fn of(bytes: &[u8]) -> Hash {
        Hash(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d).and(bytes)
    }
    fn and(self, bytes: &[u8]) -> Hash {
        const PRIME: u128 = (1 << 88) + 0x13b;
        Hash(bytes.iter().fold(self.0, |h, &b| (h ^ u128::from(b)).wrapping_mul(PRIME)))
    }
    /// A part whose end can't be mistaken for the next one's begin.
    fn part(self, bytes: &[u8]) -> Hash {
        self.and(&(bytes.len() as u64).to_le_bytes()).and(bytes)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What PTX was made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Name of the source.
    pub name: String,
    /// Of name, text and headers.
    pub source: Hash,
    /// Arguments that the code depends on, separated by spaces.
    pub arguments: String,
    /// The compiler.
    pub nvrtc: Version,
}

impl Stamp {
    /// Of a compilation.
    pub fn of(source: &Source, target: Target, options: &Options, nvrtc: Version) -> Stamp {
        let all = Hash::of(b"").part(source.name.as_bytes()).part(source.text.as_bytes());
        let hash = source.headers.iter().fold(all, |h, (n, t)| h.part(n.as_bytes()).part(t.as_bytes()));
        Stamp {
            name: source.name.clone(),
            source: hash,
            arguments: options.arguments(target).join(" "),
            nvrtc,
        }
    }

    fn lines(&self) -> [(&'static str, String); 4] {
        [
            ("source", self.name.clone()),
            ("source hash", self.source.to_string()),
            ("arguments", self.arguments.clone()),
            ("nvrtc", self.nvrtc.to_string()),
        ]
    }

    /// The text of a file to commit: the stamp, then the PTX.
    pub fn head(&self, ptx: &str) -> String {
        let mut out = format!("{MAGIC}\n");
        for (key, value) in self.lines() {
            // A line break would end the comment.
            out += &format!("// {key}: {}\n", value.escape_debug());
        }
        out += &format!("// ptx hash: {}\n", Hash::of(ptx.as_bytes()));
        out + ptx
    }

    /// The PTX of a committed file, if the file was made from this and not changed since.
    ///
    /// # Errors
    /// The first thing that differs, with both values.
    pub fn check<'t>(&self, committed: &'t str) -> Result<&'t str, Stale> {
        let mut rest = committed;
        if line(&mut rest) != MAGIC {
            return Err(Stale::NoStamp);
        }
        let mut value = |key: &str| {
            let found = line(&mut rest).strip_prefix("// ").and_then(|l| l.strip_prefix(key));
            found.and_then(|l| l.strip_prefix(": ")).ok_or(Stale::NoStamp)
        };
        for (key, expected) in self.lines() {
            let (found, expected) = (value(key)?, expected.escape_debug().to_string());
            if found != expected {
                return Err(Stale::Differs { what: key, found: found.into(), expected });
            }
        }
        let found = value("ptx hash")?.to_string();
        let expected = Hash::of(rest.as_bytes()).to_string();
        if found != expected {
            return Err(Stale::Edited { found, expected });
        }
        Ok(rest)
    }
}

/// Takes the first line.
fn line<'t>(rest: &mut &'t str) -> &'t str {
    let (first, after) = rest.split_once('\n').unwrap_or((rest, ""));
    *rest = after;
    first
}

/// Why committed PTX can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Stale {
    #[error("the file does not begin with a stamp (first line {MAGIC:?})")]
    NoStamp,
    #[error("its {what} is {found}, expected {expected}")]
    Differs { what: &'static str, found: String, expected: String },
    #[error("the PTX was changed after it was stamped: its hash is {expected}, the stamp says {found}")]
    Edited { found: String, expected: String },
    #[error("line {line} of the code is {found:?}, expected {expected:?}")]
    Code { line: usize, found: String, expected: String },
}

/// Whether two PTX texts are the same code. What precedes `.version` (the compiler's name and build) does not count, so
/// that a patch of the same version may regenerate what another one made.
///
/// # Errors
/// The first line that differs.
pub fn same_code(found: &str, expected: &str) -> Result<(), Stale> {
    let (mut a, mut b) = (code(found).lines(), code(expected).lines());
    let mut number = 0;
    loop {
        number += 1;
        match (a.next(), b.next()) {
            (None, None) => return Ok(()),
            (x, y) if x == y => {}
            (x, y) => {
                let shown = |l: Option<&str>| l.unwrap_or("(the end)").to_string();
                return Err(Stale::Code { line: number, found: shown(x), expected: shown(y) });
            }
        }
    }
}

/// From `.version` on; all of it where there is none.
fn code(ptx: &str) -> &str {
    let at = if ptx.starts_with(".version") { Some(0) } else { ptx.find("\n.version").map(|at| at + 1) };
    &ptx[at.unwrap_or(0)..]
}

#[cfg(test)]
mod tests {
    use super::super::version::PINNED;
    use super::*;

    const PTX: &str = "//\n// Build 1\n\n.version 9.0\n.target sm_120\nret;\n";

    fn source() -> Source {
        Source::new("a.cu", "int x;").header("h.cuh", "int y;")
    }

    fn stamp(source: &Source, options: &Options) -> Stamp {
        Stamp::of(source, Target::compute(120), options, PINNED)
    }

    /// Values of the published FNV-1a test suite, 128 bits.
    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(Hash::of(b"").to_string(), "6c62272e07bb014262b821756295c58d");
        assert_eq!(Hash::of(b"a").to_string(), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(Hash::of(b"abc").to_string(), "a68d622cec8b5822836dbc7977af7f3b");
    }

    #[test]
    fn what_was_stamped_is_accepted_and_given_back() {
        let s = stamp(&source(), &Options::default());
        let text = s.head(PTX);
        assert_eq!(s.check(&text), Ok(PTX));
        assert!(text.lines().take(6).all(|l| l.starts_with("// ")), "{text}");
        assert!(text.contains("// arguments: --gpu-architecture=compute_120 --std=c++17 --fmad=false\n"));
    }

    #[test]
    fn any_change_of_source_headers_options_version_or_ptx_is_found() {
        let options = Options::default();
        let text = stamp(&source(), &options).head(PTX);
        let differs = |s: Stamp, key: &str| match s.check(&text) {
            Err(Stale::Differs { what, .. }) => assert_eq!(what, key),
            other => panic!("{key}: {other:?}"),
        };
        let changed = |text: &str| Source { text: text.into(), ..source() };
        differs(stamp(&changed("int z;"), &options), "source hash");
        // The same bytes, cut elsewhere.
        let moved = Source { headers: vec![("h.cuhi".into(), "nt y;".into())], ..source() };
        differs(stamp(&moved, &options), "source hash");
        differs(stamp(&Source { name: "b.cu".into(), ..source() }, &options), "source");
        differs(stamp(&source(), &options.clone().define("T", 1)), "arguments");
        differs(Stamp::of(&source(), Target::compute(90), &options, PINNED), "arguments");
        let other = Version { major: 13, minor: 1 };
        differs(Stamp::of(&source(), Target::compute(120), &options, other), "nvrtc");
        let s = stamp(&source(), &options);
        assert!(matches!(s.check(&text.replace("ret;", "bra;")), Err(Stale::Edited { .. })));
        assert!(matches!(s.check(&text[..text.len() - 1]), Err(Stale::Edited { .. })));
        assert_eq!(s.check(PTX), Err(Stale::NoStamp));
        assert_eq!(s.check(""), Err(Stale::NoStamp));
        for end in 0..text.len() {
            assert!(s.check(&text[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_name_cannot_break_out_of_its_line() {
        let odd = Source { name: "a\n// nvrtc: 1.0".into(), ..source() };
        let s = stamp(&odd, &Options::default());
        assert_eq!(s.check(&s.head(PTX)), Ok(PTX));
    }

    #[test]
    fn the_same_code_by_another_build_is_the_same() {
        assert_eq!(same_code(PTX, &PTX.replace("Build 1", "Build 2")), Ok(()));
        let expected = Stale::Code { line: 3, found: "ret;".into(), expected: "bra;".into() };
        assert_eq!(same_code(PTX, &PTX.replace("ret;", "bra;")), Err(expected));
        assert!(same_code(PTX, PTX.trim_end_matches("ret;\n")).is_err());
    }
}
