//! Series as text.

use prometheus::{Registry, TextEncoder};

/// The content type of [`text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All series of `registry` in Prometheus' text format.
///
/// # Errors
/// A series cannot be written, which would be a mistake where it is made.
pub fn text(registry: &Registry) -> prometheus::Result<String> {
    TextEncoder::new().encode_to_string(&registry.gather())
}
