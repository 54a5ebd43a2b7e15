/*! What packagers take: completions, man pages, and that the wheel's description says what `adapters/` says. */

mod common;

use clap::{Command as Clap, CommandFactory};
use common::fixture;
use std::collections::BTreeSet;
use std::process::{Command, Output};

fn program(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mla-check")).args(args).output().unwrap()
}

fn commands() -> Clap {
    let mut all = mla_check::cli::Cli::command().disable_help_subcommand(true);
    all.build();
    all
}

/// Long options that people are shown.
fn options(command: &Clap) -> Vec<&str> {
    command.get_arguments().filter(|a| !a.is_hide_set()).filter_map(|a| a.get_long()).collect()
}

#[test]
fn every_command_has_a_page_that_names_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("man1");
    let out = program(&["man", "--dir", dir.to_str().unwrap()]);
    assert!(out.status.success() && out.stdout.is_empty(), "{out:?}");
    let all = commands();
    let mut pages = BTreeSet::from(["mla-check.1".to_string()]);
    for command in all.get_subcommands() {
        let name = format!("mla-check-{}.1", command.get_name());
        let page = std::fs::read_to_string(dir.join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let shown = options(command);
        assert!(shown.contains(&"format") && shown.contains(&"help"), "{name}: {shown:?}");
        for option in shown {
            // A minus sign, not a hyphen: what people paste must work.
            let written = format!("\\-\\-{}", option.replace('-', "\\-"));
            assert!(page.contains(&written), "{name} lacks --{option}");
        }
        pages.insert(name);
    }
    let found = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(found.collect::<BTreeSet<_>>(), pages);
    // The main page is what `man` prints, and names every command.
    let main = std::fs::read_to_string(dir.join("mla-check.1")).unwrap();
    assert_eq!(String::from_utf8(program(&["man"]).stdout).unwrap().matches(".SH SUBCOMMANDS").count(), 1);
    for command in all.get_subcommands() {
        assert!(main.contains(&format!("mla\\-check\\-{}(1)", command.get_name())), "{}", command.get_name());
    }
}

#[test]
fn pages_that_can_not_be_written_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let out = program(&["man", "--dir", file.to_str().unwrap()]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("where: --dir") && said.lines().count() == 3, "{said}");
}

#[test]
fn completions_name_every_command_and_option() {
    let all = commands();
    for shell in ["bash", "zsh", "fish"] {
        let out = program(&["completions", shell]);
        assert!(out.status.success(), "{shell}");
        let script = String::from_utf8(out.stdout).unwrap();
        for command in all.get_subcommands() {
            assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            for option in options(command) {
                let written = if shell == "fish" { format!("-l {option}") } else { format!("--{option}") };
                assert!(script.contains(&written), "{shell}: {} --{option}", command.get_name());
            }
        }
    }
}

fn toml(path: &str) -> toml::Table {
    std::fs::read_to_string(fixture(path)).unwrap().parse().unwrap()
}

/// The wheel holds the same hooks, under the same names and with the same plugins, as `pip install ./adapters`.
#[test]
fn the_wheel_holds_the_hooks() {
    let (wheel, hooks) = (toml("../pyproject.toml"), toml("../adapters/pyproject.toml"));
    let cargo = toml("../Cargo.toml");
    assert_eq!(wheel["project"]["name"], cargo["package"]["name"]);
    assert_eq!(wheel["project"]["license"], cargo["workspace"]["package"]["license"]);
    assert_eq!(wheel["project"]["description"], cargo["package"]["description"]);
    // maturin takes Cargo.toml's version; one of its own could differ.
    assert_eq!(wheel["project"]["dynamic"].as_array().unwrap(), &[toml::Value::from("version")]);
    assert!(wheel["project"].get("version").is_none());
    assert_eq!(wheel["project"]["entry-points"], hooks["project"]["entry-points"]);
    let modules = hooks["tool"]["setuptools"]["py-modules"].as_array().unwrap();
    let modules: BTreeSet<String> = modules.iter().map(|m| format!("{}.py", m.as_str().unwrap())).collect();
    let data = wheel["tool"]["maturin"]["data"].as_str().unwrap();
    let folder = fixture("..").join(data).join("purelib");
    let links = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(links.collect::<BTreeSet<_>>(), modules);
    for m in modules {
        let same = std::fs::read(fixture("../adapters").join(&m)).unwrap();
        assert_eq!(std::fs::read(folder.join(&m)).unwrap(), same, "{m}");
    }
}

#[test]
fn the_script_explains_itself() {
    let script = fixture("../scripts/package");
    let out = Command::new(&script).arg("--help").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && text.contains("--no-wheel") && text.contains("SHA256SUMS"), "{text}");
    assert_eq!(Command::new(&script).arg("--wheels").output().unwrap().status.code(), Some(2));
}
