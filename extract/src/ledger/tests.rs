use super::*;

pub(super) fn sample(row: u64) -> Stored {
    Stored {
        row,
        token_hash: TokenHash::of(&[row as i64, 2, 3]),
        sample_id: row.is_multiple_of(2).then(|| format!("conversation {row}")),
        request_id: RequestId::new(),
        tokens: 3,
        path: format!("rows_0-2000/data_{row}.ckpt").into(),
        fingerprint: Fingerprint { bytes: 100 + row, probe: "p".into(), hash: "h".into() },
    }
}

fn identity() -> Identity {
    Identity {
        model: "tiny".into(),
        config_hash: "c0ffee".into(),
        num_layers: 8,
        hidden_size: 64,
        points: ["R2", "R4", "R5", "N"].map(|name| name.parse().unwrap()).to_vec(),
        final_state: FinalState::PostNorm,
        dtype: Dtype::BFloat16,
    }
}

fn settings() -> Settings {
    Settings {
        format: "specforge/eagle3".into(),
        dataset: "d".into(),
        dataset_bytes: Some(99),
        dataset_rows: 9,
    }
}

#[test]
fn what_was_committed_is_there_when_the_ledger_is_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut ledger = Ledger::open(directory.path()).unwrap();
    assert_eq!(ledger.settings().unwrap(), None);
    assert_eq!(ledger.identity().unwrap(), None);
    ledger.begin(&settings()).unwrap();
    let writer = ledger.into_writer().unwrap();
    writer.set_identity(identity()).unwrap();
    let samples: Vec<_> = (0..600).map(sample).collect();
    std::thread::scope(|scope| {
        for part in samples.chunks(100) {
            scope.spawn(|| part.iter().for_each(|sample| writer.commit(sample.clone()).unwrap()));
        }
    });
    let kept = Lease { request_id: RequestId::new(), path: Some("/dumps/x.safetensors".into()) };
    let gone = Lease { request_id: RequestId::new(), path: None };
    writer.lease(kept.clone()).unwrap();
    writer.lease(gone.clone()).unwrap();
    writer.release(gone.request_id).unwrap();
    drop(writer);

    let ledger = Ledger::open_existing(directory.path()).unwrap();
    assert_eq!(ledger.settings().unwrap(), Some(settings()));
    assert_eq!(ledger.identity().unwrap(), Some(identity()));
    assert_eq!(ledger.leases().unwrap(), [kept]);
    let read = ledger.samples().unwrap();
    assert_eq!(read.len(), 600);
    assert!(samples.iter().all(|sample| read[&sample.row] == *sample));
}

#[test]
fn a_sample_done_again_replaces_its_record() {
    let directory = tempfile::tempdir().unwrap();
    let writer = Ledger::open(directory.path()).unwrap().into_writer().unwrap();
    writer.commit(sample(4)).unwrap();
    let again = sample(4);
    writer.commit(again.clone()).unwrap();
    drop(writer);
    let samples = Ledger::open(directory.path()).unwrap().samples().unwrap();
    assert_eq!(samples.len(), 1);
    assert_eq!(samples[&4], again);
}

#[test]
fn the_first_difference_is_named() {
    let now = Identity { points: vec![CapturePoint::Residual(3)], ..identity() };
    assert_eq!(
        identity().difference(&now).unwrap().to_string(),
        "the list of capture points is `R3`, this run began with `R2, R4, R5, N`"
    );
    assert_eq!(identity().difference(&identity()), None);
    let now = Settings { dataset: "e".into(), ..settings() };
    assert_eq!(
        settings().difference(&now).unwrap().to_string(),
        "the data set (hash of the file) is `e`, this run began with `d`"
    );
}

#[test]
fn another_programs_database_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    assert!(matches!(Ledger::open_existing(directory.path()), Err(LedgerError::NoRun { .. })));
    let path = directory.path().join(FILE_NAME);
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE theirs (a)").unwrap();
    assert!(matches!(Ledger::open(directory.path()), Err(LedgerError::Foreign { .. })));
    std::fs::write(&path, "this is no database, and long enough for SQLite to look at its header".repeat(9))
        .unwrap();
    assert!(matches!(Ledger::open(directory.path()), Err(LedgerError::Sqlite { .. })));
}

#[test]
fn a_ledger_of_a_later_version_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    drop(Ledger::open(directory.path()).unwrap());
    let path = directory.path().join(FILE_NAME);
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 2).unwrap();
    let error = Ledger::open(directory.path()).unwrap_err().to_string();
    assert!(error.ends_with("(version 2, this one reads 1)"), "{error}");
}
