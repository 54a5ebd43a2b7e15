/*!
The reference cache from end to end: a second run takes everything from it, a fault later in the layer leaves what came before
it, damage is found out, and reports are the same with it and without.
*/

mod common;

use common::fixture;
use mla_check::check::{self, Options};
use mla_check::fault::Fault;
use mla_check::model::Model;
use mla_check::reference_cache::ReferenceCache;
use mla_reference::{Form, Regime};
use std::path::Path;
use std::sync::Arc;

const FILE: &str = "models/dsv3.Q4_K_M-00001-of-00003.gguf";

/// The report as JSON, without times, and what the cache was good for: (taken, made, damaged).
fn run(folder: Option<&Path>, change: impl FnOnce(&mut Options)) -> (String, [u64; 3]) {
    let model = Model::open(&fixture(FILE)).unwrap();
    let mut options = Options {
        batch: "0+3,70+1".parse().unwrap(),
        forms: vec![Form::Absorbed],
        regimes: vec![Regime::Random],
        splits: Some(2),
        ..Options::default()
    };
    options.reference_cache = folder.map(|f| Arc::new(ReferenceCache::open(f, 1 << 30).unwrap()));
    change(&mut options);
    let mut report = check::layer(&model, 0, &options, &|_| ()).unwrap();
    (report.seconds, report.probe_seconds) = (0.0, 0.0);
    let cache = report.reference_cache.take();
    let counts = cache.map_or([0; 3], |c| [c.used.taken, c.used.made, c.damaged]);
    (serde_json::to_string(&report).unwrap(), counts)
}

#[test]
fn equal_bits_are_found_again_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Some(folder.path());
    let (plain, _) = run(None, |_| ());
    let (first, [taken, made, damaged]) = run(cache, |_| ());
    assert!(taken == 0 && made > 0 && damaged == 0, "{taken} {made} {damaged}");
    let (second, counts) = run(cache, |_| ());
    assert_eq!(counts, [made, 0, 0]);
    assert!(plain == first && plain == second);

    // Another seed, another contract: other inputs, other results.
    assert_eq!(run(cache, |o| o.seed = 1).1[0], 0);
    // A fault in o_latent: everything before it is the same.
    let fault = |o: &mut Options| o.fault = Some(Fault::parse("o_latent-element", 0).unwrap());
    let (with, [taken, made_anew, _]) = run(cache, fault);
    assert!(taken > made / 2 && made_anew > 0, "{taken} of {made}, {made_anew} anew");
    assert_eq!(with, run(None, fault).0);
    // A weight with one other element, and everything behind it.
    let fault = |o: &mut Options| o.fault = Some(Fault::parse("w_q_a-element", 0).unwrap());
    let (with, [taken, made_anew, _]) = run(cache, fault);
    assert!(made_anew > taken, "{taken} taken, {made_anew} anew");
    assert_eq!(with, run(None, fault).0);
}

/// A cache that is wrong in one place does not change a report.
#[test]
fn damage_is_computed_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (first, [_, made, _]) = run(Some(folder.path()), |_| ());
    let mut files = Vec::new();
    for sub in std::fs::read_dir(folder.path()).unwrap() {
        files.extend(std::fs::read_dir(sub.unwrap().path()).unwrap().map(|f| f.unwrap().path()));
    }
    files.sort();
    for (i, path) in files.iter().enumerate() {
        let mut bytes = std::fs::read(path).unwrap();
        match i % 3 {
            0 => *bytes.last_mut().unwrap() ^= 1,
            1 => bytes[200] ^= 0x40,
            _ => bytes.truncate(100),
        }
        std::fs::write(path, bytes).unwrap();
    }
    let (second, counts) = run(Some(folder.path()), |_| ());
    assert_eq!(counts, [0, made, files.len() as u64]);
    assert_eq!(first, second);
    // And is whole again.
    assert_eq!(run(Some(folder.path()), |_| ()).1, [made, 0, 0]);
}
