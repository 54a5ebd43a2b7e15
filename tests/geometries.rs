/*!
Every geometry on engines cpu and ptx: widths of known models, head counts that are no multiple of a tile, no rope, pages of 1 to
64 slots, splits without keys, some tokens on a context. The same runs on a GPU (`tests/gpu.rs`).
*/

#[path = "common/geometries.rs"]
mod geometries;
#[path = "common/small.rs"]
#[allow(dead_code)]
mod small;

use geometries::{ALL, Shape, faults, right};
use libtest_mimic::{Arguments, Trial};
use mla_check::check::EngineKind;
use mla_check::fault::Fault;
use mla_check::harness::gate::{REQUIRE_NVRTC, Standing, is_on};
use mla_check::nvrtc::Nvrtc;
use mla_reference::Form;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Kernels of these geometries are compiled here.
    let lacking = Nvrtc::here().err().map(|e| e.problem().to_string());
    let required = is_on(REQUIRE_NVRTC);
    let cpu = ALL.iter().map(|s| {
        Trial::test(format!("cpu::{}", s.name), move || {
            right(EngineKind::Cpu, s);
            Ok(())
        })
    });
    let ptx = ALL.iter().map(|s| {
        Standing::of_compiled(lacking.clone(), required).trial(format!("ptx::{}", s.name), move || {
            right(EngineKind::Ptx, s);
            Ok(())
        })
    });
    let planted = Trial::test("a_fault_is_found_in_any_of_them", || {
        ALL.iter().step_by(4).for_each(found);
        Ok(())
    });
    let far = Standing::of_compiled(lacking.clone(), required).trial("ptx::pages_from_5_on", || {
        from_page_5();
        Ok(())
    });
    let trials = cpu.chain(ptx).chain([far, planted]).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// So that a table that compares nothing can't pass.
fn found(s: &Shape) {
    for form in Form::ALL {
        let fault = Fault::parse("attn_out-element", 0).unwrap();
        let said = faults(EngineKind::Cpu, s, form, |o| o.fault = Some(fault)).unwrap();
        let first = said.first().map_or("", String::as_str);
        assert!(first.starts_with(&format!("{}/attn_out, ", form.name())), "{}: {said:?}", s.name);
    }
}

/// Pages lie behind others that nobody uses. (A GPU has room for so many that ids overflow: tests/gpu.rs.)
fn from_page_5() {
    let shape = ALL.into_iter().find(|s| s.name == "heads-5").unwrap();
    for form in Form::ALL {
        let faults = faults(EngineKind::Ptx, &shape, form, |o| o.first_page = 5).unwrap();
        assert!(faults.is_empty(), "{form:?}: {faults:?}");
    }
}
