//! What apiservers tell about themselves: discovery documents and APIService objects; and what is told to clients
//! instead, for all apiservers together.

pub mod api_services;
pub mod document;
pub mod json;
pub mod legacy;
pub mod merge;
pub mod negotiate;
pub mod open_api;
mod order;
