/*!
The program log of `--ptxas-options=-v`, read by its phrases.

Per kernel ptxas writes `Compiling entry function 'NAME'`, then `Function properties for NAME` with one line of bytes,
then `Used N registers, …`. A function that the kernel calls and that was not inlined follows as `Function properties
for OTHER`, with spills of its own, up to the next entry function: they are the kernel's too, and are added to it.

An empty log says nothing about spills: on a machine with a driver NVRTC takes results from a cache, without a log.
*/

/// What the log says of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Entry {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: Option<u32>,
    /// Bytes of the kernel's own stack frame.
    pub frame_bytes: Option<u32>,
    /// Bytes of spill stores, of the kernel and of what it calls.
    pub spill_store_bytes: Option<u32>,
    /// Bytes of spill loads, of the kernel and of what it calls.
    pub spill_load_bytes: Option<u32>,
    /// Bytes of static shared memory; none is not mentioned.
    pub static_shared_bytes: u32,
}

/// Kernels in the order of the log.
pub fn parse(log: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut subject = "";
    for line in log.lines() {
        if let Some(kernel) = quoted_after(line, "Compiling entry function '") {
            entries.push(Entry { kernel: kernel.into(), ..Entry::default() });
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            subject = name.trim();
        } else if let Some(entry) = entries.last_mut() {
            read(entry, subject, line);
        }
    }
    entries
}

fn read(entry: &mut Entry, subject: &str, line: &str) {
    if let Some(bytes) = number_before(line, " bytes stack frame") {
        if subject == entry.kernel {
            entry.frame_bytes = Some(bytes);
        }
        add(&mut entry.spill_store_bytes, number_before(line, " bytes spill stores"));
        add(&mut entry.spill_load_bytes, number_before(line, " bytes spill loads"));
    } else if line.contains("Used ") && line.contains(" registers") {
        entry.registers = number_before(line, " registers");
        entry.static_shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
    }
}

/// What the compiler says to the author: the log without ptxas's lines of figures.
pub fn diagnostics(log: &str) -> String {
    let kept: Vec<&str> = log.lines().filter(|l| !is_figures(l)).collect();
    kept.join("\n").trim().to_string()
}

fn is_figures(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("ptxas") else { return false };
    let rest = rest.trim_start();
    rest.starts_with('.')
        || rest.strip_prefix("info").is_some_and(|r| {
            let text = r.trim_start().trim_start_matches(':').trim_start();
            ["Compiling entry function", "Function properties", "Used ", "Compile time"]
                .iter()
                .any(|p| text.starts_with(p))
                || text.contains(" bytes gmem")
        })
}

fn add(sum: &mut Option<u32>, bytes: Option<u32>) {
    if let Some(bytes) = bytes {
        *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
    }
}

/// The number that ends where `phrase` begins.
fn number_before(line: &str, phrase: &str) -> Option<u32> {
    let (before, _) = line.split_once(phrase)?;
    let digits = before.len() - before.bytes().rev().take_while(u8::is_ascii_digit).count();
    before[digits..].parse().ok()
}

fn quoted_after<'l>(line: &'l str, phrase: &str) -> Option<&'l str> {
    line.split_once(phrase)?.1.split('\'').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = include_str!("../../fixtures/nvrtc/small.sm_120.log");
    const HELPER: &str = include_str!("../../fixtures/nvrtc/helper.sm_120.log");
    const BROKEN: &str = include_str!("../../fixtures/nvrtc/broken.log");

    fn entry(kernel: &str, figures: [u32; 4], shared: u32) -> Entry {
        let [registers, frame, stores, loads] = figures.map(Some);
        Entry {
            kernel: kernel.into(),
            registers,
            frame_bytes: frame,
            spill_store_bytes: stores,
            spill_load_bytes: loads,
            static_shared_bytes: shared,
        }
    }

    /// Expected numbers were read off the recorded log by eye.
    #[test]
    fn a_kernel_with_spills_and_one_without() {
        let expected = [entry("crowded", [64, 160, 404, 404], 0), entry("centre", [18, 0, 0, 0], 128)];
        assert_eq!(parse(SMALL), expected);
    }

    /// ptxas reports the called function after the kernel: its spills must not be lost, nor given to the next one.
    #[test]
    fn spills_of_a_called_function_count_for_its_kernel() {
        let found = parse(HELPER);
        let spills: Vec<_> =
            found.iter().map(|e| (e.kernel.as_str(), e.spill_store_bytes, e.spill_load_bytes)).collect();
        assert_eq!(spills, [("roomy", Some(0), Some(0)), ("caller", Some(172), Some(196))]);
        assert_eq!(found[1].frame_bytes, Some(64));
    }

    #[test]
    fn an_empty_or_foreign_log_says_nothing_rather_than_zero() {
        assert_eq!(parse(""), []);
        assert_eq!(parse("Used registers\n bytes stack frame\nFunction properties for \n"), []);
        let cut = &SMALL[..SMALL.find("Function properties").unwrap()];
        assert_eq!(parse(cut), [Entry { kernel: "crowded".into(), ..Entry::default() }]);
        for end in 0..SMALL.len() {
            parse(&SMALL[..end]); // any cut is read without a panic
        }
        let huge = SMALL.replace("404 bytes", "99999999999 bytes");
        assert_eq!(parse(&huge)[0].spill_store_bytes, None);
    }

    #[test]
    fn diagnostics_are_what_is_not_figures() {
        assert_eq!(diagnostics(SMALL), "");
        assert_eq!(diagnostics(BROKEN), BROKEN.trim());
        let warned = format!("a.cu(1): warning #177-D: unused\n\n{SMALL}ptxas warning : too many\n");
        assert_eq!(diagnostics(&warned), "a.cu(1): warning #177-D: unused\n\nptxas warning : too many");
    }
}
