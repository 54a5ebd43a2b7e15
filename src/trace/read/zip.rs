/*!
Zip archives as NumPy and PyTorch write them: stored or deflated entries, large files included.

Read are the directory at the end and the entries that it names; encryption, other compressions and archives in several
parts are refused. Format: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3.
*/

/// An entry of the directory.
#[derive(Clone, Debug)]
pub struct File {
    /// Name, with `/` between folders.
    pub name: String,
    method: u16,
    packed: u64,
    size: u64,
    crc: u32,
    at: u64,
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

fn part(b: &[u8], at: usize, len: usize) -> Option<&[u8]> {
    b.get(at..at.checked_add(len)?)
}

/// Where the directory starts and how many entries it has.
fn directory(b: &[u8]) -> Option<(usize, u64)> {
    // The record ends the file but for a comment of at most 65535 bytes.
    let lowest = b.len().saturating_sub(22 + 65535);
    let end = (lowest..=b.len().checked_sub(22)?).rev().find(|at| b[*at..].starts_with(b"PK\x05\x06"))?;
    let (count, start) = (u16_at(b, end + 10)?, u32_at(b, end + 16)?);
    let large = end.checked_sub(20).filter(|at| b[*at..].starts_with(b"PK\x06\x07"));
    if let (Some(locator), true) = (large, count == u16::MAX || start == u32::MAX) {
        let record = usize::try_from(u64_at(b, locator + 8)?).ok()?;
        if part(b, record, 4)? != b"PK\x06\x06" {
            return None;
        }
        return Some((usize::try_from(u64_at(b, record + 48)?).ok()?, u64_at(b, record + 32)?));
    }
    Some((start as usize, u64::from(count)))
}

/// The entries; else what is wrong.
pub fn list(b: &[u8]) -> Result<Vec<File>, String> {
    let (mut at, count) = directory(b).ok_or("it is no whole zip file: it has no directory at its end")?;
    let mut all = Vec::new();
    for _ in 0..count {
        let file = entry(b, &mut at).ok_or("its directory is damaged")?;
        if !file.name.ends_with('/') {
            all.push(file);
        }
    }
    Ok(all)
}

fn entry(b: &[u8], at: &mut usize) -> Option<File> {
    let head = part(b, *at, 46)?;
    if !head.starts_with(b"PK\x01\x02") {
        return None;
    }
    let lens = [28, 30, 32].map(|at| u16_at(head, at).map_or(0, usize::from));
    let name = part(b, *at + 46, lens[0])?;
    let mut extra = part(b, *at + 46 + lens[0], lens[1])?;
    let mut file = File {
        name: String::from_utf8_lossy(name).into_owned(),
        method: if u16_at(head, 8)? & 1 == 1 { u16::MAX } else { u16_at(head, 10)? },
        crc: u32_at(head, 16)?,
        packed: u64::from(u32_at(head, 20)?),
        size: u64::from(u32_at(head, 24)?),
        at: u64::from(u32_at(head, 42)?),
    };
    while let (Some(id), Some(len)) = (u16_at(extra, 0), u16_at(extra, 2)) {
        let body = part(extra, 4, usize::from(len))?;
        if id == 1 {
            // Sizes that do not fit in 32 bits stand here, in this order.
            let mut place = 0;
            for field in [&mut file.size, &mut file.packed, &mut file.at] {
                if *field == u64::from(u32::MAX) {
                    *field = u64_at(body, place)?;
                    place += 8;
                }
            }
        }
        extra = &extra[4 + usize::from(len)..];
    }
    *at += 46 + lens.iter().sum::<usize>();
    Some(file)
}

/// The bytes of an entry; else what is wrong. `checked`: whether its checksum must hold (PyTorch may leave it out).
pub fn read(b: &[u8], file: &File, checked: bool) -> Result<Vec<u8>, String> {
    let named = |what: &str| format!("entry {} {what}", file.name.escape_debug());
    let packed = packed(b, file).ok_or_else(|| named("lies outside of the file"))?;
    let size = usize::try_from(file.size).map_err(|_| named("is too large"))?;
    let bytes = match file.method {
        0 if packed.len() == size => packed.to_vec(),
        0 => return Err(named("has two sizes")),
        // Deflate's best is 1032 : 1, so a size beyond that is a lie, and no room is made for it.
        8 if size / 1032 <= packed.len() => miniz_oxide::inflate::decompress_to_vec_with_limit(packed, size)
            .map_err(|e| named(&format!("is damaged: {e}")))?,
        8 => return Err(named("claims to be larger than it can be")),
        u16::MAX => return Err(named("is encrypted")),
        m => return Err(named(&format!("is compressed by method {m}; stored and deflated ones are read"))),
    };
    if bytes.len() != size {
        return Err(named("is shorter than it says"));
    }
    if checked && crc32(&bytes) != file.crc {
        return Err(named("is damaged: its checksum does not hold"));
    }
    Ok(bytes)
}

/// The bytes of an entry as they stand in the archive.
fn packed<'a>(b: &'a [u8], file: &File) -> Option<&'a [u8]> {
    let at = usize::try_from(file.at).ok()?;
    let head = part(b, at, 30)?;
    if !head.starts_with(b"PK\x03\x04") {
        return None;
    }
    let (name, extra) = (usize::from(u16_at(head, 26)?), usize::from(u16_at(head, 28)?));
    part(b, at + 30 + name + extra, usize::try_from(file.packed).ok()?)
}

/// CRC-32 of ISO-HDLC, reflected.
fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|i| {
        (0..8).fold(i as u32, |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
    });
    !bytes.iter().fold(!0u32, |c, b| c >> 8 ^ table[((c ^ u32::from(*b)) & 255) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32/ISO-HDLC.
    #[test]
    fn checksum() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
