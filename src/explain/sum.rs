/*! A sum: its largest terms, the rest as one number, and what all come to. */

use super::Operand;
use serde::Serialize;

/// One term.
#[derive(Clone, Debug, Serialize)]
pub struct Term {
    /// Which: `k 17`, `key 3`.
    pub name: String,
    /// What is multiplied: the term is their product (where a cast stands between, rounded).
    pub factors: Vec<Operand>,
    /// What else it is computed from.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from: Vec<Operand>,
    /// The term.
    pub value: f64,
    /// The sum up to it, in the order of the terms.
    pub partial: f64,
}

impl Term {
    /// Of its factors and their product.
    pub fn new(name: impl Into<String>, factors: Vec<Operand>, value: f64) -> Term {
        Term { name: name.into(), factors, from: Vec::new(), value, partial: 0.0 }
    }

    /// The same with what else it is computed from.
    pub fn of(self, from: Operand) -> Term {
        Term { from: vec![from], ..self }
    }
}

/// Terms that are not shown.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Rest {
    pub count: usize,
    pub sum: f64,
}

/// A sum.
#[derive(Clone, Debug, Serialize)]
pub struct Sum {
    /// Of what.
    pub name: String,
    /// Terms in all.
    pub count: usize,
    /// The largest by size, largest first.
    pub terms: Vec<Term>,
    /// The others.
    pub rest: Rest,
    /// Σ of all terms, in float64.
    pub total: f64,
    /// Σ of their sizes.
    pub size: f64,
    /// Largest size of a partial sum, in the order of the terms.
    pub largest_partial: f64,
}

impl Sum {
    /// Of all its terms: `shown` of them.
    pub fn of(name: impl Into<String>, terms: Vec<Term>, shown: usize) -> Sum {
        let values: Vec<f64> = terms.iter().map(|t| t.value).collect();
        let mut terms: Vec<Option<Term>> = terms.into_iter().map(Some).collect();
        Sum::among(name, &values, shown, |k| {
            let of = || Term::new("", Vec::new(), f64::NAN);
            terms.get_mut(k).and_then(Option::take).unwrap_or_else(of)
        })
    }

    /// Of the values of all its terms; `make` makes those that are shown.
    pub fn among(
        name: impl Into<String>,
        values: &[f64],
        shown: usize,
        mut make: impl FnMut(usize) -> Term,
    ) -> Sum {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()).then(a.cmp(b)));
        let (mut partials, mut total, mut largest_partial) = (Vec::with_capacity(values.len()), 0.0, 0.0f64);
        for v in values {
            total += v;
            largest_partial = largest_partial.max(f64::abs(total));
            partials.push(total);
        }
        let split = shown.min(order.len());
        let terms = order[..split].iter().map(|&k| Term { partial: partials[k], ..make(k) }).collect();
        let rest = &order[split..];
        Sum {
            name: name.into(),
            count: values.len(),
            terms,
            rest: Rest { count: rest.len(), sum: rest.iter().map(|k| values[*k]).sum() },
            total,
            size: values.iter().map(|v| v.abs()).sum(),
            largest_partial,
        }
    }

    /// The same in another unit.
    pub fn scale(&mut self, by: f64) {
        self.terms.iter_mut().flat_map(|t| [&mut t.value, &mut t.partial]).for_each(|v| *v *= by);
        for v in [&mut self.rest.sum, &mut self.total, &mut self.size, &mut self.largest_partial] {
            *v *= by;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_shown_and_the_rest_is_one_number() {
        let values = [1.0, -5.0, 0.25, 3.0];
        let s = Sum::among("x", &values, 2, |k| Term::new(format!("k {k}"), Vec::new(), values[k]));
        let names: Vec<&str> = s.terms.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["k 1", "k 3"]);
        // Partial sums are in the order of the terms, not of their sizes.
        assert_eq!([s.terms[0].partial, s.terms[1].partial], [-4.0, -0.75]);
        assert_eq!(
            (s.rest.count, s.rest.sum, s.total, s.size, s.largest_partial),
            (2, 1.25, -0.75, 9.25, 4.0)
        );
    }
}
