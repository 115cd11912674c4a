//! What the engine needs of a model: one pass over packed sequences.

use std::fmt;

use tether_model::{CaptureSpec, Scores, Scoring};

/// A model as the engine sees it. It is made, used and dropped on the engine thread.
pub trait StepModel: 'static {
    /// What later tokens of a sequence need of earlier ones.
    type Cache;

    /// One without tokens, that never takes more memory than `tokens` tokens fill.
    fn new_cache(&self, tokens: usize) -> Self::Cache;

    /// Bytes that a token takes in a cache.
    fn cache_bytes_per_token(&self) -> u64;

    /// Runs all sequences together; results in the order given. A panic counts as an error of this step.
    ///
    /// # Errors
    /// When the pass failed as a whole. The model and the caches must stay usable.
    fn step(&self, sequences: &mut [StepSequence<'_, Self::Cache>]) -> Result<Vec<StepOutput>, StepError>;
}

/// One sequence of a step, or a part of one.
#[derive(Debug)]
pub struct StepSequence<'a, C> {
    /// Its tokens behind those in the cache.
    pub token_ids: &'a [i64],
    /// What earlier steps made of the tokens before; `None` for a sequence that is run whole and once.
    pub cache: Option<&'a mut C>,
    /// What to keep.
    pub capture: Option<StepCapture<'a>>,
    /// Whether the logits behind the last token are wanted.
    pub logits: bool,
    /// How likely given tokens are.
    pub scoring: Option<Scoring<'a>>,
}

/// What to keep of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepCapture<'a> {
    /// The points.
    pub spec: &'a CaptureSpec,
    /// The first row to keep, of this step's.
    pub first_row: usize,
}

/// What a step gave for one sequence.
#[derive(Debug)]
pub struct StepOutput {
    /// The tokens that the embedding looked up, read back from its input.
    pub token_ids: Vec<i64>,
    /// The kept rows, if any were asked for.
    pub states: Option<States>,
    /// `[vocab]`, if asked for.
    pub logits: Option<Vec<f32>>,
    /// What was asked by [`StepSequence::scoring`].
    pub scores: Option<Scores>,
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
