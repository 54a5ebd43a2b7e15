/*!
Results of the float64 reference on disk, for runs that repeat each other: a bisection judges the same case at every commit,
and before the stage that went wrong every commit's tensors have the same bits.

A result is found by a hash of everything that it is a function of: stage and form, the layer's numbers, the plan's rows, the
contract, the bits of the tensors that the stage reads (the *engine's own*: judgement is isolated, so nothing is found once
an engine's inputs to a stage are others), the weights that it reads, and the program itself, byte for byte. So an entry
can't be of another reference. It can be damaged: each carries its key and a hash of itself, and one that does not agree is
removed and computed anew. Verdicts and figures are the same with a cache and without, bit for bit.

A run never fails for its cache: what can't be written is computed again next time, and the report says so.
*/

use crate::judge::compare::Isolated;
use crate::judge::memory::{Entry, Memory, Use};
use crate::trace::store::View;
use crate::trace::{TensorId, npy};
use mla_reference::recall::{Place, Recall};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// First bytes of every entry; the number is the version of its form.
const MAGIC: &[u8; 16] = b"mla-check ref 1\n";
/// Bytes of a hash.
const HASH: usize = 32;
/// Ending of an entry's name.
const ENDING: &str = "ref";

/// A folder of results.
#[derive(Debug)]
pub struct ReferenceCache {
    folder: PathBuf,
    program: blake3::Hash,
    /// Bytes that may stand in it.
    limit: u64,
    /// Bytes that do.
    bytes: AtomicU64,
    damaged: AtomicU64,
    lost: OnceLock<String>,
}

/// The program that runs, byte for byte: a reference that was built anew is another one.
fn program() -> std::io::Result<blake3::Hash> {
    static HASH: OnceLock<blake3::Hash> = OnceLock::new();
    if let Some(known) = HASH.get() {
        return Ok(*known);
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(std::env::current_exe()?)?)?;
    Ok(*HASH.get_or_init(|| hasher.finalize()))
}

impl ReferenceCache {
    /// A folder, made where there is none; the oldest entries go where it holds more than `limit` bytes.
    ///
    /// # Errors
    /// What, where, what to do.
    pub fn open(folder: &Path, limit: u64) -> Result<ReferenceCache, String> {
        let bad = |what: &str, e: std::io::Error| {
            format!(
                "{what}: {e}\n  where: --reference-cache {}\n  do: name a folder that may be written",
                folder.display()
            )
        };
        std::fs::create_dir_all(folder).map_err(|e| bad("the cache's folder can't be made", e))?;
        // Known before hours of work, not after.
        let probe = folder.join(".writable");
        npy::write_atomically(&probe, |_| Ok(()))
            .and_then(|()| remove(&probe))
            .map_err(|e| bad("the cache's folder can't be written", e))?;
        let program = program()
            .map_err(|e| bad("the program can't read itself, so that no entry could be trusted", e))?;
        let bytes = shrink(folder, limit).map_err(|e| bad("the cache's folder can't be read", e))?;
        let (bytes, damaged) = (AtomicU64::new(bytes), AtomicU64::new(0));
        Ok(ReferenceCache { folder: folder.into(), program, limit, bytes, damaged, lost: OnceLock::new() })
    }

    /// Entries that were damaged, and were computed anew.
    pub fn damaged(&self) -> u64 {
        self.damaged.load(Relaxed)
    }

    /// Why something could not be kept, where that happened.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    fn path(&self, key: &blake3::Hash) -> PathBuf {
        let hex = key.to_hex();
        self.folder.join(&hex[..2]).join(format!("{}.{ENDING}", &hex[2..]))
    }
}

/// Removes a file. Another run may be at work in the same folder: what is gone is gone.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Removes the oldest entries until no more than `limit` bytes are left; how many are.
fn shrink(folder: &Path, limit: u64) -> std::io::Result<u64> {
    let mut all = Vec::new();
    for sub in std::fs::read_dir(folder)? {
        let sub = sub?.path();
        if !sub.is_dir() {
            continue;
        }
        for entry in std::fs::read_dir(sub)? {
            let path = entry?.path();
            // See [`remove`].
            let Ok(meta) = path.metadata() else { continue };
            if path.extension().is_some_and(|e| e == ENDING) {
                all.push((meta.modified()?, meta.len(), path));
            }
        }
    }
    all.sort();
    let mut bytes: u64 = all.iter().map(|e| e.1).sum();
    for (_, len, path) in &all {
        if bytes <= limit {
            break;
        }
        remove(path)?;
        bytes -= len;
    }
    Ok(bytes)
}

impl Memory for ReferenceCache {
    fn stage(&self, id: TensorId, of: &Isolated, inputs: &View) -> Box<dyn Entry + '_> {
        let g = &of.spec.geometry;
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update_rayon(bytes);
        };
        part(self.program.as_bytes());
        // Debug texts of floats are exact: shortest that reads back as the same.
        part(format!("{id} {:?} {:?} {:?}", of.spec, of.case.plan, of.contract).as_bytes());
        let mut stages = id.stage.inputs(g, id.form, false).to_vec();
        stages.extend(id.stage.inputs(g, id.form, true));
        for stage in stages {
            let Some(tensor) = inputs.get(stage) else { continue };
            part(format!("{stage} {} {:?}", tensor.dtype, tensor.shape).as_bytes());
            part(&tensor.bytes);
        }
        for &weight in id.stage.weights(g, id.form) {
            part(weight.name().as_bytes());
            if let Some(matrix) = of.weights.matrix(weight) {
                matrix.say(&mut part);
            }
        }
        let key = hasher.finalize();
        Box::new(OnDisk { cache: self, key, taken: AtomicU64::new(0), made: AtomicU64::new(0) })
    }
}

/// The entries of one stage with one set of inputs.
struct OnDisk<'a> {
    cache: &'a ReferenceCache,
    key: blake3::Hash,
    taken: AtomicU64,
    made: AtomicU64,
}

impl OnDisk<'_> {
    fn key(&self, (row, col, first): Place) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.key.as_bytes());
        for n in [row, col, first] {
            hasher.update(&(n as u64).to_le_bytes());
        }
        hasher.finalize()
    }
}

impl Entry for OnDisk<'_> {
    fn used(&self) -> Use {
        Use { taken: self.taken.load(Relaxed), made: self.made.load(Relaxed) }
    }
}

impl Recall for OnDisk<'_> {
    fn get(&self, place: Place) -> Option<Vec<f64>> {
        let key = self.key(place);
        let path = self.cache.path(&key);
        let bytes = std::fs::read(&path).ok();
        let found = bytes.as_deref().and_then(|b| parse(b, &key));
        match (&bytes, &found) {
            (Some(_), None) => {
                self.cache.damaged.fetch_add(1, Relaxed);
                let _ = std::fs::remove_file(&path);
            }
            // The oldest go first: this one is of use.
            (Some(_), Some(_)) => {
                let now = std::time::SystemTime::now();
                let _ = std::fs::File::open(&path).and_then(|f| f.set_modified(now));
            }
            _ => {}
        }
        let counter = if found.is_some() { &self.taken } else { &self.made };
        counter.fetch_add(1, Relaxed);
        found
    }

    fn put(&self, place: Place, numbers: &[&[f64]]) {
        let cache = self.cache;
        if cache.lost.get().is_some() {
            return;
        }
        let len = (MAGIC.len() + 2 * HASH + 8 * numbers.iter().map(|n| n.len()).sum::<usize>()) as u64;
        if cache.bytes.fetch_add(len, Relaxed) + len > cache.limit {
            cache.bytes.fetch_sub(len, Relaxed);
            let _ = cache.lost.set(format!("its {} bytes are full", cache.limit));
            return;
        }
        let key = self.key(place);
        let path = cache.path(&key);
        let written = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            npy::write_atomically(&path, |out| {
                let mut out = Hashing { out, hasher: blake3::Hasher::new() };
                out.write_all(MAGIC)?;
                out.write_all(key.as_bytes())?;
                let mut bytes = Vec::with_capacity(8 * 4096);
                for part in numbers.iter().flat_map(|n| n.chunks(4096)) {
                    bytes.clear();
                    bytes.extend(part.iter().flat_map(|v| v.to_le_bytes()));
                    out.write_all(&bytes)?;
                }
                let hash = out.hasher.finalize();
                out.out.write_all(hash.as_bytes())
            })
        });
        if let Err(e) = written {
            let _ = cache.lost.set(e.to_string());
        }
    }
}

/// The numbers of an entry, if it is whole and of this key.
fn parse(bytes: &[u8], key: &blake3::Hash) -> Option<Vec<f64>> {
    let (content, hash) = bytes.split_last_chunk::<HASH>()?;
    let numbers = content.strip_prefix(MAGIC)?.strip_prefix(key.as_bytes().as_slice())?;
    (blake3::hash(content).as_bytes() == hash).then_some(())?;
    let (numbers, []) = numbers.as_chunks::<8>() else { return None };
    Some(numbers.iter().map(|b| f64::from_le_bytes(*b)).collect())
}

/// Hashes what passes through.
struct Hashing<'a> {
    out: &'a mut dyn Write,
    hasher: blake3::Hasher,
}

impl Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path, limit: u64) -> ReferenceCache {
        ReferenceCache::open(folder, limit).unwrap()
    }

    fn entry<'a>(cache: &'a ReferenceCache, key: &str) -> OnDisk<'a> {
        let key = blake3::hash(key.as_bytes());
        OnDisk { cache, key, taken: AtomicU64::new(0), made: AtomicU64::new(0) }
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let subs = std::fs::read_dir(folder).unwrap().map(|s| s.unwrap().path());
        let mut all: Vec<PathBuf> =
            subs.flat_map(|s| std::fs::read_dir(s).unwrap().map(|f| f.unwrap().path())).collect();
        all.sort();
        all
    }

    #[test]
    fn numbers_come_back_bit_for_bit_under_their_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), 1 << 20);
        let numbers = [1.0, -0.0, f64::from_bits(0x7ff8_0000_0000_0abc), f64::NEG_INFINITY, 5e-324];
        let e = entry(&cache, "a");
        assert!(e.get((0, 2, 0)).is_none());
        e.put((0, 2, 0), &[&numbers[..2], &[], &numbers[2..]]);
        let bits = |v: &[f64]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&e.get((0, 2, 0)).unwrap()), bits(&numbers));
        assert_eq!(e.used(), Use { taken: 1, made: 1 });
        for (key, place) in [("a", (2, 0, 0)), ("a", (0, 2, 1)), ("b", (0, 2, 0))] {
            assert!(entry(&cache, key).get(place).is_none(), "{key} {place:?}");
        }
        assert_eq!((cache.damaged(), cache.lost()), (0, None));
    }

    /// Whatever happens to a file, nothing wrong is read from it, and it is replaced.
    #[test]
    fn what_is_damaged_or_of_another_place_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), 1 << 20);
        let e = entry(&cache, "a");
        let mut damage = 0;
        let mut check = |change: &dyn Fn(&Path)| {
            e.put((0, 0, 0), &[&[1.0, 2.0]]);
            e.put((1, 0, 0), &[&[3.0, 4.0]]);
            change(&cache.path(&e.key((0, 0, 0))));
            assert!(e.get((0, 0, 0)).is_none());
            damage += 1;
            assert_eq!(cache.damaged(), damage);
            assert!(!cache.path(&e.key((0, 0, 0))).exists());
            assert_eq!(e.get((1, 0, 0)), Some(vec![3.0, 4.0]));
        };
        let len = MAGIC.len() + 2 * HASH + 16;
        for at in 0..len {
            check(&|path| {
                let mut bytes = std::fs::read(path).unwrap();
                assert_eq!(bytes.len(), len);
                bytes[at] ^= 1;
                std::fs::write(path, bytes).unwrap();
            });
        }
        for short in [0, 1, HASH, len - 8, len - 1] {
            check(&|path| std::fs::write(path, &std::fs::read(path).unwrap()[..short]).unwrap());
        }
        check(&|path| {
            std::fs::copy(cache.path(&e.key((1, 0, 0))), path).unwrap();
        });
    }

    #[test]
    fn it_does_not_grow_beyond_its_limit_and_forgets_the_oldest() {
        let folder = tempfile::tempdir().unwrap();
        let small = cache(folder.path(), 300);
        let e = entry(&small, "a");
        for row in 0..3 {
            e.put((row, 0, 0), &[&[0.5; 8]]); // 144 bytes each
        }
        assert_eq!(files(folder.path()).len(), 2);
        assert!(small.lost().is_some_and(|l| l.contains("full")));
        let old = small.path(&e.key((0, 0, 0)));
        let past = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
        std::fs::File::open(&old).unwrap().set_modified(past).unwrap();
        let smaller = cache(folder.path(), 200);
        assert!(entry(&smaller, "a").get((0, 0, 0)).is_none());
        assert!(entry(&smaller, "a").get((1, 0, 0)).is_some());
    }

    /// Two runs that share a folder remove the same files.
    #[test]
    fn what_another_run_removed_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(remove(&folder.path().join("gone")).is_ok());
        assert!(remove(folder.path()).is_err());
    }

    #[test]
    fn a_folder_that_can_not_be_written_is_said_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let e = ReferenceCache::open(&folder.path().join("file"), 1).unwrap_err();
        assert!(e.contains("where: --reference-cache") && e.contains("  do: "), "{e}");
    }
}
