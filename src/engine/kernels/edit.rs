/*!
One text of one kernel file in place of another, before anything is compiled: how a fault inside a kernel is planted.

The text must be there, once: a fault that is planted nowhere would be a clean report under its name, and one that is
planted twice is another fault. What was altered counts as no file of the program's, so that no committed PTX stands for
it.
*/

use super::library::{Library, hash_of};
use crate::engine::EngineError;
use std::fmt::Write;

/// A replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edit {
    /// What asks for it, as messages say it: an option with its value.
    pub asked: &'static str,
    /// Its name there.
    pub name: &'static str,
    /// File: a kernel's, or one that kernels include.
    pub file: &'static str,
    /// Text that stands in it once.
    pub from: &'static str,
    /// Text that takes its place.
    pub to: &'static str,
}

impl Edit {
    fn refused(&self, what: &str, place: &str, mend: &str) -> EngineError {
        let Edit { asked, name, .. } = self;
        EngineError::Input(format!("{asked}{name} can't be planted: {what}\n  where: {place}\n  do: {mend}"))
    }
}

impl Library {
    /// The same kernels with one text of one file replaced.
    ///
    /// # Errors
    /// The file is none of this library's dtype; its text is gone, or there more than once.
    pub fn edited(mut self, edit: &Edit) -> Result<Library, EngineError> {
        let dtype = self.dtype();
        let mut found = false;
        for file in self.files_mut() {
            let source = &mut file.source;
            let text = match source.headers.iter_mut().find(|h| h.0 == edit.file) {
                Some((_, text)) => text,
                None if source.name == edit.file => &mut source.text,
                None => continue,
            };
            found = true;
            let times = text.matches(edit.from).count();
            if times != 1 {
                let what = match times {
                    0 => "the text that it replaces is gone".to_string(),
                    n => format!("the text that it replaces is there {n} times"),
                };
                let mut place = format!("{} ({}), at\n", edit.file, file.place);
                edit.from.lines().for_each(|l| _ = writeln!(place, "    {}", l.trim()));
                let mend = "take --kernels away, or a fault whose text these kernels have";
                return Err(edit.refused(&what, place.trim_end(), mend));
            }
            *text = text.replacen(edit.from, edit.to, 1);
            file.built_in = false;
            file.hash = hash_of(&file.source);
        }
        if !found {
            let what = format!("no kernel of a run in {dtype} is {0} or includes it", edit.file);
            let mend = match edit.file.contains("_f32") {
                true => "pass --dtype f32".to_string(),
                false => "pass another --dtype".to_string(),
            };
            return Err(edit.refused(&what, "the kernel files", &mend));
        }
        self.set_altered();
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_numeric::DType;

    const EDIT: Edit = Edit { asked: "--fault kernel:", name: "x", file: "norm.cu", from: "+ p.eps", to: "" };

    #[test]
    fn one_text_is_replaced_and_the_file_is_no_longer_the_programs() {
        let own = Library::built_in().unwrap();
        let edited = own.clone().edited(&EDIT).unwrap();
        let (a, b) = (own.file("norm.cu").unwrap(), edited.file("norm.cu").unwrap());
        assert_eq!(a.source.text.replacen("+ p.eps", "", 1), b.source.text);
        assert!(a.built_in && !b.built_in && a.hash != b.hash);
        assert!(edited.file("rope.cu").unwrap().built_in);
        assert_eq!(edited.theirs(), "altered on purpose");
    }

    #[test]
    fn an_include_is_altered_for_all_who_include_it() {
        let edit = Edit { file: "attention.cuh", from: "exp2_((before - now) * c2)", to: "1.f", ..EDIT };
        let edited = Library::built_in().unwrap().edited(&edit).unwrap();
        let altered: Vec<&str> = edited.files().filter(|(_, f)| !f.built_in).map(|(n, _)| n).collect();
        assert_eq!(altered, ["absorbed.cu", "fused.cu"]);
    }

    #[test]
    fn a_text_that_is_not_there_once_is_an_error_with_kernel_and_text() {
        let of = |edit: Edit| Library::built_in().unwrap().edited(&edit).unwrap_err();
        let gone = of(Edit { from: "no such\n  text", ..EDIT });
        assert!(matches!(&gone, EngineError::Input(_)));
        let gone = gone.to_string();
        for part in ["--fault kernel:x", "is gone", "norm.cu", "    no such\n    text", "\n  do: "] {
            assert!(gone.contains(part), "{part}: {gone}");
        }
        assert!(of(Edit { from: "THREADS", ..EDIT }).to_string().contains("times"));
        let other = of(Edit { file: "product_f32.cu", ..EDIT }).to_string();
        assert!(other.contains("in bf16") && other.contains("--dtype f32"), "{other}");
        let f32 = Library::built_in_for(DType::F32).unwrap();
        assert!(f32.edited(&Edit { file: "fused.cu", ..EDIT }).is_err());
    }
}
