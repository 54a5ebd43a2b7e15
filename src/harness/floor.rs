/*!
The least number of GPU cases that must have run: a job on a GPU runner that ran none is not green.

Where one process runs all tests it counts them itself. Under cargo-nextest a process runs one test and can't: there the
count is taken of the records ([`super::environment::REPORTS`]) by `mla-check merge --gpu-floor N`.
*/

use super::environment::FLOOR;
use super::gate::REQUIRE_GPU;

/// The floor of a process that runs all tests that were asked for. `asked`: a number given; `required`: whether a GPU is;
/// `filtered`: whether tests were chosen by name; `cases`: GPU cases of the matrix.
///
/// A required GPU without a number means all of them, unless somebody chose tests by name.
pub fn floor(asked: Option<usize>, required: bool, filtered: bool, cases: usize) -> usize {
    match asked {
        Some(n) => n,
        None if required && !filtered => cases,
        None => 0,
    }
}

/// What is wrong, if fewer ran than must.
pub fn missed(ran: usize, floor: usize, asked: bool) -> Option<String> {
    (ran < floor).then(|| {
        let place = if asked { format!("{FLOOR}={floor}") } else { format!("{REQUIRE_GPU}=1, all of the matrix") };
        format!(
            "{ran} GPU cases ran, fewer than the floor of {floor}\n  where: {place}\n  do: see above for what was skipped, filtered out or failed before it was judged, and `mla-check devices` for what this machine lacks"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_wins_and_a_required_gpu_means_all() {
        assert_eq!(floor(None, false, false, 16), 0);
        assert_eq!(floor(None, true, false, 16), 16);
        assert_eq!(floor(None, true, true, 16), 0);
        assert_eq!(floor(Some(3), false, false, 16), 3);
        assert_eq!(floor(Some(3), true, true, 16), 3);
        assert_eq!(floor(Some(0), true, false, 16), 0);
        // More than there are is asked for all the same: the matrix shrank, and somebody should hear of it.
        assert_eq!(floor(Some(20), true, false, 16), 20);
    }

    #[test]
    fn the_floor_itself_is_enough() {
        assert_eq!(missed(0, 0, false), None);
        assert_eq!(missed(16, 16, false), None);
        assert!(missed(15, 16, false).unwrap().starts_with("15 GPU cases ran, fewer than the floor of 16\n"));
        assert!(missed(0, 1, true).unwrap().contains("where: MLA_CHECK_GPU_FLOOR=1\n"));
    }
}
