/*! What a PTX text holds, as the PTX machine reads it: kernels, forms of instructions, what can't be run or may be fused. */

use crate::cli::text::escape;
use mla_ptx::{Issue, KernelInfo, LoadError, Module};
use serde::Serialize;

/// Lines that are named of each list in text; JSON has all.
const NAMED: usize = 12;

/// Report on a PTX text.
#[derive(Default, Serialize)]
pub struct Look {
    version: String,
    target: String,
    kernels: Vec<Kernel>,
    forms: Vec<Form>,
    unsupported: Vec<Unsupported>,
    fusible_lines: Vec<u32>,
}

#[derive(Serialize)]
struct Kernel {
    kernel: String,
    instructions: usize,
    parameters: Vec<Parameter>,
    static_shared_bytes: u32,
    dynamic_shared: bool,
    local_bytes: u32,
    most_threads: Option<[u32; 3]>,
    runs: bool,
}

#[derive(Serialize)]
struct Parameter {
    name: String,
    offset: u32,
    bytes: u32,
    r#type: String,
}

#[derive(Serialize)]
struct Form {
    form: String,
    count: u32,
    first_line: u32,
}

#[derive(Serialize)]
struct Unsupported {
    line: u32,
    function: String,
    what: String,
    why: String,
}

impl Look {
    /// Of a text that was read.
    pub fn of(module: &Module) -> Look {
        let report = module.report();
        let forms = report.forms.into_iter();
        Look {
            version: module.version().into(),
            target: module.target().into(),
            kernels: module.kernels().map(kernel).collect(),
            forms: forms.map(|(form, (count, first_line))| Form { form, count, first_line }).collect(),
            unsupported: report.unsupported.into_iter().map(unsupported).collect(),
            fusible_lines: report.fusible,
        }
    }

    /// Of a compiler's text that the machine can't read.
    pub fn unread(e: LoadError) -> Look {
        Look { unsupported: e.issues.into_iter().map(unsupported).collect(), ..Look::default() }
    }

    /// Whether the machine runs all of it.
    pub fn runs(&self) -> bool {
        self.unsupported.is_empty()
    }

    /// Lines of text.
    pub fn text(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for k in &self.kernels {
            let parameters: Vec<_> =
                k.parameters.iter().map(|p| format!("{} {}", p.r#type, escape(&p.name))).collect();
            let threads =
                k.most_threads.map_or(String::new(), |[x, y, z]| format!(", most threads {x}x{y}x{z}"));
            let dynamic = if k.dynamic_shared { " and dynamic" } else { "" };
            let not = if k.runs { "" } else { "  DOES NOT RUN on the PTX machine" };
            lines.push(format!("  kernel {}({}){not}", escape(&k.kernel), parameters.join(", ")));
            lines.push(format!(
                "    {} instructions, {} bytes of static{dynamic} shared memory, {} local{threads}",
                k.instructions, k.static_shared_bytes, k.local_bytes
            ));
        }
        let forms: Vec<_> = self.forms.iter().map(|f| format!("{} x{}", escape(&f.form), f.count)).collect();
        if !forms.is_empty() {
            lines.push(format!("  forms: {}", forms.join(", ")));
        }
        for u in &self.unsupported {
            let function = if u.function.is_empty() { String::new() } else { format!(" ({})", u.function) };
            let text = format!("line {}{function}: `{}`: {}", u.line, u.what, u.why);
            lines.push(format!("  unsupported: {}", escape(&text)));
        }
        if !self.fusible_lines.is_empty() {
            let named: Vec<_> = self.fusible_lines.iter().take(NAMED).map(u32::to_string).collect();
            let more = if self.fusible_lines.len() > NAMED { ", ..." } else { "" };
            lines.push(format!(
                "  fusible: {} products or sums without a rounding mode, which ptxas may fuse: PTX lines {}{more}; compile with --fmad=false",
                self.fusible_lines.len(),
                named.join(", ")
            ));
        }
        lines
    }
}

fn kernel(k: KernelInfo<'_>) -> Kernel {
    let parameters = k.parameters.iter().map(|p| Parameter {
        name: p.name.clone(),
        offset: p.offset,
        bytes: p.bytes,
        r#type: format!("{:?}", p.ty).to_lowercase(),
    });
    Kernel {
        kernel: k.name.into(),
        instructions: k.instructions,
        parameters: parameters.collect(),
        static_shared_bytes: k.shared_bytes,
        dynamic_shared: k.dynamic_shared,
        local_bytes: k.local_bytes,
        most_threads: k.max_threads,
        runs: k.runs,
    }
}

fn unsupported(i: Issue) -> Unsupported {
    Unsupported { line: i.line, function: i.function, what: i.what, why: i.why }
}
