/*!
Values beyond f16's largest number, 65504: where a correct engine has infinity the contract's rounding has it too, and where
it must not there is a fault. On the engines that compute in f16: `cpu`, and `ptx` where NVRTC is; on a GPU `tests/gpu.rs`.
*/

#[path = "common/nvrtc.rs"]
mod environment;
#[path = "common/overflow.rs"]
mod overflow;

use environment::nvrtc;
use mla_check::check::EngineKind;

fn engines(test: &str) -> Vec<EngineKind> {
    let ptx = nvrtc(&format!("{test} (engine ptx)")).map(|_| EngineKind::Ptx);
    std::iter::once(EngineKind::Cpu).chain(ptx).collect()
}

#[test]
fn an_overflow_that_the_contract_has_too_is_rounding() {
    engines("an_overflow_that_the_contract_has_too_is_rounding").into_iter().for_each(overflow::rounding);
}

#[test]
fn what_comes_after_an_overflow_is_neither_accused_nor_passed() {
    engines("what_comes_after_an_overflow_is_neither_accused_nor_passed")
        .into_iter()
        .for_each(overflow::after);
}

#[test]
fn infinity_and_the_largest_number_are_faults_in_each_others_place() {
    let Some(_) = nvrtc("infinity_and_the_largest_number_are_faults_in_each_others_place") else { return };
    overflow::exchanged(EngineKind::Ptx);
}
