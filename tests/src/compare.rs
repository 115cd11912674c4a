//! When two runs of one prompt gave equal states.

use tether_dump::Dtype;

use crate::dumps::Dump;

/// How far apart two sets of rows are.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// Norm of the difference over the norm of the expected values.
    pub relative: f64,
    /// Largest difference of an element over the largest magnitude in its expected row.
    pub element: f64,
}

/// The deviation of `found` from `expected`, both `[rows, width]` row-major.
///
/// # Panics
/// If they differ in size, or if any value is not finite.
#[track_caller]
pub fn deviation(found: &[f32], expected: &[f32], width: usize) -> Deviation {
    assert_eq!(found.len(), expected.len(), "different numbers of values");
    assert!(found.iter().chain(expected).all(|value| value.is_finite()), "a value is not finite");
    let (mut difference, mut norm, mut element) = (0f64, 0f64, 0f64);
    for (found, expected) in found.chunks_exact(width).zip(expected.chunks_exact(width)) {
        let largest = expected.iter().fold(0f64, |m, value| m.max(f64::from(value.abs())));
        for (found, expected) in found.iter().zip(expected) {
            let apart = (f64::from(*found) - f64::from(*expected)).abs();
            difference += apart * apart;
            norm += f64::from(*expected) * f64::from(*expected);
            element = element.max(apart / largest.max(f64::MIN_POSITIVE));
        }
    }
    Deviation { relative: (difference / norm.max(f64::MIN_POSITIVE)).sqrt(), element }
}

/// Checks that two dumps hold the states of the same prompt: the same token IDs and points, and every plane equal
/// within the contract's bound for float32.
///
/// # Panics
/// If not; says at which plane.
#[track_caller]
pub fn assert_same_states(found: &Dump, expected: &Dump) {
    assert_eq!(found.token_ids, expected.token_ids, "other token IDs");
    assert_eq!(found.metadata.points, expected.metadata.points, "other points");
    assert_eq!(found.metadata.dtype, Dtype::Float32, "the bound below is that of float32");
    for &point in &expected.metadata.points {
        let apart = deviation(found.plane(point), expected.plane(point), expected.hidden_size);
        assert!(
            apart.relative <= 1e-4 && apart.element <= 1e-3,
            "{point} of {} ({} tokens) differs: {apart:?}",
            found.metadata.request_id,
            found.token_ids.len()
        );
    }
}
