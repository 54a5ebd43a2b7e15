/*!
Products, norms, rotations, copies and merges: terms from the same inputs and by the same formulas as the reference's
([`mla_reference::evaluate`]).
*/

use super::{Element, Made, Operand, Part, Sum, Term};
use crate::judge::bound::rho;
use mla_numeric::U;
use mla_reference::attention::merge_weights;
use mla_reference::elementwise::{declared_table, pair, step};
use mla_reference::product::Rows;
use mla_reference::{Contract, Form, Operands, RopeAngle, Stage, Terms, Weight};
use ndarray::ArrayView2;

/// Of all stages but attention.
pub fn made(e: &Element) -> Made {
    match e.terms {
        Terms::Product { a, w, size, .. } => {
            let size = size.get([e.i, e.j]).copied();
            product(e, *a, *w, size)
        }
        Terms::Norm { len, z, gamma } => norm(e, *len, z[[e.i, e.j]], gamma),
        Terms::Rope { .. } => rope(e),
        Terms::Merge { spread, size, lse, .. } => {
            let size = size.get([e.i, e.j]).copied();
            merge(e, *lse, (spread.get(e.i).copied().unwrap_or(0.0), size))
        }
        Terms::Sum { size, parts } => sum(e, *parts, size.get([e.i, e.j]).copied()),
        _ => copy(e),
    }
}

/// Where the k-th factor of a product stands: of the left side, and of the weight.
type Factors = ((Stage, usize, usize), (Weight, usize, usize));

fn factors(e: &Element, k: usize) -> Option<Factors> {
    let g = &e.of.isolated.spec.geometry;
    let (row, col) = (e.row, e.col);
    Some(match e.id.stage {
        Stage::QA => ((Stage::AttnIn, row, k), (Weight::WQA, col, k)),
        Stage::KvA => ((Stage::AttnIn, row, k), (Weight::WKvA, col, k)),
        Stage::QRaw if g.q_rank == 0 => ((Stage::AttnIn, row, k), (Weight::WQ, col, k)),
        Stage::QRaw => ((Stage::QANormed, row, k), (Weight::WQB, col, k)),
        Stage::Out => ((Stage::AttnOut, row, k), (Weight::WO, col, k)),
        Stage::PartOut => {
            let plan = &e.of.isolated.case.plan;
            let rows = plan.rows(Stage::Out, e.id.form).max(1);
            let at = row / rows * (g.values() / plan.ranks.max(1)) + k;
            ((Stage::AttnOut, row % rows, at), (Weight::WO, col, at))
        }
        Stage::V => ((Stage::Cache, slot(e)?, k), (Weight::WUv, col, k)),
        Stage::K => {
            let (h, j) = (col / g.key(), col % g.key());
            ((Stage::Cache, slot(e)?, k), (Weight::WUk, h * g.latent + k, j))
        }
        Stage::QLatent => {
            let h = col / g.latent;
            ((Stage::Q, row, h * g.key() + k), (Weight::WUk, col, k))
        }
        Stage::AttnOut => {
            let h = col / g.value;
            ((Stage::OLatent, row, h * g.latent + k), (Weight::WUv, col, k))
        }
        _ => return None,
    })
}

/// The cache's slot of a row of keys.
fn slot(e: &Element) -> Option<usize> {
    let mut rows = e.of.isolated.case.plan.key_rows();
    let (_, seq, range) = rows.find(|(_, _, r)| r.contains(&e.row))?;
    seq.slots.get(e.row - range.start).copied()
}

fn product(e: &Element, a: ArrayView2<f64>, w: &dyn Rows, size: Option<f64>) -> Made {
    let (left, mut right) = (a.row(e.i).to_vec(), vec![0.0; w.cols()]);
    w.decode(e.j, 0, &mut right);
    let terms: Vec<f64> = left.iter().zip(&right).map(|(a, w)| a * w).collect();
    let mut made = Made::default();
    made.sums.push(Sum::among("x", &terms, e.shown, |k| {
        let of = match factors(e, k) {
            Some((l, r)) => {
                vec![e.sources.input(l.0, l.1, l.2, Some(left[k])), e.sources.weight(r.0, r.1, r.2, right[k])]
            }
            None => Vec::new(),
        };
        Term::new(format!("k {k}"), of, terms[k])
    }));
    let c = e.contract;
    made.casts.push(format!("weights to {}", c.weights));
    if c.operands != Operands::Stored {
        made.casts.push(format!("the left side's rows to {}", c.operands));
    }
    if e.id.stage == Stage::Out && c.ranks > 1 {
        made.notes.push(format!(
            "{} ranks' parts, each rounded, are summed in an order that nobody knows: in the bound, not in x",
            c.ranks
        ));
    }
    let (len, accumulate) = (terms.len(), c.accumulate);
    made.parts
        .push(Part::new(format!("roundings of accumulator {accumulate}"), accumulate.roundings(len) as f64));
    made.parts.push(Part::new("γ of these roundings", accumulate.gamma(len)));
    if let Some(size) = size {
        made.parts.push(Part::new("times Σ|a·w|, as norms of blocks of 128 bound it", size));
    }
    made
}

fn norm(e: &Element, len: usize, z: f64, gamma: &[f64]) -> Made {
    let spec = e.of.isolated.spec;
    let (input, weight, eps) = match e.id.stage {
        Stage::AttnIn => (Stage::Hidden, Weight::GAttn, spec.eps_attn),
        Stage::QANormed => (Stage::QA, Weight::GQ, spec.eps_latent),
        _ => (Stage::KvA, Weight::GKv, spec.eps_latent),
    };
    let row = e.sources.row(input, e.row, 0..len);
    let squares: Vec<f64> = row.iter().map(|v| v * v / len as f64).collect();
    let mean = Sum::among("mean square", &squares, e.shown, |k| {
        Term::new(format!("column {k}"), Vec::new(), squares[k]).of(e.sources.input(input, e.row, k, None))
    });
    let cast = e.contract.norm_cast;
    let (held, g) = (cast.map_or(z, |d| d.round(z)), gamma.get(e.j).copied().unwrap_or(f64::NAN));
    let mut made = Made::default();
    made.step("mean square", mean.total, format!("Σ {input}² / {len}"));
    made.step("eps", eps, "by the convention");
    made.step("rms", (mean.total + eps).sqrt(), "√(mean square + eps)");
    let own = e.sources.input(input, e.row, e.col, None);
    made.step(input.name(), own.value, format!("this column, bits {}", own.bits.clone().unwrap_or_default()));
    made.step("normalised", z, format!("{input} / rms"));
    made.step(
        "as multiplied",
        held,
        cast.map_or("not rounded before γ".into(), |d| format!("rounded to {d} before γ")),
    );
    let normalised = Operand::plain("normalised", Vec::new(), held);
    let factors = vec![normalised, e.sources.weight(weight, 0, e.col, g)];
    made.sums.push(Sum::of("x", vec![Term::new("", factors, held * g)], 1));
    made.sums.push(mean);
    made.casts.push(format!("γ to {}", e.contract.norm_weights));
    if let Some(d) = cast {
        made.casts.push(format!("the normalised value to {d}, before γ"));
    }
    let rho = rho(len);
    made.parts.push(Part::new("ρ: sum, root, two products, relative", rho));
    match cast {
        None => made.parts.push(Part::new("times |x|", (held * g).abs())),
        Some(d) => {
            made.parts
                .push(Part::new("step of the cast within ρ, times |γ|", step(d, z, rho * z.abs()) * g.abs()));
            made.parts.push(Part::new("u|x|", U * (held * g).abs()));
        }
    }
    made
}

/// Column of q or k_pe in which a head's rotated columns begin, the columns of the input from which they come, and the
/// column within.
fn rotated(e: &Element) -> (Stage, usize, usize, usize) {
    let g = &e.of.isolated.spec.geometry;
    match e.id.stage {
        Stage::Q => (Stage::QRaw, e.col - e.col % g.key(), g.nope, e.col % g.key()),
        _ => (Stage::KvA, g.latent, 0, e.col),
    }
}

fn rope(e: &Element) -> Made {
    let spec = e.of.isolated.spec;
    let (input, head, first, j) = rotated(e);
    let position = e.of.isolated.case.plan.positions.get(e.row).copied().unwrap_or(0);
    let factor = spec.temperature.filter(|_| e.id.stage == Stage::Q).map_or(1.0, |t| t.factor(position));
    let mut made = Made::default();
    made.step("position", position as f64, "");
    if factor != 1.0 {
        made.step("temperature", factor, "factor on queries at this position");
    }
    let warm = |mut of: Vec<Operand>| {
        if factor != 1.0 {
            of.push(Operand::plain("temperature", Vec::new(), factor));
        }
        of
    };
    if j < first {
        let own = e.sources.input(input, e.row, head + j, None);
        let value = own.value * factor;
        made.sums.push(Sum::of("x", vec![Term::new("not rotated", warm(vec![own]), value)], 1));
        return made;
    }
    let (within, width) = (j - first, spec.geometry.rope);
    let pairing = spec.rope.pairing;
    let Some(p) = (0..width / 2).find(|p| {
        let (a, b) = pair(pairing, *p, width);
        a == within || b == within
    }) else {
        return made;
    };
    let (ia, ib) = pair(pairing, p, width);
    let (cos, sin) = declared_table(&spec.rope, &[position], e.contract);
    let (c, s, frequency) = (cos[[0, p]], sin[[0, p]], spec.rope.inv_freq[p]);
    made.step("pair", p as f64, format!("columns {ia} and {ib} of the rotated ones"));
    made.step("frequency", frequency, "radians a position");
    let angle = match e.contract.rope_angle {
        RopeAngle::Exact => position as f64 * frequency,
        RopeAngle::F32 => {
            let f32 = |v| mla_numeric::DType::F32.round(v);
            f32(position as f64 * f32(frequency))
        }
    };
    made.step("angle", angle, "radians");
    made.step("cos", c, format!("held in {}", e.contract.rope_table));
    made.step("sin", s, format!("held in {}", e.contract.rope_table));
    let column = |at: usize| e.sources.input(input, e.row, head + first + at, None);
    let (a, b) = (column(ia), column(ib));
    // (a, b) → (a·cos − b·sin, b·cos + a·sin)
    let terms = if within == ia {
        [("a·cos", a, "cos", c), ("−b·sin", b, "−sin", -s)]
    } else {
        [("b·cos", b, "cos", c), ("a·sin", a, "sin", s)]
    };
    let cast = e.contract.rope_products;
    let (mut size, mut stepped) = (0.0, 0.0);
    let terms = terms.map(|(name, of, word, by)| {
        let product = of.value * by;
        size += product.abs() * factor.abs();
        let value = cast.map_or(product, |d| {
            stepped += step(d, product, U * product.abs()) * factor.abs();
            d.round(product)
        });
        Term::new(name, warm(vec![of, Operand::plain(word, Vec::new(), by)]), value * factor)
    });
    made.sums.push(Sum::of("x", terms.into(), 2));
    made.casts.push(format!("cos and sin to {}", e.contract.rope_table));
    if e.contract.rope_angle == RopeAngle::F32 {
        made.casts.push("the angle to f32, of a frequency in f32".into());
    }
    if let Some(d) = cast {
        made.casts.push(format!("both products to {d}, before they are added"));
    }
    let roundings = if spec.temperature.is_some() && e.id.stage == Stage::Q { 5.0 } else { 3.0 };
    made.parts
        .push(Part::new(format!("{roundings} roundings of u times |a·cos| + |b·sin|"), roundings * U * size));
    if cast.is_some() {
        made.parts.push(Part::new("steps of the products' casts", stepped));
    }
    made
}

fn copy(e: &Element) -> Made {
    let (plan, given) = (&e.of.isolated.case.plan, &e.of.isolated.case.given);
    let g = &e.of.isolated.spec.geometry;
    let mut made = Made::default();
    let source = match e.id.stage {
        Stage::K => {
            slot(e).map(|s| e.sources.input(Stage::Cache, s, g.latent + e.col % g.key() - g.nope, None))
        }
        Stage::Cache => {
            let name = plan.names(Stage::Cache, None).get(e.row).copied();
            let at = name.and_then(|n| Some((n.sequence?, n.index)));
            at.map(|(s, position)| {
                let seq = &plan.sequences[s];
                made.step(
                    "sequence",
                    s as f64,
                    format!("request {}, {} context", seq.request, seq.regime.name()),
                );
                made.step("position", position as f64, "key of that sequence at this slot");
                if position < seq.context {
                    let value = given.context.get(s).and_then(|c| c.get([position, e.col])).copied();
                    let index = vec![s, position, e.col];
                    return Operand::plain("context row, given", index, value.unwrap_or(f64::NAN));
                }
                let token = seq.tokens.start + position - seq.context;
                match e.col.checked_sub(g.latent) {
                    None => e.sources.input(Stage::KvCNormed, token, e.col, None),
                    Some(col) => e.sources.input(Stage::KPe, token, col, None),
                }
            })
        }
        _ => {
            given.hidden.get([e.row, e.col]).map(|v| Operand::plain("hidden, given", vec![e.row, e.col], *v))
        }
    };
    match source {
        Some(of) => {
            let value = of.value;
            made.sums.push(Sum::of("x", vec![Term::new("a copy of", vec![of], value)], 1));
        }
        None => made.notes.push("a slot that no sequence owns: nothing is expected there".into()),
    }
    made
}

/// `out` of the ranks' parts.
fn sum(e: &Element, parts: usize, size: Option<f64>) -> Made {
    let rows = e.of.isolated.case.plan.rows(Stage::Out, e.id.form);
    let values: Vec<Operand> =
        (0..parts).map(|r| e.sources.input(Stage::PartOut, r * rows + e.row, e.col, None)).collect();
    let each: Vec<f64> = values.iter().map(|v| v.value).collect();
    let mut made = Made::default();
    made.sums.push(Sum::among("x", &each, e.shown, |r| {
        Term::new(format!("rank {r}"), vec![values[r].clone()], each[r])
    }));
    made.notes.push("summed in float32: its roundings are in the bound, not in x".into());
    let n = parts.saturating_sub(1) as f64 * U;
    made.parts.push(Part::new("relative error of ranks − 1 additions", n / (1.0 - n)));
    if let Some(size) = size {
        made.parts.push(Part::new("times Σ|part_out|", size));
    }
    made
}

fn merge(e: &Element, lse: bool, (spread, size): (f64, Option<f64>)) -> Made {
    let (plan, g) = (&e.of.isolated.case.plan, &e.of.isolated.spec.geometry);
    let form = e.id.form.unwrap_or(Form::Fused);
    let (splits, steps) = (plan.parts(form), plan.part_rows(form));
    let index = plan.part_sequences(form).flat_map(|(_, _, rows, _)| rows).position(|row| row == e.row);
    let index = index.unwrap_or(0);
    let width = match (lse, e.id.form) {
        (true, _) => 1,
        (_, Some(Form::Absorbed)) => g.latent,
        _ => g.value,
    };
    let (head, row) = (e.col / width.max(1), |s: usize| s * steps + index);
    let parts: Vec<Operand> =
        (0..splits).map(|s| e.sources.input(Stage::PartLse, row(s), head, None)).collect();
    let l: Vec<f64> = parts.iter().map(|p| p.value).collect();
    let (weights, total) = merge_weights(&l);
    let mut made = Made::default();
    made.step("splits", splits as f64, "");
    made.step("lse", total, "of all splits");
    if lse {
        let most = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let each: Vec<f64> = l.iter().map(|v| libm::exp(v - most)).collect();
        let inner = Sum::among("Σ exp(part_lse − largest)", &each, e.shown, |s| {
            Term::new(format!("split {s}"), Vec::new(), each[s]).of(parts[s].clone())
        });
        let terms = [("largest part_lse", most), ("ln Σ exp(part_lse − largest)", libm::log(inner.total))];
        made.sums.push(Sum::of("x", terms.map(|(n, v)| Term::new(n, Vec::new(), v)).into(), 2));
        made.sums.push(inner);
    } else {
        let values: Vec<Operand> =
            (0..splits).map(|s| e.sources.input(Stage::PartO, row(s), e.col, None)).collect();
        let each: Vec<f64> =
            weights.iter().zip(&values).map(|(w, v)| if *w == 0.0 { 0.0 } else { w * v.value }).collect();
        made.sums.push(Sum::among("x", &each, e.shown, |s| {
            let weight = Operand::plain("exp(part_lse − lse)", Vec::new(), weights[s]);
            Term::new(format!("split {s}"), vec![weight, values[s].clone()], each[s]).of(parts[s].clone())
        }));
    }
    let n = splits as f64;
    made.parts.push(Part::new("largest |part_lse − lse|, of splits of weight", spread));
    let relative = 2.0 * (4.0 * U * (spread + 1.0) + f64::powi(2.0, -22) + (n + 6.0) * U);
    made.parts.push(Part::new("relative error of each weight", relative));
    if let Some(size) = size.filter(|_| !lse) {
        made.parts.push(Part::new("times Σ W|o|, with splits + 2 roundings more", size));
    }
    made
}

/// Casts of scores and of P, in words.
pub fn casts_of_softmax(c: &Contract) -> Vec<String> {
    let (s, mut all) = (&c.softmax, Vec::new());
    if s.cast_raw {
        all.push(format!("q·k to {}", c.activations));
    }
    if s.cast_scaled {
        all.push(format!("scores to {}", c.activations));
    }
    match (s.cast(), s.unplaced()) {
        (Some(d), _) if s.normalised => all.push(format!("P to {d}, after it is divided by the row sum")),
        (Some(d), _) => {
            let tile = if s.tile == 0 { "all keys".into() } else { format!("a tile of {} keys", s.tile) };
            all.push(format!("P to {d}, relative to the maximum so far of {tile}"));
        }
        (None, Some(d)) => {
            all.push(format!("P to {d}, not emulated: nobody says where (it is in the bound)"))
        }
        (None, None) => {}
    }
    all
}
