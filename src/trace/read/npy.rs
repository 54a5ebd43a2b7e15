/*!
NumPy's .npy form: a magic, a version, a Python dictionary as text, then the elements.

Format: numpy.lib.format's documentation, versions 1.0 to 3.0.
*/

use super::{Array, Stored, elements};
use mla_numeric::DType;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Reads a whole file's bytes; else what is wrong with them.
pub fn parse(bytes: &[u8]) -> Result<Array, String> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it does not start as a .npy file does")?;
    let (header, data) = match rest {
        [1, _, a, b, rest @ ..] => cut(rest, usize::from(u16::from_le_bytes([*a, *b])))?,
        [2 | 3, _, a, b, c, d, rest @ ..] => cut(rest, u32::from_le_bytes([*a, *b, *c, *d]) as usize)?,
        [v, ..] => return Err(format!("version {v} of the .npy form is not known")),
        [] => return Err("it ends in its header".into()),
    };
    let header = std::str::from_utf8(header).map_err(|_| "its header is no text")?;
    let descr = field(header, "descr").ok_or("its header names no dtype")?;
    let stored = stored(descr.trim_matches(['\'', '"']))
        .ok_or_else(|| format!("dtype {} is not read", descr.escape_debug()))?;
    let fortran = field(header, "fortran_order") == Some("True");
    let shape = shape(header).ok_or("its header has no shape")?;
    let wanted = elements(&shape).and_then(|n| n.checked_mul(stored.bytes()));
    let wanted = wanted
        .filter(|n| *n <= data.len())
        .ok_or_else(|| format!("it ends too early: shape {shape:?} of {stored} in {} bytes", data.len()))?;
    let data = data[..wanted].to_vec();
    let (shape, data) =
        if fortran { (shape.clone(), row_major(&shape, &data, stored.bytes())) } else { (shape, data) };
    Array::new(stored, shape, data)
}

fn cut(bytes: &[u8], at: usize) -> Result<(&[u8], &[u8]), String> {
    bytes.split_at_checked(at).ok_or_else(|| "it ends in its header".into())
}

/// The text of a value of the dictionary, up to its comma.
fn field<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let after = ["'", "\""].iter().find_map(|q| header.split_once(&format!("{q}{key}{q}")))?.1;
    let value = after.trim_start().strip_prefix(':')?;
    Some(value.split([',', '}']).next()?.trim())
}

fn shape(header: &str) -> Option<Vec<usize>> {
    let after = ["'shape'", "\"shape\""].iter().find_map(|k| header.split_once(k))?.1;
    let inside = after.trim_start().strip_prefix(':')?.trim_start().strip_prefix('(')?.split_once(')')?.0;
    let numbers = inside.split(',').map(str::trim).filter(|n| !n.is_empty());
    numbers.map(|n| n.trim_end_matches('L').parse().ok()).collect()
}

fn stored(descr: &str) -> Option<Stored> {
    let (order, name) = descr.split_at_checked(1)?;
    let wide = name.get(1..).and_then(|n| n.parse::<usize>().ok());
    if order == ">" && wide != Some(1) {
        return None;
    }
    Some(match name {
        "f8" => Stored::Float(DType::F64),
        "f4" => Stored::Float(DType::F32),
        "f2" => Stored::Float(DType::F16),
        "i1" | "i2" | "i4" | "i8" => Stored::Int(wide?),
        "u1" | "u2" | "u4" | "u8" => Stored::UInt(wide?),
        "b1" => Stored::Bool,
        // ml_dtypes writes bfloat16 as two bytes of no known kind.
        "V2" => Stored::UInt(2),
        "V1" => Stored::UInt(1),
        _ => return None,
    })
}

/// Elements whose first axis is the fastest, in the order in which the last one is.
fn row_major(shape: &[usize], data: &[u8], n: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len());
    let mut index = vec![0usize; shape.len()];
    for _ in 0..data.len() / n {
        let at = index.iter().zip(shape).rev().fold(0, |at, (i, len)| at * len + i);
        out.extend_from_slice(&data[at * n..(at + 1) * n]);
        for (i, len) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < *len {
                break;
            }
            *i = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// numpy.save(f, numpy.array([[1, 2, 3], [4, 5, 6]], '<i4', order='F')) of NumPy 2.4, as its documentation has it.
    fn file(descr: &str, fortran: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n");
        let mut all = b"\x93NUMPY\x01\x00".to_vec();
        all.extend((header.len() as u16).to_le_bytes());
        all.extend(header.as_bytes());
        all.extend(data);
        all
    }

    #[test]
    fn orders_and_dtypes() {
        let ints = |v: &[i32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let c = parse(&file("<i4", "False", "(2, 3)", &ints(&[1, 2, 3, 4, 5, 6]))).unwrap();
        let f = parse(&file("<i4", "True", "(2, 3)", &ints(&[1, 4, 2, 5, 3, 6]))).unwrap();
        assert_eq!(c, f);
        assert_eq!((c.shape.as_slice(), c.integers().unwrap()), (&[2, 3][..], vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(parse(&file("|V2", "False", "(1,)", &[1, 2])).unwrap().stored, Stored::UInt(2));
        assert_eq!(parse(&file("<f8", "False", "()", &[0; 8])).unwrap().shape, Vec::<usize>::new());
        assert_eq!(parse(&file("|i1", "False", "(1,)", &[255])).unwrap().integers(), Some(vec![-1]));
    }

    #[test]
    fn what_is_not_read_is_named() {
        for (bytes, word) in [
            (b"PK".to_vec(), "start"),
            (b"\x93NUMPY\x09\x00".to_vec(), "version 9"),
            (file("|O", "False", "(1,)", &[]), "|O"),
            (file(">f4", "False", "(1,)", &[0; 4]), ">f4"),
            (file("<f4", "False", "(2,)", &[0; 4]), "too early"),
            (file("<f4", "False", "(4294967296, 4294967296, 4)", &[0; 4]), "too early"),
        ] {
            let e = parse(&bytes).unwrap_err();
            assert!(e.contains(word), "{e}");
        }
    }
}
