/*!
Cuts PTX text into words with their line.

A word may hold dots, `%`, `$` and doubled colons, so that `cp.async.bulk.shared::cta.global` and `%tid.x` are one
word each; everything else is a mark of one character.
*/

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Identifier, register, opcode or directive.
    Word,
    /// Begins with a digit.
    Number,
    /// Between double quotes, quotes not included.
    Text,
    /// One character.
    Mark(u8),
}

/// A piece of the text.
#[derive(Clone, Copy, Debug)]
pub struct Token<'t> {
    pub kind: Kind,
    pub text: &'t str,
    pub line: u32,
}

fn starts_word(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'.' | b'%' | b'$')
}

fn in_word(c: u8) -> bool {
    starts_word(c) || c.is_ascii_digit()
}

/// Every token of `text`; comments are skipped, and characters outside ASCII become marks (which no rule takes).
pub fn lex(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let (mut tokens, mut i, mut line) = (Vec::with_capacity(bytes.len() / 5), 0, 1u32);
    let slice = |from: usize, to: usize| text.get(from..to).unwrap_or("");
    while i < bytes.len() {
        let (c, start) = (bytes[i], i);
        let next = bytes.get(i + 1).copied().unwrap_or(0);
        if c == b'\n' {
            line += 1;
            i += 1;
        } else if c.is_ascii_whitespace() {
            i += 1;
        } else if c == b'/' && next == b'/' {
            while i < bytes.len() && bytes[i] != b'\n' {
                i += 1;
            }
        } else if c == b'/' && next == b'*' {
            i += 2;
            while i < bytes.len() && !(bytes[i] == b'*' && bytes.get(i + 1) == Some(&b'/')) {
                line += u32::from(bytes[i] == b'\n');
                i += 1;
            }
            i += 2;
        } else if c == b'"' {
            i += 1;
            while i < bytes.len() && bytes[i] != b'"' && bytes[i] != b'\n' {
                i += 1;
            }
            tokens.push(Token { kind: Kind::Text, text: slice(start + 1, i), line });
            i += usize::from(bytes.get(i) == Some(&b'"'));
        } else if starts_word(c) {
            while i < bytes.len() {
                if in_word(bytes[i]) {
                    i += 1;
                } else if bytes[i] == b':'
                    && bytes.get(i + 1) == Some(&b':')
                    && bytes.get(i + 2).is_some_and(|&c| in_word(c))
                {
                    i += 2;
                } else {
                    break;
                }
            }
            tokens.push(Token { kind: Kind::Word, text: slice(start, i), line });
        } else if c.is_ascii_digit() {
            while i < bytes.len() && (bytes[i].is_ascii_alphanumeric() || bytes[i] == b'.') {
                i += 1;
            }
            tokens.push(Token { kind: Kind::Number, text: slice(start, i), line });
        } else {
            tokens.push(Token { kind: Kind::Mark(c), text: slice(start, start + 1), line });
            i += 1;
        }
    }
    tokens
}
