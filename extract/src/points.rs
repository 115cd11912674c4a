//! Capture points as the command line names them.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde_json::{Value, json};
use tether_dump::CapturePoint;

/// Which side of a decoder layer its number names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Axis {
    /// `i` is `R[i]`, what enters layer `i`: SGLang's and vLLM's numbering.
    #[default]
    Input,
    /// `i` is `R[i + 1]`, what leaves layer `i`: SpecForge's and ModelOpt's numbering.
    Output,
}

impl Axis {
    fn as_str(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
        }
    }
}

/// A comma-separated list of layer numbers, none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerList(BTreeSet<u16>);

/// Why a text is not a list of layers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLayerList {
    /// One of the numbers cannot be read.
    #[error("`{0}` is not a layer number; expected numbers such as `2,30,58`")]
    NotANumber(String),
    /// The layer is beyond what any model has.
    #[error("layer {0} is too large; at most {max} can be named", max = u16::MAX - 1)]
    TooLarge(u16),
    /// A number stands twice.
    #[error("layer {0} is named twice")]
    Repeated(u16),
}

impl FromStr for LayerList {
    type Err = InvalidLayerList;

    fn from_str(text: &str) -> Result<Self, InvalidLayerList> {
        let mut layers = BTreeSet::new();
        for part in text.split(',').map(str::trim) {
            let layer = part.parse().map_err(|_| InvalidLayerList::NotANumber(part.to_owned()))?;
            if layer == u16::MAX {
                return Err(InvalidLayerList::TooLarge(layer));
            }
            if !layers.insert(layer) {
                return Err(InvalidLayerList::Repeated(layer));
            }
        }
        Ok(Self(layers))
    }
}

/// The residual points that a run asks for by name, instead of the server's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Points {
    layers: LayerList,
    axis: Axis,
}

impl Points {
    /// `layers` as numbered on `axis`.
    pub fn new(layers: LayerList, axis: Axis) -> Self {
        Self { layers, axis }
    }

    /// The points by name, in plane order.
    pub fn residuals(&self) -> Vec<CapturePoint> {
        let shift = match self.axis {
            Axis::Input => 0,
            Axis::Output => 1,
        };
        self.layers.0.iter().map(|layer| CapturePoint::Residual(layer + shift)).collect()
    }

    /// Adds `points` and `axis` to a `capture` object. The server is given the user's own numbers, so that what it says
    /// about them is in the user's terms.
    pub fn write_to(&self, capture: &mut serde_json::Map<String, Value>) {
        capture.insert("points".into(), json!(self.layers.0));
        capture.insert("axis".into(), self.axis.as_str().into());
    }
}

impl fmt::Display for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&names(&self.residuals()))
    }
}

/// `R2, R30, R58, N`.
pub fn names(points: &[CapturePoint]) -> String {
    points.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(text: &str, axis: Axis) -> Points {
        Points::new(text.parse().unwrap(), axis)
    }

    #[test]
    fn both_axes_name_the_same_points() {
        let input = points("58, 2,30", Axis::Input);
        assert_eq!(input.to_string(), "R2, R30, R58");
        assert_eq!(input.residuals(), points("1,29,57", Axis::Output).residuals());
    }

    #[test]
    fn the_server_is_asked_in_the_users_numbers() {
        let mut capture = serde_json::Map::new();
        points("29,1,57", Axis::Output).write_to(&mut capture);
        assert_eq!(Value::Object(capture), json!({"points": [1, 29, 57], "axis": "output"}));
    }

    #[test]
    fn a_bad_list_says_which_part_is_bad() {
        let error = |text: &str| text.parse::<LayerList>().unwrap_err().to_string();
        assert_eq!(error("2,,3"), "`` is not a layer number; expected numbers such as `2,30,58`");
        assert_eq!(error("2,-1"), "`-1` is not a layer number; expected numbers such as `2,30,58`");
        assert_eq!(error("2,3,2"), "layer 2 is named twice");
        assert_eq!(error("65535"), "layer 65535 is too large; at most 65534 can be named");
    }
}
