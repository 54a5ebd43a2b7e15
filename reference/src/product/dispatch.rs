//! One set of inner loops per instruction set, chosen at run time.

use super::kernel::{self, Row};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// An instruction set that this machine has: only [`Isa::available`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Isa(Level);

/// Rows of a block are a multiple of this: of every tile height below.
pub(super) const UNIT: usize = 24;

macro_rules! isa {
    ($module:ident, $($feature:literal)?, $wr:literal x $wl:literal, $nr:literal x $nl:literal, $col:literal) => {
        mod $module {
            use super::*;

            pub const LANES: (usize, usize) = ($wl, $nl);

            /// Adds the products of `w`'s rows with a panel of `lanes` tokens to `out`, `[row][lane]`. Rows that
            /// do not fill a tile are skipped, or, one wide panel's, taken one by one.
            $(#[target_feature(enable = $feature)])?
            pub fn tiles(lanes: usize, w: &[Row], x: &[f64], out: &mut [f64]) {
                match lanes {
                    $wl => {
                        let (x, out) = (x.as_chunks::<$wl>().0, out.as_chunks_mut::<$wl>().0);
                        let ((w, w1), (out, out1)) = (w.as_chunks::<$wr>(), out.as_chunks_mut::<$wr>());
                        for (w, out) in w.iter().zip(out) {
                            kernel::tile::<$wr, $wl>(w, x, out);
                        }
                        for (w, out) in w1.as_chunks().0.iter().zip(out1.as_chunks_mut().0) {
                            kernel::tile::<1, $wl>(w, x, out);
                        }
                    }
                    $nl => {
                        let (x, out) = (x.as_chunks::<$nl>().0, out.as_chunks_mut::<$nl>().0);
                        for (w, out) in w.as_chunks::<$nr>().0.iter().zip(out.as_chunks_mut::<$nr>().0) {
                            kernel::tile::<$nr, $nl>(w, x, out);
                        }
                    }
                    _ => {
                        for (w, out) in w.as_chunks::<$col>().0.iter().zip(out.as_chunks_mut::<$col>().0) {
                            kernel::column::<$col>(w, x, out);
                        }
                    }
                }
            }

            $(#[target_feature(enable = $feature)])?
            pub fn sumsq(w: &[f64]) -> f64 {
                kernel::sumsq(w)
            }
        }
    };
}

isa!(portable, , 4 x 8, 4 x 4, 8);
#[cfg(target_arch = "x86_64")]
isa!(avx2, "avx2,fma,f16c", 6 x 8, 12 x 4, 24);
#[cfg(target_arch = "x86_64")]
isa!(avx512, "avx2,fma,f16c,avx512f,avx512vl", 12 x 16, 24 x 8, 24);

macro_rules! call {
    ($isa:expr, $name:ident ( $($arg:expr),* )) => {
        match $isa.0 {
            Level::Portable => portable::$name($($arg),*),
            // SAFETY: an `Isa` comes from `Isa::available`, which has asked the processor.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { avx2::$name($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { avx512::$name($($arg),*) },
        }
    };
}

impl Isa {
    /// What this machine runs, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let more = [
            crate::isa::has_avx2().then_some(Isa(Level::Avx2)),
            crate::isa::has_avx512().then_some(Isa(Level::Avx512)),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let more: [Option<Isa>; 0] = [];
        std::iter::once(Isa(Level::Portable)).chain(more.into_iter().flatten())
    }

    pub fn best() -> Isa {
        Isa::available().last().unwrap_or(Isa(Level::Portable))
    }

    /// Tokens in a full panel, and in the narrow last one.
    pub fn lanes(self) -> (usize, usize) {
        match self.0 {
            Level::Portable => portable::LANES,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::LANES,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::LANES,
        }
    }

    /// `out[row][lane] += Σ_k w[row].0[k] x[k][lane]`, `x` a panel of `lanes` tokens (wide, narrow or 1).
    pub fn tiles(self, lanes: usize, w: &[Row], x: &[f64], out: &mut [f64]) {
        call!(self, tiles(lanes, w, x, out))
    }

    /// Σ w², in a fixed order.
    pub fn sumsq(self, w: &[f64]) -> f64 {
        call!(self, sumsq(w))
    }
}
