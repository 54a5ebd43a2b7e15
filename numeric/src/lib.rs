//! Number formats and the tensor core.
