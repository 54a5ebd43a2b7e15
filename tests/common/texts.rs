//! Faults inside kernels, each in the small run that makes it act; and that run without a fault.

use super::small::{Memory, Random, Views};
use mla_check::check::{self, Beside, EngineKind, Options};
use mla_check::fault::Fault;
use mla_check::fault::text::{First, GEOMETRY, Mutation, PREFIX, Shows};
use mla_check::judge::cause::Diagnosis;
use mla_check::judge::{Explained, Settings, Unit, Verdict, origins};
use mla_check::model::Layer;
use mla_reference::product::{Blocks, Rows};
use mla_reference::{Geometry, GgmlType, Pairing, Regime, Rope, Spec, Weight, Weights};

/// The weight that is stored in blocks, where a row asks for some.
pub const STORED: Weight = Weight::WQA;

fn geometry(shows: &Shows) -> Geometry {
    // Whole blocks of 256.
    Geometry { hidden: if shows.stored.is_some() { 256 } else { GEOMETRY.hidden }, ..GEOMETRY }
}

fn spec(g: Geometry) -> Spec {
    let inv_freq = (0..g.rope / 2).map(|j| 1e4f64.powf(-2.0 * j as f64 / g.rope as f64)).collect();
    Spec {
        geometry: g,
        eps_attn: 1e-5,
        eps_latent: 1e-6,
        rope: Rope { inv_freq, magnitude: 1.0, pairing: Pairing::Adjacent },
        scale: 1.0 / (g.key() as f64).sqrt(),
        temperature: None,
    }
}

/// Weights of which one lies in blocks.
struct Stored<'a> {
    inner: &'a dyn Weights,
    blocks: Option<Blocks<'a>>,
}

impl Weights for Stored<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        match &self.blocks {
            Some(b) if weight == STORED => Some(b),
            _ => self.inner.matrix(weight),
        }
    }
    fn norm(&self, weight: Weight) -> Option<&[f64]> {
        self.inner.norm(weight)
    }
}

/// Where a type has its f16 scales.
fn scales(ty: GgmlType) -> &'static [usize] {
    use GgmlType::*;
    match ty {
        Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
        Q2_K => &[80, 82],
        Q3_K => &[108],
        Q6_K => &[208],
        TQ1_0 => &[52],
        TQ2_0 => &[64],
        MXFP4 | NVFP4 | F64 | F16 | BF16 | F32 | Q8_K | IQ1_M => &[],
        _ => &[0],
    }
}

/// Random blocks with scales of 2^-9.
fn blocks(ty: GgmlType, elements: usize) -> Vec<u8> {
    let mut r = Random(7);
    let size = ty.block_bytes();
    let count = elements / ty.block_elements();
    let mut bytes: Vec<u8> = (0..count * size).map(|_| (r.next() * 127.5 + 127.5) as u8).collect();
    for block in bytes.chunks_mut(size) {
        for at in scales(ty) {
            block[*at..at + 2].copy_from_slice(&0x1800u16.to_le_bytes());
        }
        match ty {
            GgmlType::MXFP4 => block[0] = 119,
            GgmlType::NVFP4 => block[..4].copy_from_slice(&[0x18, 0x21, 0x13, 0x1c]),
            GgmlType::F64 => block.copy_from_slice(&(r.next() / 16.0).to_le_bytes()),
            _ => {}
        }
    }
    bytes
}

/// What is judged of a run.
pub fn run(engine: EngineKind, shows: &Shows, mutation: Option<&Mutation>) -> Result<Vec<Unit>, String> {
    let options = Options {
        engine,
        forms: vec![shows.form],
        dtype: shows.dtype,
        batch: shows.batch.parse().unwrap(),
        regimes: vec![Regime::Random],
        page_size: shows.page_size,
        splits: Some(shows.splits),
        context_chunk: shows.context_chunk,
        fault: mutation.map(|m| Fault::parse(&format!("{PREFIX}{}", m.name), 0).unwrap()),
        ..Options::default()
    };
    let g = geometry(shows);
    let memory = Memory::new(&g);
    let views = Views::of(&memory);
    let bytes = shows.stored.map(|ty| (ty, blocks(ty, g.q_rank * g.hidden)));
    let blocks = bytes.as_ref().map(|(ty, bytes)| Blocks::new(*ty, bytes, g.hidden).unwrap());
    let weights = Stored { inner: &views, blocks };
    let layer = &Layer { index: 0, spec: spec(g), weights: &weights };
    let said = |e: &dyn std::fmt::Display| e.to_string();
    let case = check::draw(layer, &options).map_err(|e| said(&e))?;
    let engine = check::engine(&options).map_err(|e| said(&e))?;
    // Why values are wrong that are so by chance, nobody can say.
    let closer = mutation.is_none_or(|m| m.first.is_some());
    let beside = Beside { settings: Settings { closer, ..Settings::default() }, ..Beside::default() };
    let judged = check::judge(layer, &case, &options, engine.as_ref(), beside, &|_| ());
    Ok(judged.map_err(|e| said(&e))?.units)
}

const UNEXPLAINED: &str = "unexplained";

/// What says why a unit is wrong, and another contract that explains it.
pub fn named(u: &Unit) -> String {
    let cause = match &u.diagnosis {
        Some(Diagnosis::Cause(c)) => format!("{}: {}; {:?}", c.name, c.text, c.ambiguous_with),
        Some(Diagnosis::Unexplained { best, .. }) => format!("{UNEXPLAINED}, best {best:?}"),
        None => String::new(),
    };
    match &u.explained {
        None => cause,
        Some(Explained::Contract(c) | Explained::Convention(c)) => format!("contract: {c}; {cause}"),
    }
}

/// By which share the norm of a unit's tensor is off. Memory that nobody wrote is NaN, as it was filled before.
fn norm_off(u: &Unit) -> f64 {
    let (Some(own), Some(reference)) = (&u.engine, &u.reference) else { return 0.0 };
    // Whoever prints a norm sees NaN; this one is of what is finite.
    if u.not_finite > 0 { f64::INFINITY } else { (own.norm / reference.norm - 1.0).abs() }
}

/// What a row asks for and does not get.
pub fn missed(m: &Mutation, units: &[Unit]) -> Vec<String> {
    let mut missed = Vec::new();
    let evidence = || units.iter().flat_map(|u| &u.evidence);
    let bad: Vec<&Unit> = origins(units).collect();
    if bad.is_empty() {
        missed.push("it was not caught".into());
    }
    if let Some(finding) = m.finding
        && !evidence().any(|e| e.contains(finding))
    {
        missed.push(format!("no detector says {finding:?}"));
    }
    match m.first {
        None => {}
        Some(first) => {
            let is = |u: &&&Unit| match first {
                First::Weight(w) => u.tensor == w.name(),
                First::Tensor(s) => u.tensor == s.name(),
            };
            if !bad.first().iter().all(is) {
                missed.push(format!("the first wrong tensor is not {}", first.name()));
            }
            if let Some(off) = bad.first().map(|u| norm_off(u))
                && (off > 0.1) != m.norms
            {
                missed.push(format!("its norm is off by {:.2} %", 100.0 * off));
            }
        }
    }
    if let (Some(_), Some(u)) = (m.first, bad.first()) {
        let (name, unexplained) = (named(u), named(u).starts_with(UNEXPLAINED));
        match m.cause {
            Some(cause) if unexplained || !name.contains(cause) => {
                missed.push(format!("the cause is not {cause:?}"));
            }
            // Nothing is the name of it: any is a wrong one.
            None if !unexplained => missed.push("it has a name".into()),
            _ => {}
        }
    }
    if !missed.is_empty() {
        for u in bad.iter().take(4) {
            missed.push(format!(
                "{}: {:?}, {} beyond; {}; {}",
                u.title(),
                u.verdict,
                u.beyond,
                shortened(u),
                named(u)
            ));
        }
    }
    missed
}

/// The first pieces of evidence.
fn shortened(u: &Unit) -> String {
    let short = |e: &String| e.chars().take(160).collect::<String>();
    u.evidence.iter().take(4).map(short).collect::<Vec<_>>().join("; ")
}

/// Nothing is held against a run without a fault, and all of it was compared.
pub fn accused(units: &[Unit]) -> Vec<String> {
    let wrong = |u: &&Unit| !matches!(u.verdict, Verdict::Exact | Verdict::Rounding | Verdict::Inconclusive);
    let said = |u: &Unit| format!("{}: {:?}, {}", u.title(), u.verdict, u.evidence.join("; "));
    origins(units).chain(units.iter().filter(wrong)).map(said).collect()
}
