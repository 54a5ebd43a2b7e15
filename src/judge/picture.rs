/*!
Where a tensor is off, as a picture: how far elements lie from the reference, as a share of what rounding allows, by row and
head, by column, and as a histogram.

Drawn of what a closer look is taken at, not of what passes. A cell shows its worst element: one wrong element in a million
must not vanish in a mean. Shares are kept as levels, a factor of two each, so that a picture is text of a few kilobytes whatever
the tensor's size.
*/

use mla_numeric::DType;
use mla_reference::product::Rows;
use ndarray::Array2;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Most lines, and most cells of a line.
pub const MOST: (usize, usize) = (32, 64);
/// What stands for each level: equal bits; below 1/8, 1/4, 1/2 and 1 of what rounding allows; from 1, 2, 4, … 256 times on; not a
/// number, or infinite on one side.
pub const LEVELS: &[u8; 15] = b".abcd123456789!";
/// The first level that rounding does not explain.
pub const BEYOND: usize = 5;

/// What a level says, in words.
pub fn words(level: usize) -> String {
    match level {
        0 => "equal bits".into(),
        1 => "below 1/8".into(),
        2..BEYOND => format!(
            "1/{} to {}",
            1 << (5 - level),
            if level == 4 { "1".into() } else { format!("1/{}", 1 << (4 - level)) }
        ),
        5..13 => format!("{} to {}", 1 << (level - 5), 1 << (level - 4)),
        13 => "256 and more".into(),
        _ => "not finite on one side".into(),
    }
}

/// The level of a character of a picture.
pub fn level(of: u8) -> usize {
    LEVELS.iter().position(|c| *c == of).unwrap_or(0)
}

/// A picture of one phase of a tensor, or of a weight.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    /// First and last row of the matrix view, of each line.
    pub rows: Vec<(usize, usize)>,
    /// First and last head of each cell of a line; none where there are no heads: then cells are those of `columns`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub heads: Vec<(usize, usize)>,
    /// The worst level of each cell, a character of [`LEVELS`] each.
    pub cells: Vec<String>,
    /// First and last column (inside a head) of each character of `by_column`.
    pub columns: Vec<(usize, usize)>,
    /// The worst level by column.
    pub by_column: String,
    /// Elements of each level.
    pub histogram: Vec<u64>,
}

impl Picture {
    /// Cells of a line: heads, or columns where there are none.
    pub fn across(&self) -> &[(usize, usize)] {
        if self.heads.is_empty() { &self.columns } else { &self.heads }
    }

    /// The same with no more lines and no more cells than these; a cell shows the worst of those that it stands for.
    pub fn shrunk(&self, lines: usize, cells: usize) -> Picture {
        let worst = |chars: &mut dyn Iterator<Item = u8>| chars.map(level).max().unwrap_or(0);
        let across = groups(self.across().len(), cells);
        let joined = |of: &[(usize, usize)], groups: &[(usize, usize)]| -> Vec<(usize, usize)> {
            groups.iter().map(|(a, b)| (of[*a].0, of[*b].1)).collect()
        };
        let rows = groups(self.rows.len(), lines);
        let line = |(top, bottom): &(usize, usize)| {
            let cell = |(a, b): &(usize, usize)| {
                // A report that was read back may have fewer lines than it says.
                let lines = self.cells.iter().skip(*top).take(bottom - top + 1);
                let mut all = lines.flat_map(|l| l.bytes().skip(*a).take(b - a + 1));
                char::from(LEVELS[worst(&mut all)])
            };
            across.iter().map(cell).collect()
        };
        let mut out = Picture {
            rows: joined(&self.rows, &rows),
            cells: rows.iter().map(line).collect(),
            ..self.clone()
        };
        match self.heads.is_empty() {
            false => out.heads = joined(&self.heads, &across),
            true => {
                out.columns = joined(&self.columns, &across);
                let of = |(a, b): &(usize, usize)| {
                    char::from(LEVELS[worst(&mut self.by_column.bytes().skip(*a).take(b - a + 1))])
                };
                out.by_column = across.iter().map(of).collect();
            }
        }
        out
    }
}

/// `n` things in at most `most` groups of equal length (but for the last), first and last of each.
fn groups(n: usize, most: usize) -> Vec<(usize, usize)> {
    let each = n.div_ceil(most.max(1)).max(1);
    (0..n).step_by(each).map(|a| (a, (a + each).min(n) - 1)).collect()
}

/// |engine − x| as a level of what rounding allows: `bound` and half an ulp.
fn of_share(dtype: DType, engine: f64, x: f64, bound: f64) -> usize {
    let same = engine.to_bits() == dtype.round(x).to_bits() || engine == dtype.round(x);
    if same || engine.is_nan() && x.is_nan() {
        return 0;
    }
    let share = (engine - x).abs() / (bound + dtype.spacing(x.abs() + bound) / 2.0);
    if !share.is_finite() {
        return LEVELS.len() - 1;
    }
    // Levels 1 to 4 lie below 1, in steps of a factor of two.
    (share.max(1e-9).log2().floor() as i64 + BEYOND as i64).clamp(1, LEVELS.len() as i64 - 2) as usize
}

/// A picture that is being drawn.
pub struct Canvas {
    dtype: DType,
    rows: Vec<usize>,
    width: usize,
    heads: usize,
    cells: Array2<u8>,
    by_column: Vec<u8>,
    counts: [u64; LEVELS.len()],
}

impl Canvas {
    /// Of these rows of a tensor, with so many heads of `width` columns (1 where it has none).
    pub fn new(dtype: DType, rows: Vec<usize>, heads: usize, width: usize) -> Canvas {
        let columns = groups(width, MOST.1).len();
        let across = if heads > 1 { groups(heads, MOST.1).len() } else { columns };
        let cells = Array2::zeros((groups(rows.len(), MOST.0).len(), across));
        Canvas { dtype, rows, width, heads, cells, by_column: vec![0; columns], counts: [0; LEVELS.len()] }
    }

    /// Adds elements of the row that stands at `row` of those that it was made for, from column `first` on.
    pub fn add(
        &mut self,
        row: usize,
        first: usize,
        engine: &[f64],
        x: &[f64],
        bounds: &dyn Fn(usize) -> f64,
    ) {
        let each = |n: usize, most: usize| n.div_ceil(most).max(1);
        let line = row / each(self.rows.len(), MOST.0);
        let (by_head, by_column) = (each(self.heads, MOST.1), each(self.width, MOST.1));
        for (j, (o, x)) in engine.iter().zip(x).enumerate() {
            let level = of_share(self.dtype, *o, *x, bounds(j));
            self.counts[level] += 1;
            let (head, within) = ((first + j) / self.width, (first + j) % self.width);
            let column = within / by_column;
            let cell = if self.heads > 1 { head / by_head } else { column };
            for at in [&mut self.cells[[line, cell]], &mut self.by_column[column]] {
                *at = (*at).max(level as u8);
            }
        }
    }

    /// Adds what another thread drew.
    pub fn merge(&mut self, other: &Canvas) {
        self.cells.zip_mut_with(&other.cells, |a, b| *a = (*a).max(*b));
        self.by_column.iter_mut().zip(&other.by_column).for_each(|(a, b)| *a = (*a).max(*b));
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
    }

    /// The picture.
    pub fn finish(&self) -> Picture {
        let text = |levels: &mut dyn Iterator<Item = &u8>| {
            levels.map(|l| char::from(LEVELS[usize::from(*l)])).collect()
        };
        let rows = groups(self.rows.len(), MOST.0).into_iter().map(|(a, b)| (self.rows[a], self.rows[b]));
        Picture {
            rows: rows.collect(),
            heads: if self.heads > 1 { groups(self.heads, MOST.1) } else { Vec::new() },
            cells: self.cells.rows().into_iter().map(|r| text(&mut r.iter())).collect(),
            columns: groups(self.width, MOST.1),
            by_column: text(&mut self.by_column.iter()),
            histogram: self.counts.to_vec(),
        }
    }
}

/// A weight beside the file's, whose values rounded to `dtype` are all that it may hold.
pub fn of_weight(file: &dyn Rows, engine: &dyn Rows, dtype: DType) -> Picture {
    let (rows, cols) = (file.rows(), file.cols());
    let blank = || Canvas::new(dtype, (0..rows).collect(), 1, cols);
    let drawn = |mut canvas: Canvas, i: usize| {
        let (mut x, mut o) = (vec![0.0; cols], vec![0.0; cols]);
        file.decode(i, 0, &mut x);
        engine.decode(i, 0, &mut o);
        canvas.add(i, 0, &o, &x, &|_| 0.0);
        canvas
    };
    let both = |mut a: Canvas, b: Canvas| {
        a.merge(&b);
        a
    };
    (0..rows).into_par_iter().fold(blank, drawn).reduce(blank, both).finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_reference::product::Dense;

    /// bf16 at 1: spacing 2^-7, so half of it, 2^-8, is what rounding alone allows.
    #[test]
    fn levels_are_factors_of_two_of_what_rounding_allows() {
        let at = |off: f64, bound: f64| of_share(DType::Bf16, 1.0 + off, 1.0 + 1e-9, bound);
        let half = 1.0 / 256.0;
        assert_eq!(at(0.0, 0.0), 0);
        for (times, level) in [(1.5, 5), (3.0, 6), (6.0, 7), (300.0, 13), (1e5, 13)] {
            assert_eq!(at(half * times, 0.0), level, "{times}");
        }
        // A bound of seven half ulps: eight in all.
        for (times, level) in [(0.9, 1), (1.5, 2), (3.0, 3), (6.0, 4), (12.0, 5)] {
            assert_eq!(at(half * times, 7.0 * half), level, "{times}");
        }
        let of = |o: f64, x: f64| of_share(DType::Bf16, o, x, 0.0);
        assert_eq!((of(f64::NAN, 1.0), of(f64::NAN, f64::NAN), of(f64::INFINITY, 1.0)), (14, 0, 14));
        assert_eq!((words(2), words(4), words(5)), ("1/8 to 1/4".into(), "1/2 to 1".into(), "1 to 2".into()));
    }

    #[test]
    fn one_wrong_element_is_seen_at_its_place_however_large_the_tensor() {
        let (rows, heads, width) = (100, 130, 200);
        let mut canvas = Canvas::new(DType::Bf16, (50..50 + rows).collect(), heads, width);
        let x = vec![1.0; heads * width];
        for r in 0..rows {
            let mut o = x.clone();
            if r == 77 {
                o[129 * width + 199] = 2.0;
            }
            canvas.add(r, 0, &o, &x, &|_| 0.0);
        }
        let p = canvas.finish();
        // 100 rows in lines of 4, 130 heads in cells of 3, 200 columns in groups of 4.
        assert_eq!((p.rows.len(), p.heads.len(), p.columns.len()), (25, 44, 50));
        assert_eq!((p.rows[19], p.heads[43], p.columns[49]), ((126, 129), (129, 129), (196, 199)));
        for (i, line) in p.cells.iter().enumerate() {
            let expected = if i == 19 { ".".repeat(43) + "9" } else { ".".repeat(44) };
            assert_eq!(*line, expected, "{i}");
        }
        assert_eq!(p.by_column, ".".repeat(49) + "9");
        assert_eq!((p.histogram[0], p.histogram[13]), (100 * 130 * 200 - 1, 1));
        let small = p.shrunk(8, 10);
        assert_eq!((small.rows.len(), small.heads.len()), (7, 9));
        assert_eq!(small.rows[4], (114, 129));
        assert_eq!(small.cells[4], "........9");
        assert!(small.cells.iter().enumerate().all(|(i, l)| i == 4 || *l == "........."));
    }

    #[test]
    fn a_picture_that_contradicts_itself_is_no_panic() {
        let p = Picture {
            rows: vec![(0, 1); 9],
            columns: vec![(0, 0); 3],
            cells: vec!["x".into()],
            ..Picture::default()
        };
        assert_eq!(p.shrunk(2, 2).cells, ["..", ".."]);
    }

    #[test]
    fn weights_have_columns_across() {
        let file: Vec<f64> = vec![1.0; 6 * 70];
        let mut engine = file.clone();
        engine[3 * 70 + 69] = f64::NAN;
        let of = |data| Dense { data, cols: 70 };
        let p = of_weight(&of(&file), &of(&engine), DType::Bf16);
        assert!(p.heads.is_empty());
        assert_eq!((p.rows.len(), p.across().len(), p.across()[34]), (6, 35, (68, 69)));
        assert_eq!(p.cells[3], ".".repeat(34) + "!");
        assert_eq!(p.shrunk(3, 4).cells, ["....", "...!", "...."]);
        assert_eq!(p.shrunk(3, 4).by_column, "...!");
    }
}
