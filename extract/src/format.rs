//! What trainers read. One format is one file in `format/` and one arm in [`choose`].

pub mod specforge;
mod torch_archive;

use std::{fmt, fs::File, io, io::BufWriter, path::Path, path::PathBuf};

use tether_dump::{CapturePoint, DumpFile, FinalState, Metadata, RequestId, TokenHash};

use crate::{
    dataset::Sample,
    points::{Points, names},
};

/// A file format of a trainer, and what it needs from a dump.
pub trait Format: fmt::Debug + Send + Sync {
    /// Its name in the ledger; two runs with other names do not share a directory.
    fn name(&self) -> &'static str;

    /// The final state its files hold.
    fn final_state(&self) -> FinalState;

    /// Checks the residual points that are asked for or that a dump has.
    ///
    /// # Errors
    /// If files of this format cannot be made of them.
    fn check_residuals(&self, residuals: &[CapturePoint]) -> Result<(), Unsuitable>;

    /// Where the file of a row lies below the output directory.
    fn path(&self, row: u64) -> PathBuf;

    /// Bytes that a sample of `tokens` tokens takes, give or take a per mille.
    fn estimated_bytes(&self, tokens: u64, hidden_size: usize, planes: usize) -> u64;

    /// Writes the file. Rows are taken from the dump by the names of its planes.
    ///
    /// # Errors
    /// If the dump does not hold what the format needs, or the file cannot be written.
    fn write(&self, file: &mut BufWriter<File>, sample: &Sample, dump: &DumpFile) -> Result<(), WriteError>;

    /// Reads a finished file back and checks it in its own terms: keys, shapes, element types, every value finite.
    ///
    /// # Errors
    /// What is wrong with it.
    fn inspect(&self, path: &Path) -> Result<Contents, InspectError>;
}

/// What a finished file says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The request whose hidden states it holds.
    pub request_id: RequestId,
    /// Number of tokens.
    pub tokens: u64,
    /// Hash of its tokens.
    pub token_hash: TokenHash,
}

/// A dump, or a choice of points, from which files of a format cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{format} needs {needs}; {what} {found}")]
pub struct Unsuitable {
    /// The format.
    pub format: &'static str,
    /// What it needs.
    pub needs: &'static str,
    /// What was looked at.
    pub what: &'static str,
    /// What was found there.
    pub found: String,
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The dump is not what the format needs.
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    /// A value is not finite in the file's element type.
    #[error("hidden state of {point} at token {token} is not finite as {dtype}")]
    NotFinite {
        /// The plane.
        point: CapturePoint,
        /// The row.
        token: usize,
        /// The file's element type.
        dtype: &'static str,
    },
    /// The file system refused.
    #[error("cannot write the file")]
    Io {
        /// The cause.
        source: io::Error,
    },
}

impl From<io::Error> for WriteError {
    fn from(source: io::Error) -> Self {
        // Whoever writes knows the file's name.
        Self::Io { source }
    }
}

/// Why a finished file is not what its format says.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It cannot be read.
    #[error("cannot be read")]
    Io(#[from] io::Error),
    /// Its container cannot be understood.
    #[error("is not a file that `torch.save` or Tether wrote: {0}")]
    NotAnArchive(String),
    /// Its container is whole, what it holds is wrong.
    #[error("{0}")]
    Wrong(String),
}

/// A trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FormatName {
    /// SpecForge's offline features, `.ckpt`.
    Specforge,
}

/// A method of drafting, where a trainer's files differ by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Strategy {
    /// EAGLE-3: three residual points and the normed final state.
    #[default]
    Eagle3,
}

/// The format that a user's choice names.
pub fn choose(format: FormatName, strategy: Strategy) -> Box<dyn Format> {
    match (format, strategy) {
        (FormatName::Specforge, Strategy::Eagle3) => Box::new(specforge::Eagle3),
    }
}

/// The format that a ledger names.
pub fn by_name(name: &str) -> Option<Box<dyn Format>> {
    let formats: [Box<dyn Format>; 1] = [Box::new(specforge::Eagle3)];
    formats.into_iter().find(|format| format.name() == name)
}

/// Checks that a dump has the planes that `format` needs, and those that the run asked for if it named any.
///
/// # Errors
/// If it has others.
pub fn check_planes(
    format: &dyn Format,
    asked: Option<&Points>,
    metadata: &Metadata,
) -> Result<(), Unsuitable> {
    let (residuals, finals) = split_final(&metadata.points, metadata.final_state);
    format.check_residuals(residuals)?;
    let wanted = match format.final_state() {
        FinalState::PreNorm => vec![CapturePoint::Residual(metadata.num_layers as u16)],
        FinalState::PostNorm => vec![CapturePoint::FinalNorm],
        FinalState::Both => vec![CapturePoint::Residual(metadata.num_layers as u16), CapturePoint::FinalNorm],
        FinalState::None => vec![],
    };
    let unsuitable = |needs, found| Unsuitable { format: format.name(), needs, what: "the dump has", found };
    if finals != wanted || metadata.final_state != format.final_state() {
        let found = format!("{} with final state `{}`", names(&metadata.points), metadata.final_state);
        return Err(unsuitable("the final state it asked for", found));
    }
    match asked {
        Some(asked) if asked.residuals() != residuals => {
            Err(unsuitable("the points it asked for", format!("{} instead of {asked}", names(residuals))))
        }
        _ => Ok(()),
    }
}

/// The residual points among a dump's planes, and the planes of the final state after them.
pub(crate) fn split_final(
    points: &[CapturePoint],
    final_state: FinalState,
) -> (&[CapturePoint], &[CapturePoint]) {
    let last = match final_state {
        FinalState::None => 0,
        FinalState::PreNorm | FinalState::PostNorm => 1,
        FinalState::Both => 2,
    };
    points.split_at(points.len().saturating_sub(last))
}
