/*!
Tokens to statements. A statement that makes no sense is an [`Issue`] and is skipped to its semicolon, so that one
run lists everything that is wrong.
*/

use super::ast::*;
use super::lex::{Kind, Token, lex};
use crate::error::Issue;
use crate::ty::Ty;

type Result<T> = std::result::Result<T, String>;

/// The file, and what could not be read.
pub fn parse(text: &str) -> (File, Vec<Issue>) {
    let mut p = Parser { tokens: lex(text), at: 0, issues: Vec::new(), function: String::new() };
    let mut file = File::default();
    while p.at < p.tokens.len() {
        let start = p.at;
        if let Err(why) = p.item(&mut file) {
            p.issue(start, why);
            p.skip_item(start);
        }
        p.at = p.at.max(start + 1);
    }
    (file, p.issues)
}

struct Parser<'t> {
    tokens: Vec<Token<'t>>,
    at: usize,
    issues: Vec<Issue>,
    function: String,
}

/// Bits of a number as PTX writes them.
pub fn number(text: &str) -> Option<u64> {
    let digits = |prefix: &str| text.strip_prefix(prefix);
    if let Some(h) = digits("0f").or(digits("0F")) {
        return u32::from_str_radix(h, 16).ok().map(u64::from);
    }
    if let Some(h) = digits("0d").or(digits("0D")) {
        return u64::from_str_radix(h, 16).ok();
    }
    let text = text.strip_suffix('U').unwrap_or(text);
    if let Some(h) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        return u64::from_str_radix(h, 16).ok();
    }
    if let Some(b) = text.strip_prefix("0b").or(text.strip_prefix("0B")) {
        return u64::from_str_radix(b, 2).ok();
    }
    if text.len() > 1 && text.starts_with('0') {
        return u64::from_str_radix(text, 8).ok();
    }
    text.parse().ok()
}

impl<'t> Parser<'t> {
    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).copied()
    }
    fn line(&self) -> u32 {
        self.peek().or(self.tokens.last().copied()).map_or(0, |t| t.line)
    }
    fn is(&self, mark: u8) -> bool {
        self.peek().is_some_and(|t| t.kind == Kind::Mark(mark))
    }
    fn take(&mut self, mark: u8) -> bool {
        let there = self.is(mark);
        self.at += usize::from(there);
        there
    }
    fn want(&mut self, mark: u8) -> Result<()> {
        if self.take(mark) {
            return Ok(());
        }
        let found = self.peek().map_or("the end of the text".to_owned(), |t| format!("`{}`", t.text));
        Err(format!("expected `{}`, found {found}", mark as char))
    }
    fn word(&mut self) -> Result<&'t str> {
        match self.peek() {
            Some(t) if t.kind == Kind::Word => {
                self.at += 1;
                Ok(t.text)
            }
            Some(t) => Err(format!("expected a name, found `{}`", t.text)),
            None => Err("expected a name, found the end of the text".into()),
        }
    }
    fn peek_word(&self) -> &'t str {
        self.peek().filter(|t| t.kind == Kind::Word).map_or("", |t| t.text)
    }
    fn take_word(&mut self, text: &str) -> bool {
        let there = self.peek_word() == text;
        self.at += usize::from(there);
        there
    }
    fn number(&mut self) -> Result<u64> {
        let t = self.peek().ok_or("expected a number, found the end of the text")?;
        let v = (t.kind == Kind::Number).then(|| number(t.text)).flatten();
        self.at += 1;
        v.ok_or_else(|| format!("expected a number, found `{}`", t.text))
    }
    fn signed(&mut self) -> Result<i64> {
        let negative = self.take(b'-');
        let v = self.number()? as i64;
        Ok(if negative { v.wrapping_neg() } else { v })
    }

    fn issue(&mut self, start: usize, why: String) {
        let line = self.tokens.get(start).map_or(0, |t| t.line);
        let what: Vec<&str> = self.tokens[start.min(self.tokens.len())..]
            .iter()
            .take_while(|t| t.line == line)
            .take(12)
            .map(|t| t.text)
            .collect();
        let (function, what) = (self.function.clone(), what.join(" "));
        self.issues.push(Issue { line, function, what, why });
    }

    fn skip_line(&mut self, line: u32) {
        while self.peek().is_some_and(|t| t.line == line) {
            self.at += 1;
        }
    }

    /// To just behind the next semicolon, or behind the next balanced braces.
    fn skip_item(&mut self, start: usize) {
        self.at = start;
        let mut depth = 0usize;
        while let Some(t) = self.peek() {
            self.at += 1;
            match t.kind {
                Kind::Mark(b'{') => depth += 1,
                Kind::Mark(b'}') => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return;
                    }
                }
                Kind::Mark(b';') if depth == 0 => return,
                _ => {}
            }
        }
    }

    fn item(&mut self, file: &mut File) -> Result<()> {
        let line = self.line();
        match self.peek_word() {
            ".version" => {
                self.at += 1;
                file.version = self.rest(line);
            }
            ".target" => {
                self.at += 1;
                file.target = self.rest(line);
            }
            ".address_size" => {
                self.at += 1;
                if self.number()? != 64 {
                    return Err("only 64-bit addresses".into());
                }
            }
            ".file" => {
                self.at += 1;
                let n = self.number()? as u32;
                if let Some(t) = self.peek().filter(|t| t.kind == Kind::Text) {
                    file.sources.push((n, t.text.to_owned()));
                }
                self.skip_line(line);
            }
            ".section" => {
                let start = self.at;
                self.skip_item(start);
            }
            ".pragma" => {
                let start = self.at;
                self.skip_item(start);
            }
            _ => {
                let mut external = false;
                while let w @ (".visible" | ".extern" | ".weak" | ".common") = self.peek_word() {
                    external |= w == ".extern";
                    self.at += 1;
                }
                match self.peek_word() {
                    ".entry" | ".func" => {
                        let f = self.function()?;
                        file.functions.push(f);
                    }
                    _ => {
                        let vs = self.variables(external)?;
                        file.variables.extend(vs);
                    }
                }
            }
        }
        Ok(())
    }

    fn rest(&mut self, line: u32) -> String {
        let start = self.at;
        self.skip_line(line);
        self.tokens[start..self.at].iter().map(|t| t.text).collect()
    }

    fn function(&mut self) -> Result<Function> {
        let entry = self.word()? == ".entry";
        let results = if self.is(b'(') { self.parameters()? } else { Vec::new() };
        let name = self.word()?.to_owned();
        self.function.clone_from(&name);
        let parameters = if self.is(b'(') { self.parameters()? } else { Vec::new() };
        let mut directives = Vec::new();
        loop {
            match self.peek_word() {
                ".pragma" => {
                    let start = self.at;
                    self.skip_item(start);
                }
                w if w.starts_with('.') => {
                    self.at += 1;
                    let mut numbers = Vec::new();
                    while self.peek().is_some_and(|t| t.kind == Kind::Number) {
                        numbers.push(self.number()?);
                        self.take(b',');
                    }
                    directives.push((w[1..].to_owned(), numbers));
                }
                _ => break,
            }
        }
        let body = if self.take(b';') { None } else { Some(self.body()?) };
        self.function.clear();
        Ok(Function { name, entry, results, parameters, directives, body })
    }

    fn parameters(&mut self) -> Result<Vec<Variable>> {
        self.want(b'(')?;
        let mut all = Vec::new();
        while !self.take(b')') {
            all.push(self.declaration(false)?);
            if !self.take(b',') && !self.is(b')') {
                return Err(format!("parameter list: `{}`", self.peek().map_or("", |t| t.text)));
            }
        }
        Ok(all)
    }

    /// `.space .align N .type name…, name…;`
    fn variables(&mut self, external: bool) -> Result<Vec<Variable>> {
        let first = self.declaration(external)?;
        let mut all = vec![first];
        while self.take(b',') {
            let line = self.line();
            let mut v = Variable { init: Vec::new(), line, ..all[0].clone() };
            self.name(&mut v)?;
            all.push(v);
        }
        self.want(b';')?;
        Ok(all)
    }

    fn declaration(&mut self, external: bool) -> Result<Variable> {
        let line = self.line();
        // `.reg .b32` and, as inline assembly of CUDA's own headers has it, `.reg.b32`.
        let first = self.word()?;
        let mut words = first.strip_prefix('.').unwrap_or_default().split('.');
        let space = match words.next() {
            Some("reg") => Space::Reg,
            Some("param") => Space::Param,
            Some("global") => Space::Global,
            Some("const") => Space::Const,
            Some("shared") => Space::Shared,
            Some("local") => Space::Local,
            _ => return Err(format!("unknown directive `{first}`")),
        };
        let (mut align, mut ty) = (0, None);
        loop {
            for w in words {
                match w {
                    "align" => align = self.number()?,
                    "ptr" | "global" | "shared" | "const" | "local" => {}
                    w => match Ty::parse(w) {
                        Some(t) if ty.is_none() => ty = Some(t),
                        _ => return Err(format!("type or attribute `.{w}`")),
                    },
                }
            }
            let Some(w) = self.peek_word().strip_prefix('.') else { break };
            self.at += 1;
            words = w.split('.');
        }
        let ty = ty.ok_or("a type is missing")?;
        let mut v = Variable {
            space,
            ty,
            name: String::new(),
            align,
            count: Some(1),
            range: false,
            external,
            init: Vec::new(),
            line,
        };
        self.name(&mut v)?;
        Ok(v)
    }

    fn name(&mut self, v: &mut Variable) -> Result<()> {
        v.name = self.word()?.to_owned();
        v.count = Some(1);
        v.range = false;
        if self.take(b'<') {
            v.count = Some(self.number()?);
            v.range = true;
            self.want(b'>')?;
        }
        while self.take(b'[') {
            if self.take(b']') {
                v.count = None;
            } else {
                let n = self.number()?;
                v.count = v.count.and_then(|c| c.checked_mul(n)).or(v.count.map(|_| u64::MAX));
                self.want(b']')?;
            }
        }
        if self.take(b'=') {
            self.init(&mut v.init, 0)?;
        }
        Ok(())
    }

    fn init(&mut self, out: &mut Vec<Init>, depth: u32) -> Result<()> {
        if self.take(b'{') {
            if depth > 8 {
                return Err("initialiser nested too deep".into());
            }
            while !self.take(b'}') {
                self.init(out, depth + 1)?;
                if !self.take(b',') && !self.is(b'}') {
                    return Err("initialiser: expected `,` or `}`".into());
                }
            }
            return Ok(());
        }
        if self.peek().is_some_and(|t| t.kind == Kind::Word) {
            let name = self.word()?.to_owned();
            if self.is(b'(') {
                return Err(format!("initialiser `{name}(…)` is not supported"));
            }
            let offset = if self.take(b'+') { self.signed()? } else { 0 };
            out.push(Init::Address(name, offset));
        } else {
            let v = self.signed()? as u64;
            out.push(Init::Value(v));
        }
        Ok(())
    }

    fn body(&mut self) -> Result<Vec<Statement>> {
        self.want(b'{')?;
        let (mut out, mut depth) = (Vec::new(), 0usize);
        loop {
            let start = self.at;
            let Some(t) = self.peek() else { return Err("the body does not end".into()) };
            if self.take(b'}') {
                if depth == 0 {
                    return Ok(out);
                }
                depth -= 1;
                out.push(Statement::Close);
            } else if self.take(b'{') {
                depth += 1;
                out.push(Statement::Open);
            } else if !self.take(b';')
                && let Err(why) = self.statement(t, &mut out)
            {
                self.issue(start, why);
                self.at = start;
                while self.peek().is_some_and(|t| !matches!(t.kind, Kind::Mark(b';'))) {
                    self.at += 1;
                }
                self.at += 1;
            }
        }
    }

    fn statement(&mut self, t: Token<'t>, out: &mut Vec<Statement>) -> Result<()> {
        match t.text {
            ".loc" => {
                self.at += 1;
                let file = self.number()? as u32;
                let line = self.number()? as u32;
                self.skip_line(t.line);
                out.push(Statement::Location(file, line));
                return Ok(());
            }
            ".pragma" => {
                let start = self.at;
                self.skip_item(start);
                return Ok(());
            }
            w if t.kind == Kind::Word && w.starts_with('.') => {
                let vs = self.variables(false)?;
                out.extend(vs.into_iter().map(Statement::Declare));
                return Ok(());
            }
            _ => {}
        }
        let label = self.tokens.get(self.at + 1).is_some_and(|n| n.kind == Kind::Mark(b':'));
        if t.kind == Kind::Word && label {
            self.at += 2;
            let name = t.text.to_owned();
            if self.take_word(".branchtargets") {
                let mut targets = vec![self.word()?.to_owned()];
                while self.take(b',') {
                    targets.push(self.word()?.to_owned());
                }
                self.want(b';')?;
                out.push(Statement::Targets(name, targets));
            } else if self.peek_word().starts_with(".call") {
                return Err("calls through a pointer are not supported".into());
            } else {
                out.push(Statement::Label(name));
            }
            return Ok(());
        }
        let guard = if self.take(b'@') {
            let negated = self.take(b'!');
            Some(Guard { register: self.word()?.to_owned(), negated })
        } else {
            None
        };
        let line = self.line();
        let opcode = self.word()?.to_owned();
        let mut operands = Vec::new();
        while !self.take(b';') {
            operands.push(self.operand(0)?);
            if !self.take(b',') && !self.is(b';') {
                let found = self.peek().map_or("the end", |t| t.text);
                return Err(format!("expected `,` or `;` after an operand, found `{found}`"));
            }
        }
        out.push(Statement::Instruction(Instruction { line, guard, opcode, operands }));
        Ok(())
    }

    fn list(&mut self, end: u8, depth: u32) -> Result<Vec<Operand>> {
        let mut all = Vec::new();
        while !self.take(end) {
            all.push(self.operand(depth + 1)?);
            if !self.take(b',') && !self.is(end) {
                return Err(format!("expected `,` or `{}`", end as char));
            }
        }
        Ok(all)
    }

    fn operand(&mut self, depth: u32) -> Result<Operand> {
        if depth > 4 {
            return Err("operands nested too deep".into());
        }
        if self.take(b'{') {
            return Ok(Operand::Group(self.list(b'}', depth)?));
        }
        if self.take(b'(') {
            return Ok(Operand::Arguments(self.list(b')', depth)?));
        }
        if self.take(b'[') {
            let base = self.operand(depth + 1)?;
            let offset = if self.take(b'+') || self.is(b'-') { self.signed()? } else { 0 };
            if self.is(b',') {
                return Err("tensor coordinates are not supported".into());
            }
            self.want(b']')?;
            return Ok(Operand::Memory(Box::new(base), offset));
        }
        if self.take(b'!') {
            return Ok(Operand::Not(self.word()?.to_owned()));
        }
        if self.is(b'-') || self.peek().is_some_and(|t| t.kind == Kind::Number) {
            return Ok(Operand::Number(self.signed()? as u64));
        }
        let name = Operand::Name(self.word()?.to_owned());
        if self.take(b'|') {
            let other = Operand::Name(self.word()?.to_owned());
            return Ok(Operand::Pair(Box::new(name), Box::new(other)));
        }
        if depth == 0 && self.take(b'+') {
            // `mov.u64 %rd1, symbol+8`
            let offset = self.signed()?;
            return Ok(Operand::Memory(Box::new(name), offset));
        }
        Ok(name)
    }
}
