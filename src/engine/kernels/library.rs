/*!
Kernel sources: those built into the program, or a folder of the user's.

A folder need not hold every file: what it lacks is taken from the program's own, so that a kernel's author brings one
file. Includes are resolved here; the compiler opens no file.

A library is of one dtype. A file is known by what it computes: `product.cu` is the file of that name, or where that one
does not compile for the dtype, the one of the dtype, `product_f32.cu`.
*/

use super::header::{COMPUTED, Header};
use crate::engine::EngineError;
use crate::nvrtc::stamp::Hash;
use crate::nvrtc::{Source, includes};
use mla_numeric::DType;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

macro_rules! built_in {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*]
    };
}

/// The program's own kernels and what they include.
const BUILT_IN: &[(&str, &str)] = built_in![
    "common.cuh",
    "attention.cuh",
    "pipeline.cuh",
    "attention_f32.cuh",
    "dequant.cuh",
    "codebooks.cuh",
    "dequant.cu",
    "dequant_iq.cu",
    "dequant_low.cu",
    "dequant_wide.cu",
    "norm.cu",
    "product.cu",
    "rope.cu",
    "cache.cu",
    "fused.cu",
    "absorbed.cu",
    "merge.cu",
    "product_f32.cu",
    "fused_f32.cu",
    "absorbed_f32.cu"
];

/// A kernel file, read.
#[derive(Clone, Debug)]
pub struct File {
    /// What it says of itself.
    pub header: Header,
    /// With all that it includes.
    pub source: Source,
    /// Whether it and all that it includes are the program's own.
    pub built_in: bool,
    /// Of text and includes.
    pub hash: Hash,
    /// What tensors are stored in.
    pub dtype: DType,
    /// Where it comes from, for messages.
    pub place: String,
}

/// Kernel files by what they compute.
#[derive(Clone, Debug)]
pub struct Library {
    folder: Option<PathBuf>,
    dtype: DType,
    files: BTreeMap<String, File>,
    altered: bool,
}

/// Of a source's text and of all that it includes.
pub(super) fn hash_of(source: &Source) -> Hash {
    let texts = std::iter::once(&source.text).chain(source.headers.iter().map(|h| &h.1));
    Hash::of(&texts.flat_map(|t| t.bytes().chain([0])).collect::<Vec<u8>>())
}

impl Library {
    /// The program's own kernels for bf16, what PTX is committed for.
    ///
    /// # Errors
    /// None unless the program was built from kernels that are wrong.
    pub fn built_in() -> Result<Library, EngineError> {
        Library::built_in_for(DType::Bf16)
    }

    /// The program's own kernels for a dtype.
    ///
    /// # Errors
    /// A dtype that no kernel computes in.
    pub fn built_in_for(dtype: DType) -> Result<Library, EngineError> {
        Library::read(None, dtype).map_err(EngineError::Broke)
    }

    /// Kernels of a folder; the program's own where it has no file of a name.
    ///
    /// # Errors
    /// What, where, what to do. A folder that can't be read, holds no kernels or none for the dtype is input that makes no
    /// sense; files that can't be used (a wrong header, an include that is not there) are an engine that broke: under
    /// `--bisect` the first stops the bisection, the second skips a commit.
    pub fn folder(folder: &Path, dtype: DType) -> Result<Library, EngineError> {
        let unknown = |e: std::io::Error| {
            let place = folder.display();
            EngineError::Input(format!(
                "the kernel folder can't be read: {e}\n  where: {place}\n  do: name a folder with .cu files"
            ))
        };
        let mut any = false;
        for entry in std::fs::read_dir(folder).map_err(unknown)? {
            let name = entry.map_err(unknown)?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".cu") {
                any = true;
                if !BUILT_IN.iter().any(|(n, _)| *n == name) {
                    let known: Vec<&str> = kernel_names().collect();
                    return Err(EngineError::Broke(format!(
                        "no kernel file is called {name:?}\n  where: {}\n  do: call it by what it replaces: {}",
                        folder.display(),
                        known.join(", ")
                    )));
                }
            }
        }
        if !any {
            let place = folder.display();
            return Err(EngineError::Input(format!(
                "the kernel folder holds no .cu file\n  where: {place}\n  do: see docs/kernels.md"
            )));
        }
        let library = Library::read(Some(folder.into()), dtype).map_err(EngineError::Broke)?;
        if library.files.values().all(|f| f.built_in) {
            return Err(EngineError::Input(format!(
                "no kernel file of the folder computes in {dtype}\n  where: {}\n  do: list it in `dtypes` of a header, or pass another --dtype",
                folder.display()
            )));
        }
        Ok(library)
    }

    fn read(folder: Option<PathBuf>, dtype: DType) -> Result<Library, String> {
        let mut library = Library { folder, dtype, files: BTreeMap::new(), altered: false };
        for name in kernel_names() {
            let (text, mut built_in) = library.text(name)?.ok_or_else(|| format!("{name} is missing"))?;
            let place = library.place(name);
            let header = Header::of(&text).map_err(|e| {
                format!("{e}\n  where: {place}\n  do: correct its header; docs/kernels.md has the fields")
            })?;
            let mut source = Source::new(name, &text);
            let mut open = includes(&text);
            while let Some(include) = open.pop() {
                if source.headers.iter().any(|(n, _)| *n == include) {
                    continue;
                }
                let Some((text, own)) = library.text(&include)? else {
                    let place = library.place(name);
                    return Err(format!(
                        "it includes {include:?}, which is not there\n  where: {place}\n  do: put it beside, or take the include out"
                    ));
                };
                built_in &= own;
                open.extend(includes(&text));
                source = source.header(include, text);
            }
            source.headers.sort();
            let hash = hash_of(&source);
            let stage = computed_by(name);
            // What is named after a dtype is only asked where the other can't.
            if !header.dtypes.contains(&dtype) || stage != name && library.files.contains_key(&stage) {
                continue;
            }
            library.files.insert(stage, File { header, source, built_in, hash, dtype, place });
        }
        for stage in kernel_names().map(computed_by) {
            if !library.files.contains_key(&stage) {
                let place = library.place(&stage);
                return Err(format!(
                    "no kernel file computes in {dtype} what {stage} does\n  where: {place}\n  do: list {dtype} in `dtypes` of its header, or pass another --dtype"
                ));
            }
        }
        Ok(library)
    }

    /// What tensors are stored in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A file's text, and whether it is the program's own.
    fn text(&self, name: &str) -> Result<Option<(String, bool)>, String> {
        if let Some(folder) = &self.folder {
            let path = folder.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) => return Ok(Some((text, false))),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => {
                    let place = path.display();
                    return Err(format!(
                        "the kernel file can't be read: {e}\n  where: {place}\n  do: make it readable UTF-8 text"
                    ));
                }
            }
        }
        Ok(BUILT_IN.iter().find(|(n, _)| *n == name).map(|(_, t)| ((*t).to_string(), true)))
    }

    /// Where a file comes from, for messages.
    pub fn place(&self, name: &str) -> String {
        let name = self.files.get(name).map_or(name, |f| f.source.name.as_str());
        match &self.folder {
            Some(folder) if folder.join(name).exists() => folder.join(name).display().to_string(),
            _ => format!("built-in kernel {name}"),
        }
    }

    /// Of what is not the program's own: whose folder, and whether it was altered on purpose.
    pub fn theirs(&self) -> String {
        let folder = self.folder.as_ref().map(|f| format!("of {}", f.display()));
        let altered = self.altered.then(|| "altered on purpose".to_string());
        folder.into_iter().chain(altered).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn files_mut(&mut self) -> impl Iterator<Item = &mut File> {
        self.files.values_mut()
    }

    pub(super) fn set_altered(&mut self) {
        self.altered = true;
    }

    /// All files, by what they compute.
    pub fn files(&self) -> impl Iterator<Item = (&str, &File)> {
        self.files.iter().map(|(n, f)| (n.as_str(), f))
    }

    /// A file.
    pub fn file(&self, name: &str) -> Option<&File> {
        self.files.get(name)
    }

    /// The entry point that decodes a ggml type, if there is one.
    pub fn decoder(&self, ty: &str) -> Option<&str> {
        let mut entries = self.files.values().flat_map(|f| &f.header.kernels);
        entries.find(|k| k.ty.as_deref() == Some(ty)).map(|k| k.entry.as_str())
    }

    /// The file that has an entry point.
    pub fn with_entry(&self, entry: &str) -> Option<(&str, &File)> {
        self.files().find(|(_, f)| f.header.entry(entry).is_some())
    }
}

/// The name that a kernel file is known by: without the dtype.
fn computed_by(name: &str) -> String {
    let of = |d: &DType| name.strip_suffix(&format!("_{d}.cu")).map(|stem| format!("{stem}.cu"));
    COMPUTED.iter().find_map(of).unwrap_or_else(|| name.into())
}

fn kernel_names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(n, _)| *n).filter(|n| n.ends_with(".cu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_kernels_are_read_with_all_that_they_include() {
        let library = Library::built_in().unwrap();
        assert!(library.files().all(|(name, f)| f.source.name == name && f.dtype == DType::Bf16));
        let fused = library.file("fused.cu").unwrap();
        let names: Vec<&str> = fused.source.headers.iter().map(|h| h.0.as_str()).collect();
        assert_eq!(names, ["attention.cuh", "common.cuh"]);
        assert!(fused.built_in && library.with_entry("fused_part").is_some_and(|(n, _)| n == "fused.cu"));
    }

    #[test]
    fn every_dtype_has_a_file_for_everything() {
        let stages = |l: &Library| l.files().map(|(n, _)| n.to_string()).collect::<Vec<_>>();
        let bf16 = Library::built_in().unwrap();
        for dtype in COMPUTED {
            let library = Library::built_in_for(dtype).unwrap();
            assert_eq!(stages(&library), stages(&bf16), "{dtype}");
            assert!(library.files().all(|(_, f)| f.dtype == dtype && f.header.dtypes.contains(&dtype)));
            let name = |stage: &str| library.file(stage).unwrap().source.name.clone();
            let product = if dtype == DType::F32 { "product_f32.cu" } else { "product.cu" };
            assert_eq!((name("product.cu").as_str(), name("norm.cu").as_str()), (product, "norm.cu"));
            assert_eq!(library.place("product.cu"), format!("built-in kernel {product}"));
        }
        let e = Library::built_in_for(DType::F64).unwrap_err().to_string();
        assert!(e.contains("no kernel file computes in f64 what"), "{e}");
    }

    #[test]
    fn a_folder_serves_the_dtypes_that_its_headers_list() {
        let folder = tempfile::tempdir().unwrap();
        let text = BUILT_IN.iter().find(|(n, _)| *n == "product.cu").unwrap().1;
        // An older file lists none, and is one for bf16.
        let older = text.replace("dtypes = [\"bf16\", \"f16\"]\n", "");
        assert_ne!(older, text);
        std::fs::write(folder.path().join("product.cu"), &older).unwrap();
        let of = |dtype| Library::folder(folder.path(), dtype);
        assert!(!of(DType::Bf16).unwrap().file("product.cu").unwrap().built_in);
        let e = of(DType::F16).unwrap_err().to_string();
        assert!(
            e.contains("computes in f16 what product.cu does") && e.contains("  do: list f16 in `dtypes`"),
            "{e}"
        );
        let e = of(DType::F32).unwrap_err();
        assert!(
            matches!(&e, EngineError::Input(e) if e.contains("no kernel file of the folder computes in f32")),
            "{e}"
        );
        std::fs::write(folder.path().join("product.cu"), text).unwrap();
        assert!(!of(DType::F16).unwrap().file("product.cu").unwrap().built_in);
        // What says that it computes in all three is what is taken.
        std::fs::write(folder.path().join("product.cu"), text.replace("\"f16\"]", "\"f16\", \"f32\"]"))
            .unwrap();
        assert_eq!(of(DType::F32).unwrap().file("product.cu").unwrap().source.name, "product.cu");
    }

    #[test]
    fn a_folder_replaces_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let text = BUILT_IN.iter().find(|(n, _)| *n == "norm.cu").unwrap().1;
        std::fs::write(folder.path().join("norm.cu"), text.replace("THREADS = 256", "THREADS = 64")).unwrap();
        let library = Library::folder(folder.path(), DType::Bf16).unwrap();
        assert_eq!(library.file("norm.cu").unwrap().header.tile["THREADS"], 64);
        assert!(!library.file("norm.cu").unwrap().built_in && library.file("rope.cu").unwrap().built_in);
        let own = Library::built_in().unwrap();
        assert_ne!(own.file("norm.cu").unwrap().hash, library.file("norm.cu").unwrap().hash);
    }

    #[test]
    fn a_folder_that_is_wrong_says_what_and_where() {
        let folder = tempfile::tempdir().unwrap();
        let error = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).unwrap();
            let e = Library::folder(folder.path(), DType::Bf16).unwrap_err().to_string();
            std::fs::remove_file(folder.path().join(name)).unwrap();
            assert!(e.contains(&folder.path().display().to_string()) && e.contains("  do: "), "{e}");
            e
        };
        assert!(error("readme", "").contains("holds no .cu file"));
        assert!(error("new.cu", "").contains("no kernel file is called \"new.cu\""));
        assert!(error("norm.cu", "int x;").contains("does not begin with a header"));
        let text = BUILT_IN.iter().find(|(n, _)| *n == "norm.cu").unwrap().1;
        assert!(error("norm.cu", &text.replace("common.cuh", "other.cuh")).contains("\"other.cuh\""));
        let missing = Library::folder(&folder.path().join("none"), DType::Bf16).unwrap_err();
        assert!(matches!(&missing, EngineError::Input(e) if e.contains("can't be read")), "{missing}");
    }
}
