//! What a dump holds: capture points, the final state, rows, dtype, and their names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A place in the forward pass whose hidden states (`[num_tokens, hidden]`) can be kept. The order is that of the
/// forward pass, which is the order of the planes in a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CapturePoint {
    /// `R[i]`: the residual stream entering decoder layer `i`; `i == num_layers` is what leaves the last one.
    Residual(u16),
    /// `N`: the output of the final norm, the rows the output head reads.
    FinalNorm,
}

/// A name that is none of the accepted ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{text}`: expected {expected}")]
pub struct UnknownName {
    what: &'static str,
    text: String,
    expected: &'static str,
}

impl fmt::Display for CapturePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Residual(layer) => write!(f, "R{layer}"),
            Self::FinalNorm => f.write_str("N"),
        }
    }
}

impl FromStr for CapturePoint {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let point = match text.strip_prefix('R') {
            // One spelling per point: no sign, no leading zero.
            Some(layer) => layer.parse().ok().filter(|n: &u16| n.to_string() == layer).map(Self::Residual),
            None => (text == "N").then_some(Self::FinalNorm),
        };
        point.ok_or_else(|| UnknownName {
            what: "capture point",
            text: text.to_owned(),
            expected: "`R<layer>` or `N`",
        })
    }
}

/// An enum whose values have one spelling each, in JSON, on the command line and in a dump's metadata.
macro_rules! named {
    ($(#[$meta:meta])* $name:ident, $what:literal, $expected:literal { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// The one spelling.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(UnknownName { what: $what, text: text.to_owned(), expected: $expected }),
                }
            }
        }
    };
}

named! {
    /// Which form of the last layer's output a dump ends with.
    FinalState, "final state", "`pre_norm`, `post_norm`, `both` or `none`" {
        /// `R[n]`, before the final norm: what vLLM's connector stores and speculators reads.
        PreNorm = "pre_norm",
        /// `N`, after the final norm: what SpecForge, ModelOpt and AngelSlim read.
        PostNorm = "post_norm",
        /// `R[n]` then `N`.
        Both = "both",
        /// Neither, unless `R[n]` was listed as a point.
        None = "none",
    }
}

named! {
    /// Which token positions a dump covers.
    Rows, "rows", "`prompt` or `all`" {
        /// The prompt's.
        Prompt = "prompt",
        /// The prompt's and the generated tokens' less the last, which never entered the model.
        All = "all",
    }
}

named! {
    /// The number format of the stored hidden states.
    Dtype, "dtype", "`float32`, `bfloat16` or `float16`" {
        /// IEEE 754 single precision.
        Float32 = "float32",
        /// The upper half of single precision.
        BFloat16 = "bfloat16",
        /// IEEE 754 half precision.
        Float16 = "float16",
    }
}

named! {
    /// The form of a dump on disk. Readers take either; a writer is told which.
    DumpLayout, "dump layout", "`file` or `directory`" {
        /// One safetensors file, `<request_id>.safetensors`.
        File = "file",
        /// The folder `req_<request_id>/` of PyTorch files, for clients that scan a directory.
        Directory = "directory",
    }
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 | Self::Float16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Self::Float32 => "F32",
            Self::BFloat16 => "BF16",
            Self::Float16 => "F16",
        }
    }

    /// Whether every element of `bytes` (little-endian) is finite. `false` names no element; see
    /// [`Dtype::first_non_finite`].
    pub fn all_finite(self, bytes: &[u8]) -> bool {
        self.first_non_finite(bytes).is_none()
    }

    /// Index of the first NaN or infinity among the elements of `bytes`, which are little-endian.
    pub fn first_non_finite(self, bytes: &[u8]) -> Option<usize> {
        // A float is finite unless all bits of its exponent are set. Whole chunks are folded without a branch, so
        // that the common case, nothing found, runs at memory speed.
        fn find<const SIZE: usize>(bytes: &[u8], bad: impl Fn([u8; SIZE]) -> bool + Copy) -> Option<usize> {
            const CHUNK: usize = 4096;
            let element = |e: &[u8]| bad(e.try_into().expect("chunks_exact gives SIZE bytes"));
            bytes.chunks(CHUNK * SIZE).enumerate().find_map(|(index, chunk)| {
                let any = chunk.chunks_exact(SIZE).fold(false, |found, e| found | element(e));
                any.then(|| chunk.chunks_exact(SIZE).position(element).map(|at| index * CHUNK + at)).flatten()
            })
        }
        match self {
            Self::Float32 => find(bytes, |e: [u8; 4]| u32::from_le_bytes(e) & 0x7f80_0000 == 0x7f80_0000),
            Self::BFloat16 => find(bytes, |e: [u8; 2]| u16::from_le_bytes(e) & 0x7f80 == 0x7f80),
            Self::Float16 => find(bytes, |e: [u8; 2]| u16::from_le_bytes(e) & 0x7c00 == 0x7c00),
        }
    }
}

/// Serde through the one spelling.
macro_rules! serde_as_text {
    ($($name:ident),+) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

serde_as_text!(CapturePoint, FinalState, Rows, Dtype);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn points_sort_as_the_forward_pass_meets_them() {
        let mut points = [CapturePoint::FinalNorm, CapturePoint::Residual(61), CapturePoint::Residual(2)];
        points.sort();
        assert_eq!(points.iter().map(ToString::to_string).collect::<Vec<_>>(), ["R2", "R61", "N"]);
    }

    #[test]
    fn a_point_has_one_spelling() {
        assert_eq!("R58".parse(), Ok(CapturePoint::Residual(58)));
        assert_eq!("N".parse(), Ok(CapturePoint::FinalNorm));
        for bad in ["R", "R01", "R+1", "R-1", "R65536", "n", "r2", "2", ""] {
            let error = bad.parse::<CapturePoint>().unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains("`R<layer>` or `N`"), "{error}");
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "prenorm".parse::<FinalState>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown final state `prenorm`: expected `pre_norm`, `post_norm`, `both` or `none`"
        );
    }

    proptest! {
        #[test]
        fn the_first_bad_value_is_found(len in 1usize..10_000, at in any::<prop::sample::Index>(), nan in any::<bool>()) {
            let at = at.index(len);
            let mut values = vec![f32::MAX; len];
            prop_assert_eq!(Dtype::Float32.first_non_finite(&bytes_of(&values)), None);
            values[at] = if nan { f32::NAN } else { f32::NEG_INFINITY };
            prop_assert_eq!(Dtype::Float32.first_non_finite(&bytes_of(&values)), Some(at));
            let halves: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(v / 2.0).to_le_bytes()).collect();
            prop_assert_eq!(Dtype::BFloat16.first_non_finite(&halves), Some(at));
            let halves: Vec<u8> = values.iter().flat_map(|v| half::f16::from_f32(v / 1e36).to_le_bytes()).collect();
            prop_assert_eq!(Dtype::Float16.first_non_finite(&halves), Some(at));
        }
    }

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}
