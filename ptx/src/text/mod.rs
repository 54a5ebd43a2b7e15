/*! PTX text to a tree: [`lex`] cuts words, [`parse`] builds the statements of [`ast`]. Nothing is interpreted here. */

pub mod ast;
pub mod lex;
pub mod parse;
