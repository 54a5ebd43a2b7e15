/*!
The menu: other contracts that might explain a tensor which the declared one does not.

A kernel whose tiles are 32 keys long and that is declared with 64 is not wrong, but its declaration is. Where evidence
is found, each entry that touches the tensor's stage is tried in its place, and accepted only if under it the tensor
passes as a clean one would. The number tried is reported: a menu as long as one likes could explain anything.
Source: the groundwork on comparing kernels, section 3.4.
*/

use mla_numeric::DType;
use mla_reference::{Contract, Form, Operands, RopeAngle, RowSum, Stage, TileOrder};

/// Contracts to try for a stage, with what is different, the likeliest first.
pub fn entries(contract: &Contract, stage: Stage, form: Option<Form>) -> Vec<(String, Contract)> {
    let mut all: Vec<(String, Contract)> = Vec::new();
    let mut add = |name: String, change: &dyn Fn(&mut Contract)| {
        let mut c = *contract;
        change(&mut c);
        if c != *contract && all.iter().all(|(_, other)| *other != c) {
            all.push((name, c));
        }
    };
    match stage {
        Stage::PartO | Stage::PartLse | Stage::OLatent | Stage::Lse | Stage::AttnOut
            if stage != Stage::AttnOut || form == Some(Form::Fused) =>
        {
            // Scores that are rounded too, the rest as declared or as unknown as it is.
            for (raw, scaled, what) in [
                (true, false, "q·k cast"),
                (false, true, "scores cast after their scale"),
                (true, true, "q·k and scores cast"),
            ] {
                add(what.into(), &|c| (c.softmax.cast_raw, c.softmax.cast_scaled) = (raw, scaled));
            }
            // Where the place of P's cast is unknown, it is known in each entry.
            let known = |c: &mut Contract| c.softmax.emulate = true;
            for tile in [64, 32, 128, 16, 80] {
                for order in [TileOrder::Forward, TileOrder::Reverse] {
                    let way = if order == TileOrder::Forward { "first to last" } else { "last to first" };
                    add(format!("tiles of {tile} keys, {way}"), &|c| {
                        known(c);
                        c.softmax.tile = tile;
                        c.softmax.order = order;
                    });
                }
            }
            add("row sum of cast P".into(), &|c| {
                known(c);
                c.softmax.row_sum = RowSum::Rounded;
            });
            add("row sum of f32 P".into(), &|c| {
                known(c);
                c.softmax.row_sum = RowSum::Unrounded;
            });
            add("P not cast".into(), &|c| {
                known(c);
                c.softmax.p = None;
            });
            for p in [DType::Bf16, DType::F16] {
                add(format!("P cast to {p}"), &|c| {
                    known(c);
                    c.softmax.p = Some(p);
                });
            }
        }
        Stage::AttnIn | Stage::QANormed | Stage::KvCNormed => {
            for cast in [None, Some(DType::Bf16), Some(DType::F16)] {
                let name =
                    cast.map_or("one rounding".to_string(), |d| format!("cast to {d} before the weight"));
                add(name, &|c| c.norm_cast = cast);
            }
        }
        Stage::Q | Stage::KPe => {
            for table in [DType::F32, DType::Bf16, DType::F16] {
                add(format!("rope table in {table}"), &|c| c.rope_table = table);
            }
        }
        _ => {}
    }
    all
}

/// All ways to do an elementwise stage: norms by their cast, rotations by table, angles and casts of products.
pub fn ways(contract: &Contract, stage: Stage) -> Vec<(String, Contract)> {
    let narrow = [DType::Bf16, DType::F16].into_iter().filter(|d| *d == contract.activations);
    let casts: Vec<Option<DType>> = std::iter::once(None).chain(narrow.map(Some)).collect();
    match stage {
        Stage::AttnIn | Stage::QANormed | Stage::KvCNormed => {
            let name = |c: &Option<DType>| {
                c.map_or("norm with one rounding".to_string(), |d| {
                    format!("norm cast to {d} before its weight")
                })
            };
            casts.iter().map(|cast| (name(cast), Contract { norm_cast: *cast, ..*contract })).collect()
        }
        Stage::Q | Stage::KPe => {
            let mut all = Vec::new();
            for rope_table in [DType::F32, contract.activations] {
                for rope_angle in [RopeAngle::Exact, RopeAngle::F32] {
                    for rope_products in &casts {
                        let angles = if rope_angle == RopeAngle::F32 { " of f32 angles" } else { "" };
                        let products =
                            rope_products.map_or(String::new(), |d| format!(", products cast to {d}"));
                        let name = format!("rope table {rope_table}{angles}{products}");
                        let c =
                            Contract { rope_table, rope_angle, rope_products: *rope_products, ..*contract };
                        all.push((name, c));
                    }
                }
            }
            all
        }
        // Of float32 activations: other software multiplies them in a narrower form.
        _ if contract.activations == DType::F32 => {
            let name = |o: Operands| format!("left side of the product in {o}");
            let all = Operands::OTHERS.into_iter();
            all.map(|operands| (name(operands), Contract { operands, ..*contract })).collect()
        }
        _ => Vec::new(),
    }
}

/// The name of what the engine declares, where another contract is judged: the fields in which it differs.
pub fn declared(judged: &Contract, declared: &Contract) -> String {
    let all = declared.differences(judged).into_iter();
    let fields: Vec<String> = all.map(|d| format!("{} {} (not {})", d.field, d.left, d.right)).collect();
    format!("what the engine declares: {}", fields.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_differ_from_the_declared_contract_and_from_each_other() {
        let c = Contract::exact();
        for stage in Stage::ALL {
            let all = entries(&c, *stage, Some(Form::Fused));
            for (i, (_, a)) in all.iter().enumerate() {
                assert!(*a != c && all[..i].iter().all(|(_, b)| b != a));
            }
        }
        assert!(entries(&c, Stage::Lse, Some(Form::Fused)).len() > 10);
        assert!(entries(&c, Stage::AttnOut, Some(Form::Absorbed)).is_empty());
        assert!(entries(&c, Stage::QA, None).is_empty());
    }
}
