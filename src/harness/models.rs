/*!
The models of the matrix: those that the harness names, and the user's own.

A file that can't be opened, or has nothing to judge, stays in the list with the reason: it becomes a test that fails.
*/

use super::environment::{Environment, LAYERS, MODELS};
use super::matrix::plain;
use crate::gguf::split_name;
use crate::model::{Model, choose};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model of the matrix.
#[derive(Clone)]
pub(super) struct Listed {
    /// Its part of tests' names: the file's name without ending and number of part, plain, unlike any other.
    pub label: String,
    /// The file, or the first part.
    pub path: PathBuf,
    /// Whether it is the user's own.
    pub own: bool,
    /// The model and the layers to judge; or what is wrong, where, what to do.
    pub content: Result<(Arc<Model>, Vec<usize>), String>,
}

/// All models: `named` ones with all their layers, then those of the environment.
pub(super) fn list(named: &[PathBuf], environment: &Environment) -> Vec<Listed> {
    let mut all = List::default();
    for path in named {
        all.place(path, None, "the harness's list of models");
    }
    let asked = environment.layers.as_deref().unwrap_or("");
    if let Some(models) = &environment.models {
        let place = format!("{MODELS}={}", models.to_string_lossy());
        for path in std::env::split_paths(models).filter(|p| !p.as_os_str().is_empty()) {
            all.place(&path, Some(asked), &place);
        }
    }
    all.listed
}

#[derive(Default)]
struct List {
    listed: Vec<Listed>,
    labels: BTreeSet<String>,
}

impl List {
    /// A file, or the files of a folder. `asked`: layers of a user's model, "" for the first; None: all of them.
    fn place(&mut self, path: &Path, asked: Option<&str>, place: &str) {
        // A folder with config.json is one model.
        if !path.is_dir() || path.join("config.json").is_file() {
            self.file(path, asked);
            return;
        }
        let files = match files(path) {
            Ok(files) => files,
            Err(e) => {
                let what = format!(
                    "the folder can't be read: {e}\n  where: {}\n  do: check its permissions",
                    path.display()
                );
                return self.bad(path, asked, what);
            }
        };
        if files.is_empty() {
            let what = format!(
                "the folder holds no .gguf file\n  where: {}, of {place}\n  do: name the folder that holds the files themselves, or the files",
                path.display()
            );
            return self.bad(path, asked, what);
        }
        // Parts of one model are opened with the first of them.
        let mut known: BTreeSet<PathBuf> = BTreeSet::new();
        for file in files {
            if known.contains(&file) {
                continue;
            }
            self.file(&file, asked);
            match self.listed.last().map(|l| &l.content) {
                Some(Ok((model, _))) => {
                    known.extend(model.source().files().into_iter().map(|f| f.0));
                }
                _ => known.extend(siblings(&file)),
            }
        }
    }

    fn file(&mut self, path: &Path, asked: Option<&str>) {
        let content = Model::open(path).map_err(|e| e.to_string()).and_then(|model| {
            let layers = layers(&model, asked)?;
            Ok((Arc::new(model), layers))
        });
        let label = self.label(path);
        self.listed.push(Listed { label, path: path.into(), own: asked.is_some(), content });
    }

    fn bad(&mut self, path: &Path, asked: Option<&str>, what: String) {
        let label = self.label(path);
        self.listed.push(Listed { label, path: path.into(), own: asked.is_some(), content: Err(what) });
    }

    /// A label that no other model has: the second of a name gets `-2`, in the order of the list.
    fn label(&mut self, path: &Path) -> String {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let stem =
            split_name(&name).map(|n| n.prefix).or_else(|| name.strip_suffix(".gguf")).unwrap_or(&name);
        let stem = plain(stem);
        let mut label = stem.clone();
        let mut n = 1;
        while !self.labels.insert(label.clone()) {
            n += 1;
            label = format!("{stem}-{n}");
        }
        label
    }
}

fn layers(model: &Model, asked: Option<&str>) -> Result<Vec<usize>, String> {
    match asked {
        Some("") => {
            let first = model.mla_layers().first().copied();
            first.map(|l| vec![l]).ok_or_else(|| {
                let file = model.file();
                format!(
                    "no layer of this file has MLA attention\n  where: {file}\n  do: take it out of {MODELS}"
                )
            })
        }
        Some(asked) => {
            let place = format!("{LAYERS}={}, {}", asked.escape_debug(), model.file());
            choose(asked, model, &place).map(|c| c.layers)
        }
        None => choose("all", model, &model.file()).map(|c| c.layers),
    }
}

/// Files of a folder, by name.
fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !path.is_dir() {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

/// All parts of the split that a file's name says it is of.
fn siblings(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some(split) = split_name(&name) else { return Vec::new() };
    (1..=split.count)
        .map(|n| path.with_file_name(format!("{}-{n:05}-of-{:05}.gguf", split.prefix, split.count)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models")
    }

    fn own(paths: &[&Path], layers: Option<&str>) -> Vec<Listed> {
        let models = Some(std::env::join_paths(paths).unwrap());
        let environment = Environment { models, layers: layers.map(Into::into), ..Environment::default() };
        list(&[], &environment)
    }

    fn labels(of: &[Listed]) -> Vec<&str> {
        of.iter().map(|l| l.label.as_str()).collect()
    }

    fn wrong(of: &Listed) -> &str {
        of.content.as_ref().err().map_or("", String::as_str)
    }

    #[test]
    fn a_split_model_is_one_with_all_layers_or_those_asked_for() {
        let named = list(&[fixtures()], &Environment::default());
        assert_eq!(labels(&named), ["dsv3.Q4_K_M", "glm5dims.Q4_K_M"]);
        let layers = |l: &Listed| l.content.as_ref().map(|c| c.1.clone()).unwrap();
        assert!(named.iter().all(|l| !l.own && layers(l) == [0, 1]));
        let first = own(&[&fixtures()], None);
        assert!(first.iter().all(|l| l.own && layers(l) == [0]));
        assert!(own(&[&fixtures()], Some("1")).iter().all(|l| layers(l) == [1]));
        assert!(own(&[&fixtures()], Some("all")).iter().all(|l| layers(l) == [0, 1]));
        for bad in own(&[&fixtures()], Some("0..2")) {
            assert!(wrong(&bad).contains("where: MLA_CHECK_LAYERS=0..2, "), "{}", wrong(&bad));
        }
    }

    #[test]
    fn the_same_name_twice_has_two_labels() {
        let glm = fixtures().join("glm5dims.Q4_K_M.gguf");
        let environment = Environment { models: Some(glm.clone().into()), ..Environment::default() };
        let all = list(&[glm], &environment);
        assert_eq!(labels(&all), ["glm5dims.Q4_K_M", "glm5dims.Q4_K_M-2"]);
    }

    #[test]
    fn what_can_not_be_opened_stays_in_the_list() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("broken.gguf"), "GGUF, but no more").unwrap();
        fs::write(at("notes.txt"), "not a model").unwrap();
        // Part 2 of 3 is missing: one model, one failure.
        for part in [1, 3] {
            let name = format!("dsv3.Q4_K_M-0000{part}-of-00003.gguf");
            fs::copy(fixtures().join(&name), at(&name)).unwrap();
        }
        let nowhere = at("nowhere.gguf");
        let all = own(&[folder.path(), &nowhere], None);
        assert_eq!(labels(&all), ["broken", "dsv3.Q4_K_M", "nowhere"]);
        for l in &all {
            assert!(wrong(l).contains("\n  do: "), "{}: {}", l.label, wrong(l));
        }
        assert!(wrong(&all[0]).contains("broken.gguf"));
        assert!(wrong(&all[1]).contains("00002-of-00003"), "{}", wrong(&all[1]));
    }

    #[test]
    fn an_empty_folder_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let all = own(&[folder.path()], None);
        assert_eq!(all.len(), 1);
        assert!(wrong(&all[0]).starts_with("the folder holds no .gguf file\n"));
    }
}
