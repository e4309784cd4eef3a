//! Discovery documents: what an apiserver says about itself.

pub mod document;
