//! What the engine needs of a model: one pass over packed sequences.

use std::fmt;

use tether_model::CaptureSpec;

/// A model as the engine sees it. It is made, used and dropped on the engine thread.
pub trait StepModel: 'static {
    /// Runs all sequences together; results in the order given. A panic counts as an error of this step.
    ///
    /// # Errors
    /// When the pass failed as a whole. The model must stay usable.
    fn step(&self, sequences: &[StepSequence<'_>]) -> Result<Vec<StepOutput>, StepError>;
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepSequence<'a> {
    /// All tokens so far.
    pub token_ids: &'a [i64],
    /// What to keep.
    pub capture: Option<StepCapture<'a>>,
    /// Whether the most likely next token is wanted.
    pub next_token: bool,
}

/// What to keep of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepCapture<'a> {
    /// The points.
    pub spec: &'a CaptureSpec,
    /// The first row to keep.
    pub first_row: usize,
}

/// What a step gave for one sequence.
#[derive(Debug)]
pub struct StepOutput {
    /// The tokens that the embedding looked up, read back from its input.
    pub token_ids: Vec<i64>,
    /// The kept rows, if any were asked for.
    pub states: Option<States>,
    /// The most likely next token if it was asked for; `None` in it when the logits are not numbers.
    pub next_token: Option<Option<i64>>,
}

/// Hidden states `[rows, planes, hidden]`, row-major, little-endian, in the dump's dtype, owned by whoever made them.
pub struct States(Box<dyn AsRef<[u8]> + Send>);

impl States {
    /// Takes `bytes` over without copying them.
    pub fn new(bytes: impl AsRef<[u8]> + Send + 'static) -> Self {
        Self(Box::new(bytes))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl fmt::Debug for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "States({} bytes)", self.bytes().len())
    }
}

/// Why a pass failed, in the model's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StepError(pub String);
