/*! The weights of a layer as an honest engine holds them: on the grid of a dtype. */

use mla_numeric::DType;
use mla_reference::product::Rows;
use mla_reference::rows::Rounded;
use mla_reference::{Weight, Weights};

/// Matrices rounded to a dtype, decoded on demand. It has no norms.
pub struct Grid<'a>(Vec<(Weight, Rounded<&'a dyn Rows>)>);

impl<'a> Grid<'a> {
    /// Of these roles, as far as the layer has them.
    pub fn new(weights: &'a dyn Weights, dtype: DType, roles: &[Weight]) -> Grid<'a> {
        Grid(roles.iter().filter_map(|w| Some((*w, Rounded { inner: weights.matrix(*w)?, dtype }))).collect())
    }
}

impl Weights for Grid<'_> {
    fn matrix(&self, weight: Weight) -> Option<&dyn Rows> {
        self.0.iter().find(|(w, _)| *w == weight).map(|(_, m)| m as &dyn Rows)
    }
    fn norm(&self, _: Weight) -> Option<&[f64]> {
        None
    }
}
