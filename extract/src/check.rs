//! Whether a dump is the one that a sample's request asked for.

use std::path::Path;

use tether_dump::{DumpFile, ReadError, RequestId, Rows, TokenHash, VerifyError};

use crate::{
    client::Claims,
    dataset::{Row, Sample},
    format::{Format, Unsuitable, check_planes},
    ledger::{Difference, Identity},
    points::Points,
};

/// Why a dump is not used.
#[derive(Debug, thiserror::Error)]
pub enum BadDump {
    /// It cannot be opened, is cut short, or is not a dump.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// It, or what the reply says about it, belongs to another request.
    #[error("{what} is `{found}`, expected `{expected}`")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// As found.
        found: String,
        /// As it should be.
        expected: String,
    },
    /// The proxy found it to belong to another request.
    #[error("the proxy reports a mismatch: {0}")]
    ProxyMismatch(String),
    /// Its contents are not what it says they are, or not finite.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// It does not have the planes that the format needs.
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    /// It was made by another model, or with other settings, than the run's other samples.
    #[error(transparent)]
    Different(#[from] Difference),
}

impl BadDump {
    /// Whether this is the one thing that must never happen: the states of another request.
    pub fn is_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Mismatch { .. } | Self::ProxyMismatch(_) | Self::Verify(VerifyError::TokenHash { .. })
        )
    }
}

/// What a sample's dump must be.
#[derive(Debug)]
pub struct Expected<'a> {
    /// The request that the reply answers.
    pub request_id: RequestId,
    /// What the reply claims.
    pub claims: &'a Claims,
    /// The sample's place in the data set.
    pub row: &'a Row,
    /// The sample.
    pub sample: &'a Sample,
    /// The format that is made of it.
    pub format: &'a dyn Format,
    /// The residual points, if the run names them.
    pub points: Option<&'a Points>,
}

impl Expected<'_> {
    /// Opens the dump at `path` and checks all of it: whose it is, which tokens, which planes, every byte and value.
    ///
    /// # Errors
    /// The first thing found to be wrong.
    pub fn open(&self, path: &Path) -> Result<DumpFile, BadDump> {
        if let Some(mismatch) = &self.claims.mismatch {
            return Err(BadDump::ProxyMismatch(mismatch.clone()));
        }
        let (tokens, hash) = (self.sample.input_ids.len() as u64, self.row.token_hash);
        same("the reply's token count", self.claims.num_tokens.unwrap_or(tokens), tokens)?;
        same("the reply's token hash", self.claims.token_hash.unwrap_or(hash), hash)?;
        let dump = DumpFile::open(path)?;
        let head = dump.head();
        same("the dump's request ID", head.metadata.request_id, self.request_id)?;
        same("the dump's rows", head.metadata.rows, Rows::Prompt)?;
        same("the dump's prompt tokens", head.metadata.prompt_tokens as u64, tokens)?;
        same("the dump's rows of states", head.num_tokens() as u64, tokens)?;
        same("the dump's token hash", head.metadata.token_hash, hash)?;
        same("the hash of the dump's token IDs", TokenHash::of(&head.token_ids), hash)?;
        check_planes(self.format, self.points, &head.metadata)?;
        dump.verify()?;
        Ok(dump)
    }
}

/// Checks that a dump was made by the model, and with the settings, that the run began with.
///
/// # Errors
/// If one differs.
pub fn check_identity(began_with: &Identity, dump: &DumpFile) -> Result<(), Difference> {
    began_with.difference(&Identity::of(dump.head())).map_or(Ok(()), Err)
}

fn same<T: PartialEq + ToString + Copy>(what: &'static str, found: T, expected: T) -> Result<(), BadDump> {
    if found == expected {
        return Ok(());
    }
    Err(BadDump::Mismatch { what, found: found.to_string(), expected: expected.to_string() })
}
