//! Thousands of damaged files through all that `inspect` and `run` ask of a file: no panic, no hang, no memory out of
//! proportion. A few hundred in every test run; `cargo test --test gguf_harm -- --ignored --nocapture` for 10,000.

#[path = "common/counting.rs"]
mod counting;
#[path = "common/harm.rs"]
mod harm;
#[path = "common/tiny.rs"]
mod tiny;
#[path = "common/walk.rs"]
mod walk;

use counting::memory;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// A file to be damaged; the parts of a split beside it stay whole.
struct Base {
    name: String,
    bytes: Vec<u8>,
    fields: Vec<(usize, usize)>,
    /// Whether it is small enough for all its values to be read each time.
    small: bool,
}

const SPLIT: [&str; 3] =
    ["dsv3.Q4_K_M-00001-of-00003.gguf", "dsv3.Q4_K_M-00002-of-00003.gguf", "dsv3.Q4_K_M-00003-of-00003.gguf"];

/// The files of the repository and the tiny ones, the latter three times as often.
fn bases(folder: &Path) -> Vec<Base> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    tiny::write(folder).unwrap();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).unwrap();
        let fields = harm::fields(&bytes);
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        Base { name, small: bytes.len() < 100_000, bytes, fields }
    };
    let mut all: Vec<Base> = (0..9).map(|i| read(folder.join(tiny::NAMES[i % 3]))).collect();
    all.push(read(fixtures.join("gguf/small.gguf")));
    all.push(read(fixtures.join("models/glm5dims.Q4_K_M.gguf")));
    for part in SPLIT {
        std::fs::copy(fixtures.join("models").join(part), folder.join(part)).unwrap();
    }
    all.push(read(fixtures.join("models").join(SPLIT[0])));
    all.push(read(fixtures.join("models").join(SPLIT[1])));
    all
}

/// What may be held for a file: what opening it may cost (see gguf_damage.rs), findings and weights put into words, and
/// the keys of an unsplit kv_b in float64 (of the densest type here, Q4_0, 14 times its bytes).
fn justified(file: usize) -> isize {
    (1 << 20) + 100 * file as isize
}

fn harmed(files: usize, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let bases = bases(folder.path());
    let mut draw = harm::Draw(seed);
    let (mut opened, mut models, mut layers, mut spawned) = (0, 0, 0, 0);
    let (mut slowest, mut most) = (Duration::ZERO, 0.0f64);
    let started = Instant::now();
    for i in 0..files {
        let base = &bases[draw.below(bases.len())];
        let other = &bases[draw.below(bases.len())];
        let mut bytes = base.bytes.clone();
        harm::damage(&mut bytes, &base.fields, &other.bytes, &mut draw);
        let path = folder.path().join(&base.name);
        std::fs::write(&path, &bytes).unwrap();
        let begun = Instant::now();
        let caught = std::panic::catch_unwind(|| memory(|| walk::everything(&path, base.small)));
        let took = begun.elapsed();
        // What went wrong is kept where the build keeps its files.
        let keep = || {
            let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("harm-{seed}-{i}.gguf"));
            std::fs::write(&kept, &bytes).unwrap();
            format!("file {i} of seed {seed}, kept as {}", kept.display())
        };
        let Ok((reached, held)) = caught else { panic!("panic: {}", keep()) };
        // Unoptimised code on a machine that does other things, too.
        assert!(took < Duration::from_secs(20), "{took:?}: {}", keep());
        assert!(held < justified(bytes.len()), "{held} bytes held of {}: {}", bytes.len(), keep());
        opened += usize::from(reached.container);
        models += usize::from(reached.model);
        layers += reached.layers;
        slowest = slowest.max(took);
        most = most.max(held as f64 / justified(bytes.len()) as f64);
        // The whole program, with its reports, now and then.
        if i % 50 == 0 {
            let output = Command::new(env!("CARGO_BIN_EXE_mla-check"))
                .args(["inspect", "--data", "--tensors", "--layer", "all", "--threads", "1"])
                .arg(&path)
                .env("CUDA_VISIBLE_DEVICES", "")
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let code = output.status.code();
            assert!(
                matches!(code, Some(0..=2)),
                "{code:?} {}: {}",
                String::from_utf8_lossy(&output.stderr),
                keep()
            );
            spawned += 1;
        }
        std::fs::write(&path, &base.bytes).unwrap();
    }
    // A report for who ran this by hand.
    let _ = writeln!(
        std::io::stderr(),
        "{files} damaged files in {:.0?}: {opened} opened, {models} made a model, {layers} layers could be used; slowest \
         {slowest:.1?}; at most {:.0} % of the justified memory; {spawned} through the program",
        started.elapsed(),
        100.0 * most
    );
    // The damage must reach everywhere: some files are refused at each step, some pass.
    assert!(0 < layers && models < opened && opened < files && 0 < models);
}

#[test]
fn some_damaged_files() {
    harmed(300, 20_261_130);
}

#[test]
#[ignore = "minutes"]
fn ten_thousand_damaged_files() {
    let seed = std::env::var("MLA_CHECK_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    harmed(10_000, seed);
}
