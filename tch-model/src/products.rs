//! What matrix products are computed in.

use std::fmt;

use tch::{Device, Kind};

/// How products with bfloat16 weights are computed.
///
/// libtorch multiplies bfloat16 matrices on any CPU, but without the vector instructions for it that takes a fallback
/// that is many times slower than float32. Such a CPU keeps weights and residual stream in bfloat16 and computes
/// what lies between two points of the residual stream in float32, which is also closer to the exact result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// In the weights' own kind.
    Native,
    /// In float32, from weights widened block by block as they are used.
    Widened,
}

impl Products {
    /// What suits the device: widened on a CPU without fast bfloat16 products, native everywhere else.
    pub fn suited_to(device: Device, kind: Kind) -> Self {
        match kind == Kind::BFloat16 && device == Device::Cpu && !fast_bfloat16() {
            true => Self::Widened,
            false => Self::Native,
        }
    }

    /// The kind of activations between two points of the residual stream, which is in `kind`.
    pub(crate) fn activations(self, kind: Kind) -> Kind {
        match self {
            Self::Native => kind,
            Self::Widened => Kind::Float,
        }
    }
}

/// The instructions oneDNN needs before libtorch lets it multiply bfloat16 matrices.
fn fast_bfloat16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
    }
    #[cfg(target_arch = "aarch64")]
    {
        std::arch::is_aarch64_feature_detected!("bf16")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        false
    }
}

/// For a log line.
impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native products",
            Self::Widened => "products in float32, as this CPU has no fast bfloat16 ones",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bfloat16_on_a_cpu_is_ever_widened() {
        assert_eq!(Products::suited_to(Device::Cpu, Kind::Float), Products::Native);
        assert_eq!(Products::suited_to(Device::Cuda(0), Kind::BFloat16), Products::Native);
        let widened = Products::suited_to(Device::Cpu, Kind::BFloat16) == Products::Widened;
        assert_eq!(widened, !fast_bfloat16());
    }

    #[test]
    fn widened_activations_are_float32_and_native_ones_are_the_models() {
        assert_eq!(Products::Widened.activations(Kind::BFloat16), Kind::Float);
        assert_eq!(Products::Native.activations(Kind::BFloat16), Kind::BFloat16);
    }
}
