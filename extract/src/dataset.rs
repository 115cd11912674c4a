//! The data set: tokenised conversations, one JSON object a line.

mod lines;
mod parse;

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::File,
    io::{self, BufReader, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use tether_dump::TokenHash;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use lines::{Line, Lines};

/// A JSONL file of samples, indexed but not held: where each row lies, how long it is and what its tokens hash to.
///
/// A row's number is its position among the lines that are not blank, as every JSONL reader counts, so that
/// `data_17.ckpt` is row 17 of the data set wherever it is loaded. A bad row keeps its number.
#[derive(Debug)]
pub struct Dataset {
    path: PathBuf,
    file: File,
    /// The good rows, ascending.
    pub rows: Vec<Row>,
    /// The rows that cannot be extracted, ascending.
    pub bad: Vec<BadRow>,
    /// Rows, good and bad.
    pub total_rows: u64,
    /// Tokens of all good rows.
    pub total_tokens: u64,
    /// Good rows whose `id` an earlier row had already used.
    pub repeated_ids: u64,
    /// XXH3-128 of the file's bytes: a run resumes only with the data it began with.
    pub fingerprint: String,
    /// The file's length in bytes.
    pub bytes: u64,
}

/// Where one good row lies and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Position among the lines that are not blank, from 0.
    pub row: u64,
    /// Line number, from 1.
    pub line: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Hash of the row's own token IDs.
    pub token_hash: TokenHash,
    offset: u64,
    bytes: u64,
}

/// A row that cannot be extracted, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRow {
    /// Position among the lines that are not blank, from 0.
    pub row: u64,
    /// Line number, from 1.
    pub line: u64,
    /// The row's `id`, where it could be read.
    pub id: Option<String>,
    /// What is wrong with it.
    pub reason: String,
}

/// One row's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The row's `id`; a number is kept as its text.
    pub id: Option<String>,
    /// The tokens, at least one, none negative.
    pub input_ids: Vec<i64>,
    /// 1 where a token is trained on, 0 elsewhere; as long as `input_ids`. All ones if the row has none.
    pub loss_mask: Vec<i64>,
}

/// What to do with a row whose `id` an earlier row already has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum RepeatedIds {
    /// Extract it: a sample is known by its row and its tokens, not by its `id`.
    #[default]
    Keep,
    /// Count it as a bad row.
    Fail,
}

/// Why a data set could not be used at all.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The file could not be read.
    #[error("cannot read the data set `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is no row in it.
    #[error("the data set `{path}` has no rows; expected one JSON object with `input_ids` a line")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Why an indexed row could not be read again.
#[derive(Debug, thiserror::Error)]
pub enum ReadRowError {
    /// The file could not be read.
    #[error("cannot read line {line} of the data set")]
    Io {
        /// Line number, from 1.
        line: u64,
        /// The cause.
        source: io::Error,
    },
    /// The bytes are no longer those that were indexed.
    #[error("line {line} of the data set has changed since the run began")]
    Changed {
        /// Line number, from 1.
        line: u64,
    },
}

impl Dataset {
    /// Reads `path` once from end to end and remembers where its rows are.
    ///
    /// # Errors
    /// Only if the file cannot be read or has no rows; a row that is wrong is in [`Dataset::bad`].
    pub fn index(path: &Path, repeated: RepeatedIds) -> Result<Self, DatasetError> {
        let failed = |source| DatasetError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            // Rows are read again by position when their turn comes, so a pipe or a directory will not do.
            return Err(failed(io::Error::other("not a regular file")));
        }
        let mut whole = Xxh3Default::new();
        let (mut rows, mut bad) = (Vec::new(), Vec::new());
        let (mut row, mut total_tokens, mut repeated_ids) = (0, 0, 0);
        let mut first_line_of: HashMap<u64, u64> = HashMap::new();

        let mut lines = Lines::new(BufReader::with_capacity(1 << 20, &mut file));
        while let Some(line) = lines.next(&mut whole).map_err(failed)? {
            let Line { number, offset, text } = line;
            let parsed = match text {
                Ok(text) if is_blank(text) => continue,
                Ok(text) => parse::sample(text).map(|sample| (sample, text.len() as u64)),
                Err(too_long) => Err(parse::BadLine { id: None, reason: too_long.to_string() }),
            };
            let here = row;
            row += 1;
            let (sample, bytes) = match parsed {
                Ok((sample, bytes)) => (sample, bytes),
                Err(parse::BadLine { id, reason }) => {
                    bad.push(BadRow { row: here, line: number, id, reason });
                    continue;
                }
            };
            if let Some(id) = &sample.id {
                match first_line_of.entry(xxh3_64(id.as_bytes())) {
                    Entry::Vacant(slot) => {
                        slot.insert(number);
                    }
                    Entry::Occupied(slot) if repeated == RepeatedIds::Fail => {
                        let reason = format!("`id` {id:?} was already used by line {}", slot.get());
                        bad.push(BadRow { row: here, line: number, id: sample.id, reason });
                        continue;
                    }
                    Entry::Occupied(_) => repeated_ids += 1,
                }
            }
            let tokens = sample.input_ids.len() as u64;
            total_tokens += tokens;
            let token_hash = TokenHash::of(&sample.input_ids);
            rows.push(Row { row: here, line: number, tokens, token_hash, offset, bytes });
        }
        if row == 0 {
            return Err(DatasetError::Empty { path: path.to_owned() });
        }
        let bytes = lines.offset();
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let fingerprint = fingerprint(&whole);
        let path = path.to_owned();
        Ok(Self { path, file, rows, bad, total_rows: row, total_tokens, repeated_ids, fingerprint, bytes })
    }

    /// Whether the file is a data set of `bytes` bytes and this `fingerprint` with lines appended: those bytes are as they
    /// were, and no line that was there goes on.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn continues(&self, bytes: u64, fingerprint: &str) -> Result<bool, DatasetError> {
        if bytes == 0 || bytes >= self.bytes {
            return Ok(false);
        }
        let failed = |source| DatasetError::Io { path: self.path.clone(), source };
        let mut whole = Xxh3Default::new();
        let mut block = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < bytes {
            let length = usize::try_from(bytes - offset).map_or(block.len(), |rest| rest.min(block.len()));
            self.file.read_exact_at(&mut block[..length], offset).map_err(failed)?;
            whole.update(&block[..length]);
            offset += length as u64;
        }
        let mut seam = [0; 2];
        self.file.read_exact_at(&mut seam, bytes - 1).map_err(failed)?;
        Ok(seam.contains(&b'\n') && self::fingerprint(&whole) == fingerprint)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads one indexed row. May be called from many threads at once.
    ///
    /// # Errors
    /// If the file cannot be read, or no longer says what it said when it was indexed.
    pub fn read(&self, row: &Row) -> Result<Sample, ReadRowError> {
        let line = row.line;
        let mut text = vec![0; usize::try_from(row.bytes).expect("an indexed line fits into memory")];
        self.file.read_exact_at(&mut text, row.offset).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => ReadRowError::Changed { line },
            _ => ReadRowError::Io { line, source },
        })?;
        match parse::sample(&text) {
            Ok(sample) if TokenHash::of(&sample.input_ids) == row.token_hash => Ok(sample),
            _ => Err(ReadRowError::Changed { line }),
        }
    }
}

fn fingerprint(bytes: &Xxh3Default) -> String {
    format!("{:032x}", bytes.digest128())
}

fn is_blank(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_whitespace)
}

#[cfg(test)]
mod tests;
