//! What apiservers say about themselves: discovery documents, and the APIService objects that tell what is built in.

pub mod api_services;
pub mod document;
