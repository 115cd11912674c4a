//! What a loaded checkpoint holds, for the log.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A model's parameters by how they are stored, what they take, and how long it took to load them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadTable {
    rows: BTreeMap<String, LoadRow>,
    /// From the first look at the config to a model that can run.
    pub took: Duration,
}

/// Parameters stored alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadRow {
    /// Weights as the model knows them: a packed matrix with its factors is one.
    pub tensors: u64,
    /// Numbers in them; factors of packed ones do not count.
    pub parameters: u64,
    /// Bytes in the files, factors included.
    pub stored_bytes: u64,
    /// Of these, bytes that stay in the mapped files: read as they are needed, and dropped and read again by the system as
    /// it sees fit. The others were copied: to a device, or into another number format.
    pub mapped_bytes: u64,
}

impl LoadTable {
    /// The rows, by how parameters are stored.
    pub fn rows(&self) -> impl Iterator<Item = (&str, LoadRow)> {
        self.rows.iter().map(|(stored_as, row)| (stored_as.as_str(), *row))
    }

    /// All rows together.
    pub fn total(&self) -> LoadRow {
        self.rows.values().fold(LoadRow::default(), |mut total, row| {
            total.add(*row);
            total
        })
    }

    pub(crate) fn add(&mut self, stored_as: &str, row: LoadRow) {
        self.rows.entry(stored_as.to_owned()).or_default().add(row);
    }
}

impl LoadRow {
    fn add(&mut self, other: Self) {
        self.tensors += other.tensors;
        self.parameters += other.parameters;
        self.stored_bytes += other.stored_bytes;
        self.mapped_bytes += other.mapped_bytes;
    }
}

/// Several lines, the first one a heading.
impl fmt::Display for LoadTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GIB: f64 = (1u64 << 30) as f64;
        write!(
            f,
            "  {:<30} {:>8} {:>16} {:>12} {:>12}",
            "stored as", "tensors", "parameters", "GiB", "GiB mapped"
        )?;
        let mut line = |name: &str, row: LoadRow| {
            let (stored, mapped) = (row.stored_bytes as f64 / GIB, row.mapped_bytes as f64 / GIB);
            write!(
                f,
                "\n  {name:<30} {:>8} {:>16} {stored:>12.3} {mapped:>12.3}",
                row.tensors, row.parameters
            )
        };
        for (name, row) in self.rows() {
            line(name, row)?;
        }
        line("total", self.total())?;
        write!(f, "\n  loaded in {:.1} s", self.took.as_secs_f64())
    }
}
