/*! Text for terminals: lines that fit, names that cannot drive the terminal, sizes that can be read. */

/// The text with everything that a terminal would obey rather than show written as `\u{…}`: control characters,
/// and what hides or reorders other characters.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' => {
                out.extend(c.escape_unicode());
            }
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

/// Breaks a text between words so that no line is longer than `width`; lines after the first are indented.
/// A word that is longer than a line is cut. Spaces inside a line stay as they are.
pub(super) fn wrap(text: &str, width: usize, indent: usize) -> String {
    let (mut out, mut column, mut spaces, mut fresh) = (String::new(), 0, 0, true);
    for (i, word) in text.split(' ').enumerate() {
        spaces += usize::from(i > 0);
        let mut word: Vec<char> = word.chars().collect();
        while !word.is_empty() {
            let fits = column + spaces + word.len() <= width;
            if fits || fresh {
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
                spaces = 0;
                let rest = word.split_off(word.len().min(width.saturating_sub(column).max(1)));
                column += word.len();
                out.extend(word);
                (word, fresh) = (rest, false);
            } else {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                (column, spaces, fresh) = (indent, 0, true);
            }
        }
    }
    out
}

/// A path as a shell takes it.
pub(super) fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./+,:=@%".contains(c);
    if path.chars().all(plain) {
        path.to_string()
    } else {
        format!("'{}'", escape(path).replace('\'', "'\\''"))
    }
}

/// Bytes as a person reads them.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, "bytes");
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{value:.1} {unit}") }
}

/// A number to four digits.
pub(super) fn short(x: f64) -> String {
    let rounded: f64 = format!("{x:.3e}").parse().unwrap_or(x);
    if rounded == 0.0 || (1e-3..1e7).contains(&rounded.abs()) {
        format!("{rounded}")
    } else {
        format!("{rounded:e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_what_a_terminal_would_obey() {
        assert_eq!(escape("a\x1b[2Jb\n\u{202e}é"), "a\\u{1b}[2Jb\\n\\u{202e}é");
    }

    #[test]
    fn wraps_between_words_and_cuts_long_ones() {
        assert_eq!(wrap("aa bb cc", 5, 2), "aa bb\n  cc");
        assert_eq!(wrap("abcdefgh", 4, 1), "abcd\n efg\n h");
        assert_eq!(wrap("a bcdefgh", 4, 1), "a\n bcd\n efg\n h");
        assert_eq!(wrap("", 4, 1), "");
        for width in 1..12 {
            let text = wrap("one three eleven-long-word x", width, 3);
            assert!(text.lines().all(|l| l.chars().count() <= width.max(4)), "{width}: {text}");
            let words: String = text.split_whitespace().collect();
            assert_eq!(words, "onethreeeleven-long-wordx");
        }
    }

    #[test]
    fn sizes_and_numbers() {
        assert_eq!(size(1023), "1023 bytes");
        assert_eq!(size(3 << 20), "3.0 MiB");
        assert_eq!(short(f64::from(1e-5f32)), "1e-5");
        assert_eq!(short(0.135_233_78), "0.1352");
        assert_eq!(short(1e6), "1000000");
    }
}
