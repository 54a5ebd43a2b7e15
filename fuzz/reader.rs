//! What reads model files, and nothing else of the program: built in a minute rather than ten with a sanitiser, and the
//! fuzzer's coverage is of what it is about. Under the library's name, so that tests and target share their code.

extern crate self as mla_check;

#[path = "../src/checkpoint/mod.rs"]
pub mod checkpoint;
#[path = "../src/gguf/mod.rs"]
#[allow(unused_imports)]
pub mod gguf;
#[path = "../src/model/mod.rs"]
#[allow(unused_imports)]
pub mod model;
#[path = "../src/survey/mod.rs"]
pub mod survey;
