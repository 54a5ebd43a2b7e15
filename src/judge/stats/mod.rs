/*!
Statistics below the elementwise bound: faults that are too small to break it, found by their direction.

A proven bound is ten to sixty times wider than what an honest engine does. These functions look below it.
They are pure: arrays in, numbers out, no tensor store, no verdict. A *row* is a (token, head) and is the
unit of independence, because all columns of a row share the errors of its softmax weights; a *row ulp* is
the output's spacing at the row's root mean square, because an element near zero has an arbitrarily small
spacing of its own. u = 2⁻²⁴.

- [`score`]: what the bits of an output say about a shift of the value before rounding;
- [`noise`]: σ, expected share of flips and row ulp of each kind of stage;
- [`direction`]: estimate of a hypothetical factor, its standard error, floor and p-value;
- [`flips`]: the test that needs no hypothesis: how many outputs are not the rounded reference;
- [`tail`]: normal and Student tails in logarithms;
- [`power`]: what would have been too small to see;
- [`holm`]: one level for all tests of a run.

Source: the groundwork on comparing kernels, sections 4 and 7; each formula names its section.
*/

pub mod direction;
pub mod flips;
pub mod holm;
pub mod noise;
pub mod power;
pub mod score;
pub mod tail;
