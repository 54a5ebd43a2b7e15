/*! From a word and what is written with it to a kind of fault. */

use super::Kind;
use super::words::{Make, Value, WORDS, Word};
use mla_reference::{Stage, Weight};

impl Word {
    fn name(&self) -> &'static str {
        self.form.split(['=', '@', '[']).next().unwrap_or(self.form)
    }

    /// The one with this name.
    pub fn find(name: &str) -> Option<&'static Word> {
        WORDS.iter().find(|w| w.name() == name)
    }

    /// The kind of fault and the tensor that it acts on; Err: what is wrong with the text.
    pub fn kind(&self, value: Option<&str>, at: Option<&str>) -> Result<(Kind, Option<Stage>), String> {
        let given = value.map_or("no value".to_string(), |v| format!("'{v}'"));
        let bad = || format!("{given} is not what {} takes", self.name());
        let value = Value(value);
        let stage = || {
            at.map(|t| Stage::from_name(t).ok_or_else(|| format!("'{t}' is not a tensor of the table")))
                .transpose()
        };
        let alone = || match at {
            None => Ok(()),
            Some(_) => Err(format!("{} takes no tensor", self.name())),
        };
        match &self.make {
            Make::Weight(make) => {
                let text = at.ok_or("a weight is missing")?;
                let weight = Weight::from_name(text).ok_or_else(|| format!("'{text}' is no weight"))?;
                Ok((Kind::Spoil(make(value).ok_or_else(bad)?, Some(weight)), None))
            }
            Make::Weights(make) => {
                alone().and_then(|()| Ok((Kind::Spoil(make(value).ok_or_else(bad)?, None), None)))
            }
            Make::Tensor(usual, make) => {
                Ok((Kind::Damage(make(value).ok_or_else(bad)?), Some(stage()?.unwrap_or(*usual))))
            }
            Make::Rope(make) => match stage()? {
                Some(s) if !matches!(s, Stage::Q | Stage::KPe) => Err("only q and k_pe are rotated".into()),
                s => Ok((Kind::Turned(make(value).ok_or_else(bad)?), s)),
            },
            Make::Positions(make) => {
                alone().and_then(|()| Ok((Kind::Counted(make(value).ok_or_else(bad)?), None)))
            }
            Make::Inside(make) => {
                alone().and_then(|()| Ok((Kind::Inside(make(value).ok_or_else(bad)?), None)))
            }
            Make::Stack(make) => alone().and_then(|()| Ok((Kind::CutAt(make(value).ok_or_else(bad)?), None))),
            Make::Norm(make) => match stage()? {
                Some(s @ (Stage::AttnIn | Stage::QANormed | Stage::KvCNormed)) => {
                    let slip = make(value).ok_or_else(bad)?;
                    Ok((Kind::Inside(super::words::seam(|seams| seams.norm = Some((s, slip)))), None))
                }
                _ => Err("a normed tensor is missing: attn_in, q_a_normed or kv_c_normed".into()),
            },
        }
    }
}
