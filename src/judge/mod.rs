/*!
The judge: rounding or fault.

A tensor is judged in isolation: its stage is recomputed in float64 from the engine's own input bits, with
the casts of the engine's contract emulated. Then nearly every bit is predicted, and what is left must fit
a proven bound. This first version has one kind of evidence (an element beyond its bound, and whatever is
missing, misshapen or not finite); its `rounding` does not say how small a fault it would have seen.
*/

pub mod bound;
pub mod cumulative;
pub mod gates;
mod geometry;
mod session;
pub mod stats;
mod tally;
mod unit;
mod verdict;
pub mod watch;
mod weights;

pub use geometry::{ScalarDifference, compare_scalars};
pub use session::{Recorder, Session, expected, stored};
pub use tally::{Digest, Element, Tally, checksum_weight};
pub use unit::{Power, Unit, Which, Worst, origins, overall};
pub use verdict::{Row, TABLE, Verdict};
