//! X with the tokens of a panel side by side: `[K block][panel][k][lane]`.

use super::dispatch::Isa;
use super::kernel::KC;
use rayon::prelude::*;

pub(super) struct Packed {
    data: Aligned,
    /// First token, lanes, lanes of the panels before.
    panels: Vec<(usize, usize, usize)>,
    /// Lanes of all panels.
    pub width: usize,
    /// Tokens of a full panel.
    wide: usize,
}

impl Packed {
    pub fn new(isa: Isa, x: &[f64], tokens: usize, cols: usize) -> Packed {
        let (wide, narrow) = isa.lanes();
        let (mut panels, mut t, mut width) = (Vec::new(), 0, 0);
        while t < tokens {
            let lanes = match tokens - t {
                1 => 1,
                n if n <= narrow => narrow,
                _ => wide,
            };
            panels.push((t, lanes, width));
            t += lanes;
            width += lanes;
        }
        let mut data = Aligned::zeros(width * cols);
        data.get_mut().par_chunks_mut((width * KC).max(1)).enumerate().for_each(|(b, block)| {
            let kc = block.len() / width;
            let mut rest = block;
            for &(t0, lanes, _) in &panels {
                let (panel, tail) = rest.split_at_mut(kc * lanes);
                rest = tail;
                // Eight columns of all tokens at a time: whole cache lines of X.
                for (i, part) in panel.chunks_mut(8 * lanes).enumerate() {
                    for t in t0..(t0 + lanes).min(tokens) {
                        let row = &x[t * cols + b * KC + i * 8..];
                        for (to, v) in part[t - t0..].iter_mut().step_by(lanes).zip(row) {
                            *to = *v;
                        }
                    }
                }
            }
        });
        Packed { data, panels, width, wide }
    }

    /// The panels of columns `k0 .. k0 + kc`, their lanes, and the lanes before them.
    pub fn block(&self, k0: usize, kc: usize) -> impl Iterator<Item = (&[f64], usize, usize)> {
        let data = &self.data.get()[k0 * self.width..][..kc * self.width];
        self.panels.iter().map(move |&(_, lanes, before)| (&data[before * kc..][..lanes * kc], lanes, before))
    }

    /// First token, lanes, and lanes before, of the panel that holds token `t`.
    pub fn panel_of(&self, t: usize) -> (usize, usize, usize) {
        // All panels but the last are full.
        self.panels[t / self.wide]
    }
}

/// Zeros, the first of them on a cache line.
pub(super) struct Aligned {
    data: Vec<f64>,
    from: usize,
    len: usize,
}

impl Aligned {
    pub fn zeros(len: usize) -> Self {
        let data = vec![0.0; len + 7];
        // `align_offset` may decline; then only speed is lost.
        let from = data.as_ptr().align_offset(64).min(7);
        Aligned { data, from, len }
    }
    pub fn get(&self) -> &[f64] {
        &self.data[self.from..][..self.len]
    }
    pub fn get_mut(&mut self) -> &mut [f64] {
        &mut self.data[self.from..][..self.len]
    }
}
