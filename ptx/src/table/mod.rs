/*!
The closed table of lane operations: an instruction's form, as written, to what it does.

A form that is not here (or in the grammars of [`crate::lower`] for memory, control and matrices) is an error when
the module is loaded. Rows of forms that PTX treats alike are written once, with braces: `add.{u32,s32}`.
*/

mod compare;
mod convert;
mod float;
mod half;
mod integer;

use crate::exec::regs::Row;
use std::collections::HashMap;
use std::sync::OnceLock;

/// Rows of one file of the table.
type Rows = Vec<(&'static str, Row)>;

/// `a.{b,c}{,.d}` to a.b, a.c, a.b.d, a.c.d.
fn expand(pattern: &str) -> Vec<String> {
    let Some((head, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let Some((choices, tail)) = rest.split_once('}') else { return vec![pattern.to_owned()] };
    let tails = expand(tail);
    choices.split(',').flat_map(|c| tails.iter().map(move |t| format!("{head}{c}{t}"))).collect()
}

fn table() -> &'static HashMap<String, Row> {
    static TABLE: OnceLock<HashMap<String, Row>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let rows = [integer::rows(), float::rows(), half::rows(), convert::rows(), compare::rows()];
        rows.into_iter().flatten().flat_map(|(p, row)| expand(p).into_iter().map(move |f| (f, row))).collect()
    })
}

/// The row of a form.
pub fn find(form: &str) -> Option<Row> {
    table().get(form).copied()
}

/// Every form of the table, sorted.
pub fn forms() -> Vec<&'static str> {
    let mut all: Vec<&str> = table().keys().map(String::as_str).collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    #[test]
    fn braces_multiply() {
        assert_eq!(super::expand("a.{b,c}{,.d}"), ["a.b", "a.b.d", "a.c", "a.c.d"]);
    }

    #[test]
    fn no_form_stands_twice() {
        let rows = [
            super::integer::rows(),
            super::float::rows(),
            super::half::rows(),
            super::convert::rows(),
            super::compare::rows(),
        ];
        let written: usize = rows.iter().flatten().map(|(p, _)| super::expand(p).len()).sum();
        assert_eq!(written, super::forms().len());
    }
}
