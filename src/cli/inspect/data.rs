/*! `inspect --data`: reads the values, and shows what they are like, a line a weight. */

use super::super::out::Output;
use super::super::text::{escape, short, size, wrap};
use super::text::plural;
use crate::model::Model;
use crate::survey::{self, Survey, TensorStats};
use mla_reference::Weight;
use std::collections::BTreeSet;

/// Surveys the attention tensors of these layers; with `every`, all other tensors of the file too.
pub(super) fn read(model: &Model, layers: &[usize], every: bool, out: &Output) -> Survey {
    let (mut subjects, mut unread) = survey::attention(model, layers);
    if every {
        let (more, also) = survey::others(model, &subjects);
        subjects.extend(more);
        unread.extend(also);
    }
    const MIB: u64 = 1 << 20;
    let total: u64 = subjects.iter().map(|s| s.bytes).sum();
    let bar = out.progress(total.div_ceil(MIB).max(1));
    bar.set_message("reading values, MiB");
    let survey = survey::survey(&subjects, unread, &|bytes| bar.set_position(bytes / MIB));
    bar.finish_and_clear();
    survey
}

/// The table: a line a weight, over all layers that were read.
pub(super) fn text(survey: &Survey, layers: usize, width: usize) -> String {
    let mut out = String::from("\nvalues: rms (least .. most of the layers), largest, constant or zero\n");
    for role in Weight::ALL {
        let of: Vec<&TensorStats> = survey.tensors.iter().filter(|t| t.role == Some(*role)).collect();
        line(&mut out, role.name(), &of, width);
    }
    let others: Vec<&TensorStats> = survey.tensors.iter().filter(|t| t.role.is_none()).collect();
    line(&mut out, "others", &others, width);
    let rate = survey.bytes as f64 / survey.seconds.max(1e-9);
    let what = format!(
        "read {} of {} in {:.1} s, {}/s on {}",
        size(survey.bytes),
        plural(survey.tensors.len(), "tensor"),
        survey.seconds,
        size(rate as u64),
        plural(rayon::current_num_threads(), "thread"),
    );
    out += &wrap(&format!("  {what}"), width, 4);
    out.push('\n');
    out += &wrap(&format!("  {}", compared(survey, layers)), width, 4);
    out.push('\n');
    out
}

fn line(out: &mut String, name: &str, of: &[&TensorStats], width: usize) {
    let Some(first) = of.first() else { return };
    let rms = of.iter().map(|t| t.stats.rms);
    let (least, most) = rms.fold((f64::INFINITY, 0.0f64), |(a, b), r| (a.min(r), b.max(r)));
    let range =
        if of.len() == 1 { short(first.stats.rms) } else { format!("{} .. {}", short(least), short(most)) };
    let largest = of.iter().map(|t| t.stats.largest).fold(0.0, f64::max);
    let types: BTreeSet<&str> = of.iter().map(|t| t.ty.as_str()).collect();
    let types = types.into_iter().collect::<Vec<_>>().join(" ");
    let sum = |f: &dyn Fn(&TensorStats) -> u64| of.iter().map(|t| f(t)).sum::<u64>();
    let mut odd = Vec::new();
    for (n, what) in [
        (sum(&|t| t.stats.nan), "NaN"),
        (sum(&|t| t.stats.inf), "inf"),
        (sum(&|t| t.stats.zero_blocks), "zero blocks"),
        (sum(&|t| t.stats.constant_rows), "constant rows"),
    ] {
        if n > 0 {
            odd.push(format!("{n} {what}"));
        }
    }
    let odd = if odd.is_empty() { "-".to_string() } else { odd.join(", ") };
    let text = format!("  {name:<8}{range:<22} {:<9} {odd:<14} {}", short(largest), escape(&types));
    *out += &wrap(text.trim_end(), width, 10);
    out.push('\n');
}

/// What heads and layers were compared by.
fn compared(survey: &Survey, layers: usize) -> String {
    let most = |f: &dyn Fn(&survey::odd::Threshold) -> Option<f64>| {
        survey.thresholds.iter().filter_map(f).fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))))
    };
    let from = |what: &str, f: f64| format!("{what} from a factor of {f:.2}");
    let (heads, layer) = (most(&|t| t.heads), most(&|t| t.layers));
    match (heads, layer) {
        (Some(h), Some(l)) => format!("odd: {}, {} (docs/inspect.md)", from("heads", h), from("layers", l)),
        (Some(h), None) => {
            format!("odd: {}; {} are too few to compare", from("heads", h), plural(layers, "layer"))
        }
        (None, Some(l)) => format!("odd: {}; heads were not compared", from("layers", l)),
        (None, None) => "too few heads and layers to compare".into(),
    }
}
