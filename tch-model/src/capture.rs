//! Which hidden states of a request are kept, and keeping them.

use tch::{Device, Kind, Tensor};
pub use tether_dump::{CapturePoint, FinalState};

use crate::batch::Tile;
use crate::{ForwardError, Sequence};

/// The points a request asked for, in plane order, checked once against the model's depth.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CaptureSpec {
    planes: Vec<CapturePoint>,
    final_state: FinalState,
    num_layers: i64,
}

/// Why a list of points cannot be captured.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum InvalidCapture {
    /// A point that no layer reads and none leaves behind.
    #[error(
        "point {point} does not exist; a model of {num_layers} layers has 0 to {num_layers} on the input axis"
    )]
    Unreachable {
        /// The point, on the input axis.
        point: i64,
        /// Layers of the model.
        num_layers: i64,
    },
    /// The same point twice.
    #[error("point {point} is listed twice")]
    Repeated {
        /// The point, on the input axis.
        point: i64,
    },
    /// Neither a point nor a final state.
    #[error("no points and no final state: there is nothing to capture")]
    Nothing,
    /// A depth for which the usual points do not exist.
    #[error(
        "a model of {num_layers} layers has no default points: 2, n/2 and n-3 are not three distinct points"
    )]
    NoDefault {
        /// Layers of the model.
        num_layers: i64,
    },
    /// A depth that the numbering of points cannot hold.
    #[error("{num_layers} layers cannot be numbered; at most {} can", u16::MAX)]
    TooDeep {
        /// Layers of the model.
        num_layers: i64,
    },
}

impl CaptureSpec {
    /// The residual points `points` (on the input axis, in any order) and the final state, of a model with `num_layers`
    /// layers. Planes come in ascending order whatever the order of `points`; `R[n]` appears once even if it is both
    /// listed and the final state.
    pub fn new(points: &[i64], final_state: FinalState, num_layers: i64) -> Result<Self, InvalidCapture> {
        let deepest = u16::try_from(num_layers).map_err(|_| InvalidCapture::TooDeep { num_layers })?;
        let mut planes = Vec::with_capacity(points.len() + 2);
        for &point in points {
            let index = u16::try_from(point).ok().filter(|&index| index <= deepest);
            let index = index.ok_or(InvalidCapture::Unreachable { point, num_layers })?;
            if planes.contains(&CapturePoint::Residual(index)) {
                return Err(InvalidCapture::Repeated { point });
            }
            planes.push(CapturePoint::Residual(index));
        }
        if matches!(final_state, FinalState::PreNorm | FinalState::Both) {
            planes.push(CapturePoint::Residual(deepest));
        }
        if matches!(final_state, FinalState::PostNorm | FinalState::Both) {
            planes.push(CapturePoint::FinalNorm);
        }
        planes.sort_unstable();
        planes.dedup();
        if planes.is_empty() {
            return Err(InvalidCapture::Nothing);
        }
        Ok(Self { planes, final_state, num_layers })
    }

    /// The points in plane order: residuals ascending, then the normed final state if asked for.
    pub fn planes(&self) -> &[CapturePoint] {
        &self.planes
    }

    /// The final state that was asked for.
    pub fn final_state(&self) -> FinalState {
        self.final_state
    }

    /// Layers of the model this was checked against.
    pub fn num_layers(&self) -> i64 {
        self.num_layers
    }

    fn plane(&self, point: CapturePoint) -> Option<i64> {
        self.planes.iter().position(|&plane| plane == point).map(|plane| plane as i64)
    }
}

/// The points EAGLE-3 drafters are trained on, on the input axis: `[2, n/2, n-3]`.
pub fn default_points(num_layers: i64) -> Result<[i64; 3], InvalidCapture> {
    let points = [2, num_layers / 2, num_layers - 3];
    let distinct = points[0] != points[1] && points[1] != points[2] && points[0] != points[2];
    let reachable = points.iter().all(|point| (0..=num_layers).contains(point));
    if distinct && reachable { Ok(points) } else { Err(InvalidCapture::NoDefault { num_layers }) }
}

/// What to keep of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    /// The points.
    pub spec: &'a CaptureSpec,
    /// What to store them in: float32, bfloat16 or float16.
    pub kind: Kind,
    /// The first row to keep; rows before it are computed and not kept.
    pub first_row: usize,
}

/// The stores of one step: for each sequence that wants it, a CPU tensor of its own that fills up plane by plane.
pub(crate) struct Captures<'a> {
    stores: Vec<Option<Store<'a>>>,
}

struct Store<'a> {
    spec: &'a CaptureSpec,
    first_row: i64,
    /// `[rows, planes, hidden]`
    states: Tensor,
}

impl<'a> Captures<'a> {
    /// Checks what the sequences ask for and allocates their stores.
    pub(crate) fn new(
        sequences: &[Sequence<'a>],
        num_layers: i64,
        hidden_size: i64,
    ) -> Result<Self, ForwardError> {
        let store = |(sequence, of): (usize, &Sequence<'a>)| {
            let Some(capture) = of.capture else { return Ok(None) };
            let (tokens, Capture { spec, kind, first_row }) = (of.token_ids.len(), capture);
            if spec.num_layers != num_layers {
                return Err(ForwardError::Depth { sequence, asked: spec.num_layers, layers: num_layers });
            }
            if first_row > tokens {
                return Err(ForwardError::FirstRow { sequence, first_row, tokens });
            }
            if !matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half) {
                return Err(ForwardError::Kind { sequence, kind: format!("{kind:?}") });
            }
            let shape = [(tokens - first_row) as i64, spec.planes.len() as i64, hidden_size];
            // Every row of every plane is written once, so the memory need not be cleared first.
            let states = Tensor::empty(shape, (kind, Device::Cpu));
            Ok(Some(Store { spec, first_row: first_row as i64, states }))
        };
        Ok(Self { stores: sequences.iter().enumerate().map(store).collect::<Result<_, _>>()? })
    }

    /// Whether a sequence of the tile keeps `point`.
    pub(crate) fn wants(&self, point: CapturePoint, tile: &Tile) -> bool {
        tile.segments.iter().any(|segment| {
            self.stores[segment.sequence].as_ref().is_some_and(|store| store.spec.plane(point).is_some())
        })
    }

    /// Copies what is wanted of `rows` (`[tile rows, hidden]`), the states of the tile at `point`.
    pub(crate) fn keep(&mut self, point: CapturePoint, tile: &Tile, rows: &Tensor) {
        for segment in &tile.segments {
            let Some(store) = &self.stores[segment.sequence] else { continue };
            let Some(plane) = store.spec.plane(point) else { continue };
            let skipped = (store.first_row - segment.position).clamp(0, segment.rows);
            let count = segment.rows - skipped;
            if count == 0 {
                continue;
            }
            let from = rows.narrow(0, segment.first - tile.first + skipped, count);
            let at = segment.position + skipped - store.first_row;
            store.states.narrow(0, at, count).select(1, plane).copy_(&from);
        }
    }

    /// The filled stores, in the order of the sequences.
    pub(crate) fn into_states(self) -> impl Iterator<Item = Option<Tensor>> {
        self.stores.into_iter().map(|store| store.map(|store| store.states))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(points: &[i64], final_state: FinalState, num_layers: i64) -> Vec<String> {
        let spec = CaptureSpec::new(points, final_state, num_layers).unwrap();
        spec.planes().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn planes_ascend_whatever_the_order_asked() {
        assert_eq!(names(&[3, 1, 2], FinalState::None, 4), ["R1", "R2", "R3"]);
        assert_eq!(names(&[58, 2, 30], FinalState::PreNorm, 61), ["R2", "R30", "R58", "R61"]);
    }

    #[test]
    fn the_final_state_comes_last_and_once() {
        assert_eq!(names(&[4, 2], FinalState::PreNorm, 4), ["R2", "R4"]);
        assert_eq!(names(&[4], FinalState::PostNorm, 4), ["R4", "N"]);
        assert_eq!(names(&[], FinalState::Both, 4), ["R4", "N"]);
        assert_eq!(names(&[0], FinalState::None, 4), ["R0"]);
    }

    #[test]
    fn points_out_of_reach_repeated_or_absent_are_refused() {
        for point in [-1, 5, 70_000, i64::MIN, i64::MAX] {
            let unreachable = InvalidCapture::Unreachable { point, num_layers: 4 };
            assert_eq!(CaptureSpec::new(&[1, point], FinalState::None, 4), Err(unreachable));
        }
        let error = CaptureSpec::new(&[5], FinalState::None, 4).unwrap_err().to_string();
        assert!(error.contains("point 5") && error.contains("0 to 4"), "{error}");
        let repeated = InvalidCapture::Repeated { point: 2 };
        assert_eq!(CaptureSpec::new(&[2, 1, 2], FinalState::PreNorm, 4), Err(repeated));
        assert_eq!(CaptureSpec::new(&[], FinalState::None, 4), Err(InvalidCapture::Nothing));
    }

    #[test]
    fn default_points_are_three_distinct_ones_or_refused() {
        assert_eq!(default_points(61), Ok([2, 30, 58]));
        assert_eq!(default_points(27), Ok([2, 13, 24]));
        assert_eq!(default_points(8), Ok([2, 4, 5]));
        assert_eq!(default_points(7), Ok([2, 3, 4]));
        for num_layers in [0, 1, 2, 4, 5, 6] {
            assert_eq!(default_points(num_layers), Err(InvalidCapture::NoDefault { num_layers }));
        }
    }
}
