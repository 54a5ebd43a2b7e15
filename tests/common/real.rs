//! The recipe of a verdict on one stored output: bound, flips, directions, one level for all, power.

use mla_check::judge::stats::direction::{Cluster, Kind, cluster, floor, p_value, test_direction};
use mla_check::judge::stats::flips::flip_tests;
use mla_check::judge::stats::holm::holm;
use mla_check::judge::stats::noise;
use mla_check::judge::stats::power::{PROMISE, mde};
use mla_check::judge::stats::score::{Fineness, informations, scale_of, scores};
use mla_numeric::DType;
use ndarray::{Array2, Axis, concatenate};

/// Level of a run, and tests that are counted in it.
const ALPHA: f64 = 1e-6;
const TESTS: usize = 1000;
/// Rows on which directions are measured.
const ROWS: usize = 256;

/// Noise of a stage, spread out; `[rows, columns]` each.
pub struct Noise {
    pub sigma: Array2<f64>,
    pub share: Array2<f64>,
    pub row_ulp: Array2<f64>,
    pub steps: f64,
}

impl Noise {
    /// Of values `x` before they are stored as `dtype`.
    pub fn new(dtype: DType, x: &Array2<f64>, of: noise::Noise) -> Noise {
        let (mut share, mut row_ulp) = (Array2::zeros(x.dim()), Array2::zeros(x.dim()));
        let mut line = Vec::new();
        for (i, row) in x.rows().into_iter().enumerate() {
            of.shares(dtype, i, &row.to_vec(), &mut line);
            share.row_mut(i).iter_mut().zip(&line).for_each(|(to, from)| *to = *from);
            let ulps = noise::row_ulps(dtype, row, &of.factors, 0..row.len());
            row_ulp.row_mut(i).iter_mut().zip(ulps).for_each(|(to, from)| *to = from);
        }
        Noise { sigma: of.sigma, share, row_ulp, steps: of.steps }
    }
}

/// What a stage should be, and by how much it may be off; `[rows, columns]` each.
pub struct Prediction {
    pub x: Array2<f64>,
    pub proven: Array2<f64>,
    pub statistical: Array2<f64>,
    pub noise: Noise,
    pub directions: Vec<(&'static str, Array2<f64>)>,
    /// Labels of the rows on an axis.
    pub label: Vec<usize>,
}

/// Several heads or sequences as one tensor; an axis tells them apart.
pub fn join(parts: Vec<Prediction>) -> (Prediction, Vec<Vec<usize>>) {
    let all = |of: &dyn Fn(&Prediction) -> &Array2<f64>| {
        concatenate(Axis(0), &parts.iter().map(|p| of(p).view()).collect::<Vec<_>>()).unwrap()
    };
    let names: Vec<&'static str> = parts[0].directions.iter().map(|d| d.0).collect();
    let directions = names.iter().enumerate().map(|(i, n)| (*n, all(&|p| &p.directions[i].1))).collect();
    let of = parts.iter().enumerate().flat_map(|(i, p)| vec![i; p.x.nrows()]).collect();
    let label = parts.iter().flat_map(|p| p.label.iter().copied()).collect::<Vec<_>>();
    let noise = Noise {
        sigma: all(&|p| &p.noise.sigma),
        share: all(&|p| &p.noise.share),
        row_ulp: all(&|p| &p.noise.row_ulp),
        steps: parts.iter().map(|p| p.noise.steps).fold(0.0, f64::max),
    };
    let joined = Prediction {
        x: all(&|p| &p.x),
        proven: all(&|p| &p.proven),
        statistical: all(&|p| &p.statistical),
        noise,
        directions,
        label: label.clone(),
    };
    (joined, Vec::from([of, label]))
}

/// What came out.
pub struct Judged {
    pub elements: usize,
    pub flips: f64,
    pub p0: f64,
    /// Largest share of either bound that is needed beside the final rounding.
    pub use_proven: f64,
    pub use_statistical: f64,
    /// Elements beyond either bound.
    pub beyond: (usize, usize),
    pub evidence: Vec<String>,
    pub verdict: &'static str,
}

/// Share of a bound that |o − x| needs beside the final rounding, largest over elements, and how many exceed it.
fn used(dtype: DType, o: &Array2<f64>, x: &Array2<f64>, b: &Array2<f64>) -> (f64, usize) {
    let (mut most, mut beyond) = (0.0f64, 0);
    for ((o, x), b) in o.iter().zip(x).zip(b) {
        let over = (o - x).abs() - dtype.spacing(x.abs() + b) / 2.0;
        most = most.max(over / b.max(1e-300));
        beyond += usize::from(over > *b);
    }
    (most, beyond)
}

pub fn judge(dtype: DType, o: &Array2<f64>, p: &Prediction, axes: &[Vec<usize>], emulated: bool) -> Judged {
    assert_eq!(o.dim(), p.x.dim());
    let flips = Array2::from_shape_fn(o.dim(), |at| o[at] != dtype.round(p.x[at]));
    let axes: Vec<&[usize]> = axes.iter().map(Vec::as_slice).collect();
    let tests = flip_tests(flips.view(), p.noise.share.view(), &axes);
    let whole = &tests[0].1;
    let (use_proven, proven) = used(dtype, o, &p.x, &p.proven);
    let (use_statistical, statistical) = used(dtype, o, &p.x, &p.statistical);
    let mut evidence = Vec::new();
    if o.iter().any(|v| !v.is_finite()) {
        evidence.push("not finite".to_string());
    }
    if proven > 0 {
        evidence.push(format!("{proven} beyond the proven bound"));
    }
    if statistical > 0 {
        evidence.push(format!("{statistical} beyond the statistical bound"));
    }
    let clean = emulated && whole.log_p(whole.limit()) > (ALPHA / TESTS as f64).ln();
    let mut names = Vec::new();
    let mut logs = Vec::new();
    if emulated {
        for (slice, t) in &tests {
            names.push(format!("flips in {slice:?}"));
            logs.push(t.log_p(t.limit()));
        }
    }
    let n = o.nrows();
    let rows: Vec<usize> =
        if n <= ROWS { (0..n).collect() } else { (0..ROWS).map(|i| i * (n - 1) / (ROWS - 1)).collect() };
    let mut why = Vec::new();
    for (name, d) in &p.directions {
        let mut best = f64::INFINITY;
        for fineness in Fineness::ALL {
            if fineness == Fineness::Fine && !clean {
                continue;
            }
            let clusters: Vec<Cluster> = rows
                .iter()
                .map(|&i| {
                    let of = |m: &Array2<f64>| m.row(i).to_vec();
                    let (x, pairs) = (of(&p.x), p.noise.sigma.row(i).into_iter().zip(p.noise.row_ulp.row(i)));
                    let s: Vec<_> = pairs.map(|(s, u)| scale_of(*s, *u, fineness)).collect();
                    cluster(&scores(dtype, &of(o), &x, &s), &informations(dtype, &x, &s), &of(d))
                })
                .collect();
            let Some(e) = test_direction(&clusters) else { continue };
            let value = p_value(Kind::Global, &e, floor(Kind::Global, p.noise.steps, fineness), clean);
            names.push(format!("{name} {fineness:?} {:+.1e}", e.beta));
            logs.push(value.log_p);
            let level = (ALPHA / TESTS as f64).ln();
            best = best.min(mde(Kind::Global, &e, p.noise.steps, fineness, clean, level));
        }
        if best > PROMISE && best.is_finite() {
            why.push(format!("{name} below {best:.1e} unseen"));
        }
    }
    evidence.extend(holm(&logs, ALPHA.ln(), TESTS).into_iter().map(|i| names[i].clone()));
    let mut widths: Vec<f64> =
        p.x.iter()
            .zip(&p.statistical)
            .map(|(x, b)| (b + dtype.spacing(x.abs() + b) / 2.0) / dtype.spacing(*x))
            .collect();
    widths.sort_by(f64::total_cmp);
    if widths[widths.len() / 2] > 2.0 {
        why.push(format!("median bound {:.1} ulps", widths[widths.len() / 2]));
    }
    let exact = !flips.iter().any(|f| *f);
    let verdict = match (evidence.is_empty(), exact, why.is_empty()) {
        (false, ..) => "fault",
        (true, true, _) => "exact",
        (true, false, true) => "rounding",
        (true, false, false) => "inconclusive",
    };
    if verdict == "inconclusive" {
        evidence = why;
    }
    Judged {
        elements: o.len(),
        flips: whole.flips as f64 / whole.elements as f64,
        p0: whole.limit(),
        use_proven: use_proven.max(0.0),
        use_statistical: use_statistical.max(0.0),
        beyond: (proven, statistical),
        evidence,
        verdict,
    }
}
