/*!
Statistics of the stored values of a model's tensors: what `inspect --data` looks at.

A [`Subject`] is a named matrix whose values can be decoded a part at a time, whatever file it comes from; [`survey`]
reads each of them once ([`mod@scan`]), chunk by chunk on all threads, copies no weight, and gives the same numbers on
any number of threads. What stands out over the model is [`mod@odd`]; what is wrong is said in [`findings()`].
*/

pub mod findings;
pub mod odd;
pub mod scan;
pub mod subjects;

pub use findings::findings;
pub use subjects::{Unread, attention, others};

use mla_reference::Weight;
use mla_reference::product::Rows;
use odd::{Group, Odd};
use scan::Stats;
use serde::Serialize;
use std::collections::BTreeMap;

/// How a tensor's elements belong to heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Not at all: one group.
    None,
    /// Every `each` rows are a head's; of these the first `cut` are one group and the others a second one (`cut` = `each`:
    /// a single group).
    Rows {
        /// Rows of a head.
        each: usize,
        /// Rows of the first group.
        cut: usize,
    },
    /// Every `each` columns are a head's.
    Columns {
        /// Columns of a head.
        each: usize,
    },
}

/// A tensor to be looked at.
pub struct Subject<'a> {
    /// Its name in the file.
    pub name: String,
    /// Its layer, where it belongs to one.
    pub layer: Option<usize>,
    /// What attention reads it as; None: something outside of attention.
    pub role: Option<Weight>,
    /// Name of its stored type.
    pub ty: String,
    /// Bytes as they are stored.
    pub bytes: u64,
    /// Its values, row by row.
    pub values: Box<dyn Rows + 'a>,
    /// Its heads.
    pub heads: Heads,
    /// What the two groups of rows of [`Heads::Rows`] are called; the first name is that of a single group.
    pub groups: [&'static str; 2],
}

/// What was found in a tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorStats {
    /// Its name in the file.
    pub name: String,
    /// Its layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// What attention reads it as.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Weight>,
    /// Its stored type.
    #[serde(rename = "type")]
    pub ty: String,
    /// Stored bytes.
    pub bytes: u64,
    /// Statistics over all elements.
    #[serde(flatten)]
    pub stats: Stats,
    /// L2 norms by head, of each group of its elements.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub head_norms: BTreeMap<&'static str, Vec<f64>>,
}

/// Everything that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Survey {
    /// Tensor by tensor.
    pub tensors: Vec<TensorStats>,
    /// Tensors whose bytes or type can't be read, with why.
    pub unread: Vec<Unread>,
    /// Heads and layers that stand out.
    pub odd: Vec<Odd>,
    /// The least factor by which something had to stand out, by what was compared.
    pub thresholds: Vec<odd::Threshold>,
    /// Stored bytes that were read.
    pub bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Reads every subject once; `progress` hears how many stored bytes have been read.
pub fn survey(subjects: &[Subject], unread: Vec<Unread>, progress: &(dyn Fn(u64) + Sync)) -> Survey {
    let started = std::time::Instant::now();
    let mut all = Survey {
        tensors: Vec::new(),
        unread,
        odd: Vec::new(),
        thresholds: Vec::new(),
        bytes: 0,
        seconds: 0.0,
    };
    let mut groups: BTreeMap<(usize, &'static str), Group> = BTreeMap::new();
    for subject in subjects {
        let before = all.bytes;
        let (stats, squares) = scan::scan(subject, &|bytes| progress(before + bytes));
        all.bytes += subject.bytes;
        let mut head_norms = BTreeMap::new();
        for (group, norms) in norms(subject, &squares) {
            if let (Some(layer), Some(role)) = (subject.layer, subject.role) {
                let of = groups.entry((role as usize, group)).or_insert_with(|| Group::new(role, group));
                of.layers.push((layer, norms.clone()));
            }
            if norms.len() > 1 {
                head_norms.insert(group, norms);
            }
        }
        all.tensors.push(TensorStats {
            name: subject.name.clone(),
            layer: subject.layer,
            role: subject.role,
            ty: subject.ty.clone(),
            bytes: subject.bytes,
            stats,
            head_norms,
        });
    }
    let groups: Vec<Group> = groups.into_values().collect();
    (all.odd, all.thresholds) = odd::odd(&groups);
    all.seconds = started.elapsed().as_secs_f64();
    all
}

/// L2 norms by head of each group of a subject.
fn norms(subject: &Subject, squares: &[f64]) -> Vec<(&'static str, Vec<f64>)> {
    let of = |part: usize, parts: usize| squares.iter().skip(part).step_by(parts).map(|s| s.sqrt()).collect();
    match subject.heads {
        Heads::Rows { each, cut } if cut < each => {
            vec![(subject.groups[0], of(0, 2)), (subject.groups[1], of(1, 2))]
        }
        _ => vec![(subject.groups[0], of(0, 1))],
    }
}
