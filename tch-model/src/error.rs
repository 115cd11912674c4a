//! What can go wrong while loading a checkpoint and while running it.

use std::io;
use std::path::PathBuf;

use crate::capture::InvalidCapture;

/// Why a checkpoint could not become a model.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file of the checkpoint could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A JSON file of the checkpoint does not hold what it must.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why it could not be parsed.
        #[source]
        source: serde_json::Error,
    },
    /// The config asks for something this code does not do.
    #[error("config.json: `{key}` is {value}; this model code supports {supported}")]
    Unsupported {
        /// The key in `config.json`.
        key: String,
        /// Its value, as written.
        value: String,
        /// What would have been accepted.
        supported: String,
    },
    /// The config lacks a key that has no default.
    #[error("config.json: `{key}` is missing; {needed}")]
    MissingKey {
        /// The key in `config.json`.
        key: String,
        /// Why it is needed, or what it must hold.
        needed: String,
    },
    /// The directory holds no safetensors checkpoint.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json", dir.display())]
    NoWeights {
        /// The checkpoint directory.
        dir: PathBuf,
    },
    /// The index names files that are not there.
    #[error("the index names {} file(s) that are not in {}: {}", names.len(), dir.display(), names.join(", "))]
    MissingShards {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Every file that is missing.
        names: Vec<String>,
    },
    /// A shard is cut short or damaged.
    #[error("{} is not a whole safetensors file", path.display())]
    Shard {
        /// The shard.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// Tensors that the config implies are absent, or differ from what it implies.
    #[error("{} tensor(s) do not fit the config: {}", problems.len(), problems.join("; "))]
    Tensors {
        /// One sentence on each tensor.
        problems: Vec<String>,
    },
    /// An option to the load makes no sense.
    #[error("`{option}` is {value}; {supported}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What would have been accepted.
        supported: &'static str,
    },
    /// libtorch refused.
    #[error("libtorch failed while loading")]
    Torch(#[from] tch::TchError),
}

/// Why a forward pass did not produce its results. Nothing of it is kept, and the model stays usable.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum ForwardError {
    /// A sequence without tokens.
    #[error("sequence {sequence} is empty")]
    Empty {
        /// Its place in the call.
        sequence: usize,
    },
    /// A token the vocabulary does not have.
    #[error(
        "sequence {sequence}, position {position}: token {token} is outside the vocabulary 0..{vocab_size}"
    )]
    Token {
        /// Its place in the call.
        sequence: usize,
        /// Where in the sequence.
        position: usize,
        /// The token.
        token: i64,
        /// Tokens in the vocabulary.
        vocab_size: i64,
    },
    /// More tokens than the model has positions.
    #[error("sequence {sequence} has {tokens} tokens, the model has {limit} positions")]
    TooLong {
        /// Its place in the call.
        sequence: usize,
        /// Its length.
        tokens: usize,
        /// `max_position_embeddings`.
        limit: i64,
    },
    /// A capture was checked against a model of another depth.
    #[error("sequence {sequence}: the capture is for {asked} layers, the model has {layers}")]
    Depth {
        /// Its place in the call.
        sequence: usize,
        /// Layers the spec was checked against.
        asked: i64,
        /// Layers of this model.
        layers: i64,
    },
    /// A capture that starts behind the last token.
    #[error("sequence {sequence}: the capture starts at row {first_row} of {tokens}")]
    FirstRow {
        /// Its place in the call.
        sequence: usize,
        /// The first row asked for.
        first_row: usize,
        /// Rows there are.
        tokens: usize,
    },
    /// Scoring of rows that are not there.
    #[error(
        "sequence {sequence}: {targets} tokens are scored from row {first_row} on, there are {tokens} rows"
    )]
    Scoring {
        /// Its place in the call.
        sequence: usize,
        /// The first row asked for.
        first_row: usize,
        /// How many rows were.
        targets: usize,
        /// Rows there are.
        tokens: usize,
    },
    /// A kind hidden states cannot be stored in.
    #[error(
        "sequence {sequence}: hidden states cannot be captured as {kind}; float32, bfloat16 and float16 can"
    )]
    Kind {
        /// Its place in the call.
        sequence: usize,
        /// The kind asked for.
        kind: String,
    },
    /// The experts handed in do not fit the step.
    #[error("forced experts: {reason}")]
    Routes {
        /// What does not fit.
        reason: String,
    },
    /// libtorch refused, most often for want of memory.
    #[error("libtorch: {message}")]
    Torch {
        /// The first line of what it said.
        message: String,
    },
}

impl LoadError {
    /// A config value this code does not implement.
    #[allow(clippy::needless_pass_by_value, reason = "callers hand over texts and numbers they just made")]
    pub(crate) fn unsupported(key: &str, value: impl ToString, supported: impl ToString) -> Self {
        Self::Unsupported { key: key.to_owned(), value: value.to_string(), supported: supported.to_string() }
    }
}

/// Lets `?` be used where points come from a config.
impl From<InvalidCapture> for LoadError {
    fn from(error: InvalidCapture) -> Self {
        Self::unsupported("num_hidden_layers", error, "models deep enough for the capture points")
    }
}
