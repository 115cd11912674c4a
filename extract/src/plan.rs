//! What a run has to do: every row that has no whole file yet. Looked up anew each time, by row and tokens, never by count.

use std::{
    collections::HashMap,
    num::NonZero,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::{
    dataset::{Dataset, Row},
    ledger::Stored,
    stored::{Damage, Depth},
    tally::{Failure, FailureKind},
};

/// The rows of a data set, sorted by what is to be done about them.
#[derive(Debug, Default)]
pub struct Plan {
    /// To be extracted, in the data set's order.
    pub rows: Vec<Row>,
    /// On disk, recorded and whole.
    pub already_done: u64,
    /// Their tokens.
    pub already_done_tokens: u64,
    /// Recorded, but the file is missing or damaged. They are among `rows`.
    pub damaged: Vec<(u64, Damage)>,
    /// Without a file, and there will be none.
    pub failures: Vec<Failure>,
    /// Left out on request.
    pub left_out: u64,
}

/// What to do with a row that is longer than the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TooLong {
    /// It counts as failed: the set is not complete without it.
    #[default]
    Fail,
    /// It is left out, and counted.
    Skip,
}

/// Which rows are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Only the first so many rows of the data set.
    pub limit: Option<u64>,
    /// Most tokens of a row.
    pub max_length: Option<u64>,
    /// What to do with longer ones. They are never cut.
    pub too_long: TooLong,
}

impl Plan {
    /// Compares the data set with what is recorded and, below `root`, on disk.
    pub fn make(
        dataset: &Dataset,
        wanted: &Wanted,
        recorded: &HashMap<u64, Stored>,
        root: &Path,
        depth: Depth,
    ) -> Self {
        let mut plan = Self::default();
        let within = |row: u64| wanted.limit.is_none_or(|limit| row < limit);
        for bad in &dataset.bad {
            if !within(bad.row) {
                plan.left_out += 1;
                continue;
            }
            let (row, line, id, reason) = (bad.row, bad.line, bad.id.clone(), bad.reason.clone());
            plan.failures.push(Failure { row, line, id, kind: FailureKind::BadRow, reason, attempts: 0 });
        }
        let mut candidates = Vec::new();
        for row in &dataset.rows {
            let too_long = wanted.max_length.filter(|limit| row.tokens > *limit);
            match (within(row.row), too_long) {
                (true, None) => candidates.push(*row),
                (true, Some(limit)) if wanted.too_long == TooLong::Fail => plan.failures.push(Failure {
                    row: row.row,
                    line: row.line,
                    id: dataset.read(row).ok().and_then(|sample| sample.id),
                    kind: FailureKind::TooLong,
                    reason: format!("{} tokens are more than --max-length {limit}", row.tokens),
                    attempts: 0,
                }),
                _ => plan.left_out += 1,
            }
        }
        plan.failures.sort_by_key(|failure| failure.row);
        let known: Vec<Option<&Stored>> = candidates
            .iter()
            .map(|row| recorded.get(&row.row).filter(|stored| stored.token_hash == row.token_hash))
            .collect();
        let states = parallel(&known, |stored| {
            stored.map(|stored| stored.fingerprint.check(&root.join(&stored.path), depth))
        });
        for (row, state) in candidates.into_iter().zip(states) {
            match state {
                Some(Ok(())) => {
                    plan.already_done += 1;
                    plan.already_done_tokens += row.tokens;
                }
                Some(Err(damage)) => {
                    plan.damaged.push((row.row, damage));
                    plan.rows.push(row);
                }
                None => plan.rows.push(row),
            }
        }
        plan
    }

    /// Tokens of the rows to be extracted.
    pub fn tokens(&self) -> u64 {
        self.rows.iter().map(|row| row.tokens).sum()
    }
}

/// Applies `work` to every item, on several threads, keeping the order. Files are looked at one by one, and a network file
/// system answers many at once as fast as one.
pub(crate) fn parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get) * 4;
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut results = Vec::new();
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)).map(|item| (item, work(item)))
        {
            results.push(item);
        }
        results
    };
    let mut all: Vec<(&T, R)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.min(items.len())).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("the work does not panic")).collect()
    });
    // Addresses of one slice's items sort as the items do.
    all.sort_by_key(|(item, _)| std::ptr::from_ref(*item).addr());
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, path::PathBuf};

    use proptest::prelude::*;
    use tether_dump::RequestId;

    use super::*;
    use crate::{dataset::RepeatedIds, stored::Store};

    fn dataset(lengths: &[usize]) -> Dataset {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for (row, length) in lengths.iter().enumerate() {
            match length {
                0 => writeln!(file, "{{}}").unwrap(),
                _ => writeln!(file, r#"{{"input_ids":{:?}}}"#, vec![row; *length]).unwrap(),
            }
        }
        Dataset::index(file.path(), RepeatedIds::Keep).unwrap()
    }

    fn store(root: &Path, row: &Row) -> Stored {
        let path = PathBuf::from(format!("rows/data_{}.ckpt", row.row));
        let fill = |file: &mut std::io::BufWriter<_>| file.write_all(&[row.row as u8 + 1; 20_000]);
        let fingerprint = Store::new(root).write::<std::io::Error>(&path, fill).unwrap();
        let (request_id, token_hash) = (RequestId::new(), row.token_hash);
        Stored {
            row: row.row,
            token_hash,
            sample_id: None,
            request_id,
            tokens: row.tokens,
            path,
            fingerprint,
        }
    }

    #[test]
    fn missing_cut_empty_zeroed_and_swapped_files_are_done_again_and_whole_ones_are_not() {
        let root = tempfile::tempdir().unwrap();
        let dataset = dataset(&[1; 8]);
        let recorded: HashMap<_, _> =
            dataset.rows.iter().map(|row| (row.row, store(root.path(), row))).collect();
        let path = |row| root.path().join(&recorded[&row].path);
        std::fs::remove_file(path(1)).unwrap();
        std::fs::write(path(2), [3; 19_999]).unwrap();
        std::fs::write(path(3), b"").unwrap();
        std::fs::write(path(4), [0; 20_000]).unwrap();
        std::fs::copy(path(6), path(5)).unwrap();
        let plan = Plan::make(&dataset, &Wanted::default(), &recorded, root.path(), Depth::Quick);
        let rows: Vec<_> = plan.rows.iter().map(|row| row.row).collect();
        assert_eq!(rows, [1, 2, 3, 4, 5]);
        assert_eq!(plan.already_done, 3);
        let damage: Vec<_> = plan.damaged.iter().map(|(_, damage)| damage.to_string()).collect();
        assert_eq!(damage[0], "is missing");
        assert_eq!(damage[1], "is 19999 bytes long, 20000 were written");
        assert_eq!(damage[2], "is 0 bytes long, 20000 were written");
        assert_eq!(damage[3], "does not hold what was written");
    }

    #[test]
    fn a_record_of_other_tokens_is_not_the_rows() {
        let root = tempfile::tempdir().unwrap();
        let dataset = dataset(&[1, 2]);
        let mut other = store(root.path(), &dataset.rows[0]);
        other.token_hash = dataset.rows[1].token_hash;
        let plan =
            Plan::make(&dataset, &Wanted::default(), &HashMap::from([(0, other)]), root.path(), Depth::Quick);
        assert_eq!((plan.rows.len(), plan.already_done), (2, 0));
    }

    #[test]
    fn too_long_rows_are_failures_or_left_out_and_never_cut() {
        let dataset = dataset(&[3, 9, 0, 5]);
        let root = tempfile::tempdir().unwrap();
        let make = |too_long| {
            let wanted = Wanted { max_length: Some(5), too_long, ..Wanted::default() };
            Plan::make(&dataset, &wanted, &HashMap::new(), root.path(), Depth::Quick)
        };
        let fail = make(TooLong::Fail);
        assert_eq!(fail.rows.len(), 2);
        assert_eq!(fail.failures[0].reason, "9 tokens are more than --max-length 5");
        assert_eq!(fail.failures[1].kind, FailureKind::BadRow);
        let skip = make(TooLong::Skip);
        assert_eq!((skip.rows.len(), skip.failures.len(), skip.left_out), (2, 1, 1));
    }

    proptest! {
        #[test]
        fn every_row_has_one_fate(
            lengths in prop::collection::vec(0usize..6, 1..30),
            limit in prop::option::of(0u64..40), max_length in prop::option::of(1u64..6), skip in any::<bool>(),
            on_disk in prop::collection::vec(any::<bool>(), 30),
        ) {
            let dataset = dataset(&lengths);
            let root = tempfile::tempdir().unwrap();
            let recorded: HashMap<_, _> = dataset.rows.iter().filter(|row| on_disk[row.row as usize])
                .map(|row| (row.row, store(root.path(), row))).collect();
            let too_long = if skip { TooLong::Skip } else { TooLong::Fail };
            let wanted = Wanted { limit, max_length, too_long };
            let plan = Plan::make(&dataset, &wanted, &recorded, root.path(), Depth::Quick);
            let sum = plan.rows.len() as u64 + plan.already_done + plan.failures.len() as u64 + plan.left_out;
            prop_assert_eq!(sum, lengths.len() as u64);
            prop_assert!(plan.rows.iter().all(|row| !recorded.contains_key(&row.row)));
            prop_assert!(plan.rows.is_sorted_by_key(|row| row.row));
        }
    }
}
