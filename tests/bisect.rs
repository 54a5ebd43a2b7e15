/*!
`git bisect run` with the program as its judge: a history with a regression, a commit that does not compile and commits with
another fault; the regression is named. With real kernel sources on the PTX machine (needs NVRTC), and through the CPU engine's
seams; on a GPU in `tests/gpu.rs`.
*/

#[path = "common/bisect.rs"]
mod bisect;
#[path = "common/nvrtc.rs"]
mod environment;

use bisect::{Commit, Repository, culprit, kernels, model, program, text};

#[test]
fn a_regression_of_a_kernel_is_named_on_the_ptx_machine() {
    if environment::nvrtc("a_regression_of_a_kernel_is_named_on_the_ptx_machine").is_some() {
        kernels("ptx");
    }
}

/// What runs at a commit of [`seams`]: its file says what the engine is to get wrong; a missing one, that it does not build.
const STEP: &str = r#"test -e seam || exit 125
exec "$0" run "$1" --engine cpu --form absorbed --batch 0+5,70+1 --splits 2 --regime random $(cat seam) --quiet "${@:2}""#;

/// Faults of the CPU engine, which acts them out itself.
fn seams() -> Vec<Commit<'static>> {
    let seam = |text: &str| vec![("seam", text.to_string())];
    let clean = || seam("");
    let culprit = || seam("--fault merge-base");
    vec![
        ("begin", clean()),
        ("notes", Vec::new()),
        ("another fault", seam("--fault softmax-scale=1.02")),
        ("mended", clean()),
        ("the regression", culprit()),
        ("another fault in its place", seam("--fault output-gain=1.02")),
        ("the regression alone again", culprit()),
        ("release", Vec::new()),
    ]
}

fn step<'a>(program: &'a str, model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["bash", "-c", STEP, program, model][..], more].concat()
}

#[test]
fn a_regression_of_the_cpu_engine_is_named() {
    let repository = Repository::new(&seams());
    let (model, program) = (model(), program());
    let (model, program) = (model.to_str().unwrap(), program.to_str().unwrap());
    let run = |more: &[&str]| {
        let args = step(program, model, more);
        repository.command(args[0].as_ref()).args(&args[1..]).output().unwrap()
    };
    let out = run(&["--record-signature", ".git/signature.json"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
    let signature = ["--bisect", "--signature", ".git/signature.json"];
    let said = repository.bisect(&step(program, model, &signature));
    assert_eq!(culprit(&said), Some("the regression"), "{said}");

    // At each commit, what git is told.
    for (back, code) in [(0, 0), (2, 125), (3, 0), (4, 1), (5, 125), (6, 1)] {
        repository.git(&["checkout", "--quiet", &format!("main~{}", 7 - back)]);
        let out = run(&signature);
        assert_eq!(out.status.code(), Some(code), "commit {back}: {}", text(&out));
    }
    // Without the signature, and where nobody bisects, another fault is a fault.
    repository.git(&["checkout", "--quiet", "main~2"]);
    for (args, code) in [(&["--bisect"][..], 1), (&signature[1..], 1)] {
        let out = run(args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", text(&out));
        assert_eq!(text(&out).contains("not the recorded fault"), args.len() > 1);
    }
}

/// A typo must mark no commit: git stops at 128.
#[test]
fn what_makes_no_sense_stops_the_bisection() {
    let folder = tempfile::tempdir().unwrap();
    let (model, program) = (model(), program());
    let run = |args: &[&str]| {
        let out = std::process::Command::new(&program)
            .current_dir(folder.path())
            .arg("run")
            .args(args)
            .args(["--engine", "cpu", "--form", "absorbed", "--batch", "0+3", "--regime", "random"])
            .output()
            .unwrap();
        (out.status.code(), text(&out))
    };
    let model = model.to_str().unwrap();
    let (code, said) = run(&[model, "--record-signature", "s.json"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("there is no fault to record") && !folder.path().join("s.json").exists());
    let (code, said) = run(&[model, "--fault", "output-gain=1.02", "--record-signature", "s.json"]);
    assert_eq!(code, Some(1), "{said}");
    std::fs::write(folder.path().join("damaged.json"), "{\"schema\":").unwrap();
    for (args, says) in [
        (&["none.gguf", "--bisect"][..], "none.gguf"),
        (&[model, "--bisect", "--signature", "none.json"], "can't be read"),
        (&[model, "--bisect", "--signature", "damaged.json"], "no signature"),
        (&[model, "--bisect", "--signature", "s.json", "--seed", "1"], "seed is 1, was 0"),
        (
            &[model, "--bisect", "--signature", "s.json", "--record-signature", "t.json"],
            "cannot be used with",
        ),
        (&[model, "--bisect", "--record-signature", "nowhere/t.json"], "does not exist"),
        (&[model, "--bisect", "--engin", "cpu"], "unexpected argument"),
    ] {
        let (code, said) = run(args);
        assert_eq!(code, Some(128), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?}: {said}");
    }
}
