/*!
The stages of a layer as a graph: what is computed from what, coloured and marked by verdict.

Stages that forms share stand on top, the fused form below on the left, the absorbed one on the right; a stage stands below
everything that it is computed from.
*/

use super::{class, escaped};
use crate::judge::Verdict;
use crate::report::LayerReport;
use mla_reference::{Form, Stage};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Size of a box, and the distances between boxes.
const BOX: (usize, usize) = (96, 32);
const GAP: (usize, usize) = (6, 20);

type Node = (Option<Form>, Stage);

/// The graph; nothing where no stage was looked at.
pub(super) fn draw(l: &LayerReport) -> String {
    let Some(g) = &l.geometry else { return String::new() };
    let mut verdicts: BTreeMap<Node, Verdict> = BTreeMap::new();
    for u in &l.tensors {
        // Of a rank's own tensor (`kv_a@rank 3`) the worst counts.
        let name = u.tensor.split('@').next().unwrap_or_default();
        let Some(stage) = Stage::from_name(name) else { continue };
        verdicts.entry((u.form, stage)).and_modify(|v| *v = (*v).max(u.verdict)).or_insert(u.verdict);
    }
    let inputs = |(form, stage): Node| -> Vec<Node> {
        let all = [false, true].iter().flat_map(move |joined| stage.inputs(g, form, *joined));
        let mut all: Vec<Node> = all
            .filter_map(|i| [(form, *i), (None, *i)].into_iter().find(|n| verdicts.contains_key(n)))
            .collect();
        all.sort();
        all.dedup();
        all
    };
    // The table's order is one in which inputs come first; shared stages before those of a form.
    let mut depth: BTreeMap<Node, usize> = BTreeMap::new();
    for &node in verdicts.keys() {
        // A form begins below all that it shares.
        let shared = depth.iter().filter(|(n, _)| n.0.is_none() && node.0.is_some()).map(|(_, d)| d + 1);
        let below = inputs(node).iter().filter_map(|i| depth.get(i)).map(|d| d + 1).chain(shared).max();
        depth.insert(node, below.unwrap_or(0));
    }
    if depth.is_empty() {
        return String::new();
    }
    let mut rows: BTreeMap<(Option<Form>, usize), Vec<Node>> = BTreeMap::new();
    depth.iter().for_each(|(n, d)| rows.entry((n.0, *d)).or_default().push(*n));
    let widest = |form: Option<Form>| {
        rows.iter().filter(|(k, _)| k.0 == form).map(|(_, n)| n.len()).max().unwrap_or(0) * (BOX.0 + GAP.0)
    };
    let lanes: Vec<(Form, usize)> =
        Form::ALL.iter().map(|f| (*f, widest(Some(*f)))).filter(|l| l.1 > 0).collect();
    let total = lanes.iter().map(|l| l.1).sum::<usize>().max(widest(None));
    let mut at: BTreeMap<Node, (usize, usize)> = BTreeMap::new();
    for ((form, d), nodes) in &rows {
        let before: usize = lanes.iter().take_while(|l| Some(l.0) != *form).map(|l| l.1).sum();
        let (left, room) = match form {
            None => (0, total),
            Some(_) => (before, widest(*form)),
        };
        let used = nodes.len() * (BOX.0 + GAP.0);
        for (i, node) in nodes.iter().enumerate() {
            let x = left + (room - used.min(room)) / 2 + i * (BOX.0 + GAP.0) + GAP.0 / 2;
            at.insert(*node, (x, d * (BOX.1 + GAP.1) + 2));
        }
    }
    let height = depth.values().max().map_or(0, |d| (d + 1) * (BOX.1 + GAP.1));
    let mut out = format!(
        "<svg viewBox=\"0 0 {total} {height}\" role=\"img\" aria-label=\"stages and their verdicts\">\n"
    );
    let wrong = |n: &Node| verdicts.get(n).is_some_and(|v| class(*v) == "bad");
    for (node, (x, y)) in &at {
        for input in inputs(*node) {
            let Some((from, above)) = at.get(&input) else { continue };
            let (a, b, c, d) = (from + BOX.0 / 2, above + BOX.1, x + BOX.0 / 2, y);
            let bend = (d - b.min(*d)) / 2;
            let kind = if wrong(&input) { " class=\"bad\"" } else { "" };
            let _ = writeln!(out, "<path{kind} d=\"M{a} {b}C{a} {} {c} {} {c} {d}\"/>", b + bend, d - bend);
        }
    }
    for (node, (x, y)) in &at {
        let v = verdicts[node];
        let form = node.0.map_or(String::new(), |f| format!("{}/", f.name()));
        let _ = writeln!(
            out,
            "<g class=\"{}\"><title>{form}{}: {}</title><rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"4\"/><text x=\"{}\" y=\"{}\">{} {}</text></g>",
            class(v),
            node.1,
            escaped(v.name()),
            BOX.0,
            BOX.1,
            x + BOX.0 / 2,
            y + BOX.1 / 2 + 4,
            escaped(&v.row().mark.to_string()),
            node.1,
        );
    }
    out + "</svg>\n"
}
