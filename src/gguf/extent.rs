/*!
Where tensors' data lies: sizes, ends, holes, overlaps.

A file that ends where data should go on is *cut*: an error of the file, since nobody knows what else is missing. It
is told from a row with a wrong offset or size by what the others say: in a cut file the data that passes the end is
what comes next (no hole before it, nothing whole behind it). Any other impossible extent is the damage of one tensor,
and an overlap that of two, since which of them lies is not known. Damaged rows take no part in what follows.
*/

use super::cursor::Cursor;
use super::error::{GgufError, Notice, Place, Problem, Warning};
use super::table::{Damaged, TensorInfo, TensorType};

/// Bytes of a tensor of these dimensions.
pub(super) fn size(dims: &[u64], ty: TensorType) -> Result<Option<u64>, Problem> {
    let overflow = || Problem::SizeOverflow { dims: dims.to_vec(), ty: ty.to_string() };
    let product = |zeros: bool| {
        let dims = dims.iter().filter(|&&d| zeros || d != 0);
        dims.copied().try_fold(1u64, u64::checked_mul).filter(|&n| i64::try_from(n).is_ok())
    };
    // Zeros are left out, so that they cannot hide dimensions whose product would wrap.
    product(false).ok_or_else(overflow)?;
    let TensorType::Known(ty) = ty else { return Ok(None) };
    let row = dims.first().copied().unwrap_or(1);
    let block = ty.block_elements();
    if !row.is_multiple_of(block as u64) {
        return Err(Problem::Row { row, ty: ty.name(), block });
    }
    let blocks = product(true).ok_or_else(overflow)? / block as u64;
    blocks
        .checked_mul(ty.block_bytes() as u64)
        .filter(|&n| i64::try_from(n).is_ok())
        .ok_or_else(overflow)
        .map(Some)
}

/// Makes the offsets absolute and checks where the data lies.
pub(super) fn place(
    rows: &mut [TensorInfo],
    cursor: &Cursor<'_>,
    data: &[u8],
    alignment: u64,
    damaged: &mut Damaged,
    warnings: &mut Vec<Warning>,
) -> Result<(), GgufError> {
    if rows.is_empty() {
        return Ok(());
    }
    let file = data.len() as u64;
    let table = cursor.offset();
    // At most file length + 2^32: no overflow.
    let start = table.next_multiple_of(alignment);
    let padding = data.get(table as usize..).unwrap_or(&[]);
    if padding.iter().take((start - table) as usize).any(|&b| b != 0) {
        warnings.push(Warning { notice: Notice::Padding, place: cursor.place(table) });
    }
    for row in rows.iter_mut() {
        row.offset = start.saturating_add(row.offset);
    }
    past_the_end(rows, cursor, start, file, alignment, damaged)?;
    overlaps(rows, cursor, damaged);
    for row in rows.iter_mut() {
        if let Some(error) = damaged.get(&row.name) {
            row.size = None;
            let notice = Notice::Damaged { what: error.problem().to_string() };
            warnings.push(Warning { notice, place: error.place().clone() });
        }
    }
    if damaged.is_empty() {
        layout(rows, cursor, start, file, alignment, warnings);
    }
    Ok(())
}

/// Of a tensor without bytes nothing, of an unknown type only the first byte is known.
fn extent(t: &TensorInfo) -> u64 {
    t.size.unwrap_or(1)
}

fn end(t: &TensorInfo) -> u64 {
    t.offset.saturating_add(extent(t))
}

/// The rows without damage, by offset.
fn in_order<'a>(rows: &'a [TensorInfo], damaged: &Damaged) -> Vec<&'a TensorInfo> {
    let mut order: Vec<&TensorInfo> =
        rows.iter().filter(|t| extent(t) > 0 && !damaged.contains_key(&t.name)).collect();
    order.sort_by_key(|t| t.offset);
    order
}

/// Data behind the end of the file: of a cut file an error, else the damage of each such tensor.
fn past_the_end(
    rows: &[TensorInfo],
    cursor: &Cursor<'_>,
    start: u64,
    file: u64,
    alignment: u64,
    damaged: &mut Damaged,
) -> Result<(), GgufError> {
    let (whole, past): (Vec<_>, Vec<_>) = in_order(rows, damaged).into_iter().partition(|t| end(t) <= file);
    let error = |t: &TensorInfo| {
        let needed = t.size.unwrap_or(0);
        let missing = t.offset.saturating_add(needed).saturating_sub(file).max(1);
        GgufError::new(Problem::DataTruncated { needed, missing }, at(cursor, t))
    };
    if let Some(&first) = past.first() {
        let before = whole.last();
        let behind = before.map_or(start, |t| end(t).next_multiple_of(alignment));
        // How far the data of an unknown or damaged row reaches is not known: it may fill the hole.
        let filled = before.is_some_and(|t| t.size.is_none()) || !damaged.is_empty();
        if before.is_none_or(|t| t.offset <= first.offset) && (first.offset <= behind || filled) {
            return Err(error(first));
        }
    }
    damaged.extend(past.into_iter().map(|t| (t.name.clone(), error(t))));
    Ok(())
}

fn overlaps(rows: &[TensorInfo], cursor: &Cursor<'_>, damaged: &mut Damaged) {
    let mut found = Vec::new();
    let mut furthest: Option<&TensorInfo> = None;
    for t in in_order(rows, damaged) {
        if let Some(before) = furthest.filter(|b| t.offset < end(b)) {
            found.extend([(t, before), (before, t)]);
        }
        if furthest.is_none_or(|b| end(b) <= end(t)) {
            furthest = Some(t);
        }
    }
    for (t, other) in found {
        let problem = Problem::Overlap { other: other.name.clone() };
        damaged.entry(t.name.clone()).or_insert_with(|| GgufError::new(problem, at(cursor, t)));
    }
}

/// What is odd about a layout without damage.
fn layout(
    rows: &[TensorInfo],
    cursor: &Cursor<'_>,
    start: u64,
    file: u64,
    alignment: u64,
    warnings: &mut Vec<Warning>,
) {
    let mut order: Vec<&TensorInfo> = rows.iter().filter(|t| extent(t) > 0).collect();
    if let Some(pair) = order.windows(2).find(|w| w[0].offset > w[1].offset) {
        warnings.push(Warning { notice: Notice::Order, place: at(cursor, pair[1]) });
        order.sort_by_key(|t| t.offset);
    }
    let mut before: Option<&TensorInfo> = None;
    let mut behind = start;
    for t in order {
        let hole = t.offset.saturating_sub(behind.next_multiple_of(alignment));
        if hole > 0 && before.is_none_or(|b| b.size.is_some()) {
            warnings.push(Warning { notice: Notice::Hole { bytes: hole }, place: at(cursor, t) });
        }
        behind = end(t);
        before = Some(t);
    }
    let bytes = file.saturating_sub(behind.next_multiple_of(alignment));
    if bytes > 0 && before.is_none_or(|b| b.size.is_some()) {
        warnings.push(Warning { notice: Notice::TrailingBytes { bytes }, place: cursor.place(file - bytes) });
    }
}

fn at(cursor: &Cursor<'_>, tensor: &TensorInfo) -> Place {
    cursor.place(tensor.offset).tensor(&tensor.name)
}
