/*! Versions of NVRTC, and the one that this program is made for. */

use std::fmt;

/// Major and minor version; patches change no option and, so far, no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// The version whose PTX is committed and whose log and CUBIN this program was tried on. Another one works, with
/// [`Notice::OtherVersion`](super::Notice::OtherVersion): its PTX need not be the same.
pub const PINNED: Version = Version { major: 13, minor: 0 };

/// First version that takes `--no-cache`; 12.8 refuses it.
const NO_CACHE: Version = Version { major: 12, minor: 9 };

impl Version {
    /// Whether `--no-cache` is an option.
    pub(super) fn has_no_cache(self) -> bool {
        self >= NO_CACHE
    }

    /// From what follows `.so.` in a file's name: `13.0`, `13.0.88`; none from `13` alone.
    pub(super) fn from_suffix(text: &str) -> Option<Version> {
        let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
        Some(Version { major: numbers.next()??, minor: numbers.next()?? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_from_names_and_the_first_with_no_cache() {
        let v = |major, minor| Version { major, minor };
        assert_eq!(Version::from_suffix("13.0"), Some(v(13, 0)));
        assert_eq!(Version::from_suffix("12.9.86"), Some(v(12, 9)));
        assert_eq!(Version::from_suffix("13"), None);
        assert_eq!(Version::from_suffix("x.1"), None);
        assert!(!v(12, 8).has_no_cache() && v(12, 9).has_no_cache() && v(13, 0).has_no_cache());
    }
}
