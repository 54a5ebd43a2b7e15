/*!
What a device reaches, measured on it in the same run: a copy of its own memory, and cuBLAS's product of large matrices.
*/

use super::work::Ceilings;
use crate::device::cuda::{Blas, Cuda};
use crate::device::{Device, Error, Pattern};

/// Bytes that are copied: many times what any cache holds.
pub const COPIED: u64 = 2 << 30;
/// Rows and columns of the matrices.
const ROWS: u32 = 8192;
/// Measurements, of which the median counts, and what runs before them.
const REPEATS: usize = 11;
const BEFORE: usize = 3;

/// Both. What refuses the product is said and no error: shares of it are left out then.
///
/// # Errors
/// Those of the device.
pub fn measure(device: &mut Cuda) -> Result<Ceilings, Error> {
    let free = device.free_memory()?;
    let copy_bytes_a_second = copy(device, COPIED.min(free / 4) / 4 * 4)?;
    let (product_operations_a_second, product_by) = match product(device) {
        Ok((speed, by)) => (Some(speed), by),
        Err(why) => (None, why),
    };
    Ok(Ceilings { copy_bytes_a_second, product_operations_a_second, product_by })
}

/// Bytes read and written a second by a copy of so many from one buffer to another.
///
/// # Errors
/// Those of the device.
pub fn copy<D: Device>(device: &mut D, bytes: u64) -> Result<f64, Error> {
    let from = device.allocate(bytes, "memory that is copied")?;
    let to = device.allocate(bytes, "a copy")?;
    device.fill(from, Pattern::Bits32(0x3f80_4000))?;
    let seconds = median(device, &mut |device| device.copy(from, to, bytes), &mut |device| {
        device.fill(to, Pattern::Bits8(0))
    })?;
    device.free(from)?;
    device.free(to)?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// Operations a second of a product in bf16, and what computed it. Operands are random: a GPU is faster at zeros.
fn product(device: &mut Cuda) -> Result<(f64, String), String> {
    let told = |e: Error| e.to_string();
    let blas = Blas::open(device)?;
    let n = u64::from(ROWS);
    let mut buffers = Vec::new();
    for what in ["left operand", "right operand", "product"] {
        buffers.push(device.allocate(2 * n * n, what).map_err(told)?);
    }
    let values = values((n * n) as usize);
    device.write(buffers[0], 0, &values).map_err(told)?;
    device.write(buffers[1], 0, &values).map_err(told)?;
    let operands = [buffers[0], buffers[1], buffers[2]];
    let seconds = median(device, &mut |device| blas.multiply(device, operands, ROWS), &mut |device| {
        device.fill(operands[2], Pattern::Bits8(0))
    });
    let seconds = seconds.map_err(told)?;
    device.synchronise().map_err(told)?;
    drop(values);
    for buffer in buffers {
        device.free(buffer).map_err(told)?;
    }
    Ok((2.0 * (n as f64).powi(3) / seconds, blas.describe()))
}

/// Values between -1 and 1 in bf16, from a generator of the 16 bits that matter.
fn values(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        ((unit.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..count).flat_map(|_| next()).collect()
}

/// Median of the seconds of a call, with other work queued before it.
fn median<D: Device>(
    device: &mut D,
    call: &mut dyn FnMut(&mut D) -> Result<(), Error>,
    before: &mut dyn FnMut(&mut D) -> Result<(), Error>,
) -> Result<f64, Error> {
    let mut all = Vec::new();
    for i in 0..BEFORE + REPEATS {
        device.synchronise()?;
        before(device)?;
        let from = device.mark()?;
        call(device)?;
        let to = device.mark()?;
        let ms = device.elapsed(from, to)?;
        if i >= BEFORE {
            all.push(ms * 1e-3);
        }
    }
    all.sort_by(f64::total_cmp);
    Ok(all[REPEATS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_spread_over_both_signs() {
        let values: Vec<f32> = values(10_000)
            .chunks(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect();
        let mean = values.iter().sum::<f32>() / 1e4;
        assert!(values.iter().all(|v| v.abs() <= 1.0) && mean.abs() < 0.03, "{mean}");
        assert!(values.iter().filter(|v| v.abs() > 0.5).count() > 4500);
    }
}
