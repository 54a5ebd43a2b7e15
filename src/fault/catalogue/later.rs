/*!
Faults that were written after the judge was done, and run once against it as it was: what they say of it is in docs/faults.md,
untouched. They stay in the catalogue, apart from those that the judge was built with.
*/

use super::{ABSORBED, FUSED, Row, TILES, row};
use mla_numeric::DType;

pub(super) const ROWS: &[Row] = &[
    row(
        ("later-head-of-q_latent", "F22"),
        "head-gain=0.995@q_latent",
        "one head of q in the latent space is 0.5 % too small",
        &["q_latent"],
        &["head 1 ×"],
    )
    .in_run(ABSORBED),
    row(
        ("later-rows-of-v", "F21"),
        "swap-rows=3,4@v",
        "the values of two keys are exchanged",
        &["v"],
        &["rows of other places"],
    )
    .in_run(FUSED),
    row(
        ("later-columns-of-k_pe", "F22"),
        "zero-columns=4@k_pe",
        "the last columns of k_pe are not computed",
        &["k_pe"],
        &["columns zero"],
    ),
    row(
        ("later-page-of-values", "F27"),
        "stale-page=1@v",
        "a page of values is another request's",
        &["v"],
        &["rows of other places"],
    )
    .in_run(FUSED),
    row(
        ("later-scale-in-f16", "F07"),
        "softmax-scale=0.997",
        "the softmax scale is 0.3 % too small, in f16",
        &["part_o", "part_lse"],
        &["softmax scale ×"],
    )
    .in_run(super::Setup { dtype: DType::F16, ..ABSORBED }),
    row(
        ("later-norm-of-q", "F08"),
        "norm=no-weight@q_a_normed",
        "the norm of q does not multiply with its weight",
        &["q_a_normed"],
        &["norm weight left out"],
    ),
    row(
        ("later-heads-of-w_o", "F02"),
        "weight-heads=1,3@w_o",
        "the output projection has two heads exchanged",
        &["w_o"],
        &["heads of w_o are in another order"],
    ),
    row(
        ("later-w_uv-requantised", "F01"),
        "requantised@w_uv",
        "v_b is quantised a second time, to q8_0",
        &["w_uv"],
        &["w_uv quantised again"],
    ),
    row(
        ("later-key-of-a-tile", "F22"),
        "drop-token=64",
        "the first key of the second tile is left out",
        &["lse", "attn_out"],
        &["key 64 left out", "key 64 of request"],
    )
    .in_run(TILES),
    row(
        ("later-k_pe-backwards", "F06"),
        "rope=backwards@k_pe",
        "k_pe is rotated by minus the angle",
        &["k_pe"],
        &["rope backwards"],
    ),
];
