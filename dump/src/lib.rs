//! The identity of a request and the file that holds its hidden states.
//!
//! A request is a [`RequestId`]. Its dump is one safetensors file named after it, laid out as vLLM's hidden-state
//! connector does, with everything needed to prove what it is in its metadata; `FORMAT.md` beside this crate gives
//! every byte. [`publish`] writes one so that a reader sees no file or the whole file, [`Head`] tells whose dump a file
//! is, [`DumpFile`] reads and verifies it, and [`torch_file`] writes what `torch.load` reads. [`DumpLayout`] chooses
//! between that file and the folder of PyTorch files that older clients scan for.

mod folder;
mod layout;
mod map;
mod metadata;
mod points;
mod read;
mod request_id;
mod token_hash;
pub mod torch_file;
mod write;

pub use folder::{folder_path, publish_folder};
pub use metadata::{FORMAT_VERSION, InvalidMetadata, Metadata, timestamp};
pub use points::{CapturePoint, Dtype, DumpLayout, FinalState, Rows, UnknownName};
pub use read::{DumpFile, Head, ReadError, VerifyError};
pub use request_id::{InvalidRequestId, RequestId};
pub use token_hash::{InvalidHash, TokenHash, TokenHasher};
pub use write::{Dump, PublishError, Published, dump_path, encoded_len, publish, remove_stale_temporaries};
