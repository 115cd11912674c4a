//! DeepSeek-V2 and -V3 models over libtorch, made for reading their hidden states.
//!
//! [`Model::forward`] runs packed sequences, for each layer and for each tile of tokens, and keeps the points of the
//! residual stream that a [`CaptureSpec`] names. Numbers follow the reference implementation within the bounds that
//! `tests/exactness.rs` checks; where transformers and the authors' own code differ, the authors are followed:
//!
//! * The softmax scale carries YaRN's `m(mscale_all_dim)²`, and cosine and sine `m(mscale) / m(mscale_all_dim)` even if only
//!   one of the two is given.
//! * `norm_topk_prob` is honoured for every method (transformers' V2 classes ignore it), and `moe_layer_freq` too.
//! * Compressed queries, keys and values are normed with an epsilon of 1e-6 whatever `rms_norm_eps` says.

mod attention;
mod batch;
mod cache;
mod capture;
mod config;
mod devices;
mod error;
mod layer;
mod linear;
mod mapped;
mod mlp;
mod model;
mod moe;
mod norm;
mod pieces;
mod products;
mod quantised;
mod rope;
mod routes;
mod routing;
mod scores;
mod weights;

pub use cache::KvCache;
pub use capture::{Capture, CapturePoint, CaptureSpec, FinalState, InvalidCapture, default_points};
pub use config::{Architecture, Config, Quantisation, RopeConfig, Scheme, TopkMethod, Yarn};
pub use error::{ForwardError, LoadError};
pub use model::{DtypeChoice, LoadOptions, Model, Sequence, SequenceOutput};
pub use pieces::Pieces;
pub use products::Products;
pub use routes::Routes;
pub use scores::{Scores, Scoring};
pub use weights::{LoadRow, LoadTable};
