/*!
Checkpoints in Hugging Face's format: values against other software's, folders that are damaged, and what their configurations
come to.
*/

mod common;

use common::{answers, checkpoints};
use mla_check::checkpoint::Checkpoint;
use mla_reference::rows::dense;

/// Dequantised rows and sums that `fixtures/checkpoints/README.md` says the origin of, in float64. Every product is exact in
/// float64, a quotient rounds once (2^-53); sums of up to 458,752 values in any order are within 1e-12 of their absolute sum.
#[test]
fn values_are_those_of_other_software() {
    for folder in checkpoints() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let answers = answers(&folder);
        let mut seen = 0;
        for (name, rows) in &answers {
            let Some(tensor) = name.strip_prefix("dequant/").and_then(|n| n.strip_suffix("/rows")) else {
                continue;
            };
            let module = tensor.strip_suffix(".weight").unwrap();
            let matrix = checkpoint.matrix(module).unwrap().unwrap();
            let theirs = &answers[&format!("dequant/{tensor}/values")];
            let all = dense(matrix.rows.as_ref(), 0..matrix.rows.rows(), false);
            for (i, row) in rows.iter().enumerate() {
                for (c, ours) in all.row(*row as usize).iter().enumerate() {
                    let b = theirs[[i, c]];
                    assert!(
                        (ours - b).abs() <= b.abs() * 2f64.powi(-52),
                        "{tensor} [{row}, {c}]: {ours:e} {b:e}"
                    );
                }
            }
            let sums = &answers[&format!("dequant/{tensor}/sum")];
            let absolute: f64 = all.iter().map(|v| v.abs()).sum();
            assert!((all.sum() - sums[0]).abs() <= 1e-12 * absolute, "{tensor}");
            let squares: f64 = all.iter().map(|v| v * v).sum();
            assert!((squares - sums[1]).abs() <= 1e-12 * squares, "{tensor}");
            seen += 1;
        }
        assert!(seen >= 5, "{}: {seen}", folder.display());
    }
}
