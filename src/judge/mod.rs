/*!
The judge: rounding or fault, with its power stated.

A tensor is judged in isolation: its stage is recomputed in float64 from the engine's own input bits, with the casts of
the engine's contract emulated ([`compare`]). Then nearly every bit is predicted. What is left must fit a proven bound,
element by element ([`bound`]), and must look like rounding below it: few elements may be another value than the
rounded reference, and none of the ways in which an output can be off by a factor may show ([`evidence`], [`stats`]).
All tests of a run share one budget; where nothing is found, the smallest fault that would have been found decides
between `rounding` and `inconclusive` ([`conclude`]). Where something is found, the judge looks closer ([`closer`]):
does another contract or convention explain it ([`menu`]), and where is it ([`localise`]).
Where nobody declares a contract, the one that explains the bits is searched for ([`search`]).
Where a Trace holds some tensors only, stages between two that are there are judged together ([`chain`]).
Keys that a sparse indexer chose are judged as sets, by what rounding may do to their logits ([`selection`]).
What one element is made of is asked while its tensor is judged ([`Ask`]).
*/

mod ask;
pub mod bound;
pub mod cause;
pub mod chain;
pub mod closer;
pub mod compare;
pub mod conclude;
pub mod cumulative;
pub mod evidence;
pub mod gates;
mod geometry;
pub mod localise;
pub mod memory;
pub mod menu;
pub mod picture;
pub mod predict;
pub mod reduce;
pub mod route;
pub mod sample;
pub mod search;
pub mod selection;
mod session;
pub mod sketch;
pub mod stats;
mod tally;
mod unit;
mod verdict;
pub mod watch;
mod weights;

pub use ask::{Answer, Ask, Asked, Standing};
pub use cause::{Cause, Diagnosis};
pub use conclude::{Budget, Power};
pub use evidence::Test;
pub use geometry::{ScalarDifference, compare_scalars};
pub use search::FoundContract;
pub use session::{OPEN, Recorder, Session, Settings, expected, starts};
pub use tally::{Digest, Element, Tally, checksum_weight, differing, within};
pub use unit::{Explained, Unit, Which, Worst, origins, overall, sort, unravel};
pub use verdict::{Row, Status, TABLE, Verdict};
