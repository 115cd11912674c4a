//! Request bodies: read whole under limits, decoded, and sent on with one value spliced in.

mod decode;
mod read;
mod spliced;

pub use self::decode::{DecodeError, Encoding, decode, encodings};
pub use self::read::{Budget, ReadError, Reserved, discard, read};
pub use self::spliced::{Edit, Spliced};
