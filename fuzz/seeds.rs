//! Writes the corpus to begin with: small models of each architecture and layout, and the files of fixtures/gguf,
//! whole and cut.

#[path = "../tests/common/tiny.rs"]
mod tiny;

use std::path::Path;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    let folder = std::env::args_os().nth(1).ok_or("give the folder of the corpus")?;
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    tiny::write(folder)?;
    let small = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/gguf/small.gguf"))?;
    for end in [24, 60, 200, small.len() / 2, small.len()] {
        std::fs::write(folder.join(format!("small-{end}.gguf")), &small[..end])?;
    }
    Ok(())
}
