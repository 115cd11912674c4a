//! `tether-extract run`: a data set in, a trainer's files out.

use std::{
    fs, io,
    num::NonZero,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Map, Value};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
    time::MissedTickBehavior,
};

use crate::{
    client::{Client, ProxyUrl, Readiness},
    dataset::{Dataset, DatasetError, RepeatedIds},
    extractor::{Extractor, Outcome, StepHook},
    format::{Format, Unsuitable, split_final},
    ledger::{Difference, Identity, Ledger, LedgerError, Settings},
    lock::{DirectoryLock, LockError},
    metrics::{Before, Metrics, State, gauge},
    plan::{Plan, Wanted},
    points::Points,
    progress::{Progress, Terminal},
    report::Report,
    retry::Policy,
    stop::Stop,
    stored::{Depth, Store},
    tally::{Counters, Failure, FailureKind, Tally},
};

/// Holds dumps fetched through the proxy while they are read.
const STAGING: &str = ".tether-staging";
/// Samples that may fail one after the other by the server's doing before the run stops: what would fail a whole data set
/// must not do so sample by sample.
const MAX_FAILURES_IN_A_ROW: u32 = 100;
/// Samples that may be refused one after the other while none has been done: a wrong setting refuses all of them.
const MAX_REFUSED_AT_FIRST: u32 = 20;
const READINESS_PAUSE: Duration = Duration::from_millis(500);
/// How often gauges that nothing else sets are set.
const REFRESH: Duration = Duration::from_millis(500);

/// What a run is to do.
#[derive(Debug)]
pub struct RunOptions {
    /// Where requests go.
    pub proxy: ProxyUrl,
    /// The data set.
    pub data: PathBuf,
    /// The output directory.
    pub out: PathBuf,
    /// The files to write.
    pub format: Box<dyn Format>,
    /// Residual points other than the server's own.
    pub points: Option<Points>,
    /// Requests in flight.
    pub concurrency: NonZero<usize>,
    /// Dumps checked and written at the same time.
    pub writers: NonZero<usize>,
    /// Which rows.
    pub wanted: Wanted,
    /// Rows with the same `id`.
    pub repeated_ids: RepeatedIds,
    /// How often and how long to try.
    pub policy: Policy,
    /// Longest wait for one reply.
    pub request_timeout: Duration,
    /// How closely files of an earlier run are looked at.
    pub verify: Depth,
    /// Begin although the disk seems too small.
    pub force: bool,
    /// Counts what is done.
    pub metrics: Metrics,
    /// For tests.
    pub on_step: Option<StepHook>,
}

/// Why a run did not begin.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The output directory cannot be used.
    #[error("cannot use the output directory `{path}`")]
    Out {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is in use, or not writable.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The data set cannot be used.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// The ledger cannot be used.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The points named do not suit the format.
    #[error(transparent)]
    Points(#[from] Unsuitable),
    /// The directory holds samples that were made otherwise.
    #[error("`{path}` holds samples made with other settings: {difference}; use another --out, or remove it")]
    Different {
        /// The directory.
        path: PathBuf,
        /// What differs.
        difference: Difference,
    },
    /// The directory holds files that no ledger explains.
    #[error("`{path}` holds files such as `{example}` but no ledger; use an empty directory")]
    Strangers {
        /// The directory.
        path: PathBuf,
        /// One of them.
        example: PathBuf,
    },
}

/// Extracts what is missing. Returns once nothing is pending, or the run was stopped.
///
/// # Errors
/// If it could not begin; nothing has been asked of the server then.
pub async fn run(options: RunOptions, stop: Stop, terminal: &Terminal) -> Result<Report, RunError> {
    let out = options.out.clone();
    let (prepared, mut report) = tokio::task::block_in_place(|| prepare(&options))?;
    let Prepared { _lock, dataset, ledger, store, plan, identity, recorded } = prepared;
    let leases = ledger.leases()?;
    let metrics = options.metrics;
    metrics.ledger_samples.set(gauge(recorded));
    metrics.ledger_dumps.set(gauge(leases.len() as u64));
    metrics.concurrency.set(gauge(options.concurrency.get() as u64));
    metrics.writers.set(gauge(options.writers.get() as u64));
    report.failures.iter().for_each(|failure| metrics.failures.at(failure.kind).inc());
    let before = Before {
        rows: report.rows,
        done: plan.already_done,
        done_tokens: plan.already_done_tokens,
        failed: report.failures.len() as u64,
        left_out: plan.left_out,
    };
    let mut tally = Tally::new(plan.rows.len() as u64, plan.tokens());
    let extractor = Arc::new(Extractor {
        client: Client::new(options.proxy, options.request_timeout, options.concurrency.get()),
        dataset,
        capture: capture(&*options.format, options.points.as_ref()),
        format: options.format,
        points: options.points,
        staging: store.root().join(STAGING),
        store,
        ledger: ledger.into_writer()?,
        policy: options.policy,
        requests: Semaphore::new(options.concurrency.get()),
        writers: Semaphore::new(options.writers.get()),
        counters: Counters::default(),
        metrics: metrics.clone(),
        stop: stop.clone(),
        identity: Mutex::new(identity),
        confirmed: AtomicBool::new(false),
        last_answer: Mutex::default(),
        retrying: AtomicUsize::new(0),
        one_more_retries: Notify::new(),
        on_step: options.on_step,
    });

    metrics.show(&before, &tally);
    if tally.planned > 0 {
        metrics.enter(State::Waiting);
        wait_until_ready(&extractor.client, options.policy.patience, &stop).await;
    }
    for lease in &leases {
        if extractor.try_discard(lease).await {
            metrics.ledger_dumps.dec();
            if let Err(error) = extractor.ledger.release(lease.request_id) {
                stop.ask(error.to_string());
            }
        }
    }
    if !leases.is_empty() {
        tracing::info!(dumps = leases.len(), "cleared dumps that an earlier run left");
    }
    // Enough samples beyond those in flight that the server never waits for a writer, and no more: their dumps take room.
    let most = options.concurrency.get() + 2 * options.writers.get();
    tally.started = std::time::Instant::now();
    metrics.begin();
    work(&extractor, plan.rows, &before, &mut tally, terminal, most, options.force).await;
    metrics.show(&before, &tally);

    let (elapsed, samples_per_second, tokens_per_second) = tally.rates();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &extractor.counters;
    report.pending = tally.pending();
    report.written = tally.done;
    (report.tokens, report.bytes, report.seconds) = (tally.tokens, tally.bytes, elapsed.as_secs_f64());
    (report.samples_per_second, report.tokens_per_second) = (samples_per_second, tokens_per_second);
    report.mismatches = count(&counters.mismatches);
    report.not_finite = count(&counters.not_finite);
    report.retries = count(&counters.retries);
    report.fetched = count(&counters.fetched);
    report.dumps_left_behind = count(&counters.left_behind);
    report.failures.append(&mut tally.failures);
    report.failures.sort_by_key(|failure| failure.row);
    report.failed = report.failures.len() as u64;
    report.stopped = stop.reason().filter(|_| report.pending > 0);
    report.complete = report.failed == 0 && report.pending == 0;
    metrics.enter(if report.complete { State::Complete } else { State::Incomplete });
    assert!(report.adds_up(), "rows are lost: {report:?}");
    report.save(&out).map_err(|source| RunError::Out { path: out, source })?;
    Ok(report)
}

struct Prepared {
    _lock: DirectoryLock,
    dataset: Dataset,
    ledger: Ledger,
    store: Store,
    plan: Plan,
    identity: Option<Identity>,
    /// Samples that the ledger has and that need not be done again.
    recorded: u64,
}

/// Everything that can be known without the server, cheapest first.
fn prepare(options: &RunOptions) -> Result<(Prepared, Report), RunError> {
    if let Some(points) = &options.points {
        options.format.check_residuals(&points.residuals())?;
    }
    let out = |source| RunError::Out { path: options.out.clone(), source };
    fs::create_dir_all(&options.out).map_err(out)?;
    let lock = DirectoryLock::take(&options.out)?;
    let root = fs::canonicalize(&options.out).map_err(out)?;
    let store = Store::new(&root);
    let dataset = Dataset::index(&options.data, options.repeated_ids)?;
    tracing::info!(
        rows = dataset.total_rows,
        bad = dataset.bad.len(),
        tokens = dataset.total_tokens,
        repeated_ids = dataset.repeated_ids,
        "read the data set"
    );
    let mut ledger = Ledger::open(&root)?;
    let settings = Settings {
        format: options.format.name().to_owned(),
        dataset: dataset.fingerprint.clone(),
        dataset_bytes: Some(dataset.bytes),
        dataset_rows: dataset.total_rows,
    };
    let different = |difference| RunError::Different { path: options.out.clone(), difference };
    match ledger.settings()? {
        Some(before) if has_grown(&before, &settings, &dataset)? => {
            tracing::info!(
                before = before.dataset_rows,
                now = dataset.total_rows,
                "lines were appended to the data set"
            );
            ledger.grow(&settings)?;
        }
        Some(before) => {
            before.difference(&settings).map_or(Ok(()), |difference| Err(different(difference)))?;
        }
        None => {
            refuse_strangers(&store, &options.out)?;
            ledger.begin(&settings)?;
        }
    }
    let identity = ledger.identity()?;
    if let (Some(identity), Some(asked)) = (&identity, &options.points) {
        let (_, finals) = split_final(&identity.points, identity.final_state);
        let now = Identity { points: [asked.residuals().as_slice(), finals].concat(), ..identity.clone() };
        identity.difference(&now).map_or(Ok(()), |difference| Err(different(difference)))?;
    }
    let swept = store.remove_temporaries().map_err(out)? + Report::remove_temporaries(&store).map_err(out)?;
    if swept > 0 {
        tracing::info!(files = swept, "removed unfinished files of a run that was cut off");
    }
    match fs::remove_dir_all(root.join(STAGING)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(out(error)),
        _ => {}
    }
    let recorded = ledger.samples()?;
    let mut plan = Plan::make(&dataset, &options.wanted, &recorded, &root, options.verify);
    for (row, damage) in plan.damaged.iter().take(20) {
        tracing::warn!(row, %damage, "the file of a recorded sample will be made again");
    }
    for Failure { row, line, reason, .. } in plan.failures.iter().take(20) {
        tracing::warn!(row, line, reason, "a row cannot be extracted");
    }
    tracing::info!(
        skipped = plan.already_done,
        redone = plan.damaged.len(),
        left_out = plan.left_out,
        unusable = plan.failures.len(),
        to_do = plan.rows.len(),
        "compared the data set with the output directory"
    );
    let report = Report {
        complete: false,
        stopped: None,
        rows: dataset.total_rows,
        written: 0,
        already_done: plan.already_done,
        redone: plan.damaged.len() as u64,
        failed: 0,
        left_out: plan.left_out,
        pending: 0,
        mismatches: 0,
        not_finite: 0,
        retries: 0,
        fetched: 0,
        dumps_left_behind: 0,
        repeated_ids: dataset.repeated_ids,
        tokens: 0,
        bytes: 0,
        seconds: 0.0,
        samples_per_second: 0.0,
        tokens_per_second: 0.0,
        failures: std::mem::take(&mut plan.failures),
    };
    let recorded = (recorded.len() - plan.damaged.len()) as u64;
    Ok((Prepared { _lock: lock, dataset, ledger, store, plan, identity, recorded }, report))
}

/// Whether the data set is the one that the run began with and more lines after it.
fn has_grown(before: &Settings, now: &Settings, dataset: &Dataset) -> Result<bool, DatasetError> {
    match before.dataset_bytes {
        Some(bytes) if before.format == now.format && before.dataset != now.dataset => {
            dataset.continues(bytes, &before.dataset)
        }
        _ => Ok(false),
    }
}

/// A trainer's loader takes every file it finds, so a run does not begin among another's.
fn refuse_strangers(store: &Store, out: &Path) -> Result<(), RunError> {
    let path = out.to_owned();
    let files = store.files().map_err(|source| RunError::Out { path: path.clone(), source })?;
    let example =
        files.into_iter().find(|file| file.extension().is_some_and(|extension| extension == "ckpt"));
    example.map_or(Ok(()), |example| Err(RunError::Strangers { path, example }))
}

/// The `capture` field of every request.
fn capture(format: &dyn Format, points: Option<&Points>) -> Value {
    let mut capture = Map::new();
    if let Some(points) = points {
        points.write_to(&mut capture);
    }
    capture.insert("final".into(), format.final_state().to_string().into());
    capture.insert("rows".into(), tether_dump::Rows::Prompt.to_string().into());
    Value::Object(capture)
}

/// Waits for the proxy, and stops the run if it does not come.
async fn wait_until_ready(client: &Client, patience: Duration, stop: &Stop) {
    let deadline = tokio::time::Instant::now() + patience;
    let mut said = None;
    while !stop.is_asked() {
        let Readiness::NotYet(reason) = client.readiness().await else { return };
        if tokio::time::Instant::now() >= deadline {
            stop.ask(format!("{} was not ready within {} s: {reason}", client.url(), patience.as_secs_f64()));
            return;
        }
        if said.as_ref() != Some(&reason) {
            tracing::info!(proxy = %client.url(), reason, "waiting for the proxy");
            said = Some(reason);
        }
        tokio::select! {
            () = tokio::time::sleep(READINESS_PAUSE) => {}
            () = stop.asked() => {}
        }
    }
}

/// Keeps up to `most` samples going until none is left.
async fn work(
    extractor: &Arc<Extractor>,
    rows: Vec<crate::dataset::Row>,
    before: &Before,
    tally: &mut Tally,
    terminal: &Terminal,
    most: usize,
    force: bool,
) {
    let stop = &extractor.stop;
    let mut progress = Progress::begin(terminal, tally);
    let mut ticks = tokio::time::interval(progress.interval());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut refresh = tokio::time::interval(REFRESH);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let metrics = &extractor.metrics;
    let mut rows = rows.into_iter();
    let mut tasks = JoinSet::new();
    let (mut failures_in_a_row, mut space_checked) = (0, false);
    loop {
        // One sample alone shows first that the server gives what is needed, and how much room that takes; if it is not
        // answered at once, another has its turn beside it, as the sample may be at fault.
        let ready = extractor.is_confirmed() && space_checked;
        let room = if ready { most } else { most.min(1 + extractor.retrying.load(Ordering::Relaxed)) };
        while tasks.len() < room && !stop.is_asked() {
            let Some(row) = rows.next() else { break };
            tasks.spawn(Arc::clone(extractor).extract(row));
        }
        tokio::select! {
            ended = tasks.join_next() => match ended {
                None => break,
                Some(Ok(Outcome::Done { tokens, bytes })) => {
                    tally.done += 1;
                    tally.tokens += tokens;
                    tally.bytes += bytes;
                    metrics.done(tokens, bytes);
                    failures_in_a_row = 0;
                }
                Some(Ok(Outcome::Failed { tokens, failure })) => {
                    let blamed = failure.kind.blames_the_server(extractor.is_confirmed());
                    failures_in_a_row = if blamed { failures_in_a_row + 1 } else { 0 };
                    let refused = failure.kind == FailureKind::Refused;
                    let most = if refused { MAX_REFUSED_AT_FIRST } else { MAX_FAILURES_IN_A_ROW };
                    if failures_in_a_row >= most {
                        let (word, hint) = if refused {
                            ("were refused", ", none was done: a setting may be wrong")
                        } else {
                            ("failed", "")
                        };
                        let reason = &failure.reason;
                        stop.ask(format!(
                            "{failures_in_a_row} samples {word} one after the other{hint}; last: {reason}"
                        ));
                    }
                    tally.failed_tokens += tokens;
                    metrics.given_up(failure.kind);
                    tally.failures.push(failure);
                }
                Some(Ok(Outcome::Pending)) => {}
                Some(Err(error)) => stop.ask(format!("working on a sample panicked: {error}")),
            },
            _ = ticks.tick() => progress.show(tally),
            _ = refresh.tick() => refresh_metrics(extractor, before, tally),
            () = extractor.one_more_retries.notified(), if !ready => {}
        }
        if extractor.is_confirmed() && !space_checked {
            space_checked = true;
            check_space(extractor, rows.as_slice(), force);
        }
    }
    progress.show(tally);
}

/// Sets the gauges of the whole set and of the disk.
fn refresh_metrics(extractor: &Extractor, before: &Before, tally: &Tally) {
    let metrics = &extractor.metrics;
    metrics.show(before, tally);
    metrics.retrying.set(gauge(extractor.retrying.load(Ordering::Relaxed) as u64));
    if extractor.stop.is_asked() {
        metrics.enter(State::Stopping);
    }
    if let Some(identity) = extractor.identity() {
        let (hidden, planes) = (identity.hidden_size, identity.points.len());
        // The bytes of one sample and those of its container, from two lengths: what is pending is known as sums.
        let container = extractor.format.estimated_bytes(0, hidden, planes);
        let pending = extractor.format.estimated_bytes(tally.pending_tokens(), hidden, planes);
        let needed = pending.saturating_add(container.saturating_mul(tally.pending().saturating_sub(1)));
        metrics.needed_bytes.set(gauge(if tally.pending() == 0 { 0 } else { needed }));
    }
    // A disk that does not answer is found by the next write, and by the check before the run.
    if let Ok(stat) = rustix::fs::statvfs(extractor.store.root()) {
        metrics.free_bytes.set(gauge(stat.f_bavail.saturating_mul(stat.f_frsize)));
    }
}

/// Compares what the rest will take with what is free, and stops the run if that is not enough.
fn check_space(extractor: &Extractor, rest: &[crate::dataset::Row], force: bool) {
    let Some(identity) = extractor.identity() else { return };
    let bytes = |row: &crate::dataset::Row| {
        extractor.format.estimated_bytes(row.tokens, identity.hidden_size, identity.points.len())
    };
    let needed: u64 = rest.iter().map(bytes).sum();
    let free = match rustix::fs::statvfs(extractor.store.root()) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(error) => return tracing::warn!(%error, "cannot tell how much disk is free"),
    };
    let readable = |bytes| indicatif::BinaryBytes(bytes).to_string();
    let (need, have) = (readable(needed), readable(free));
    if needed > free && !force {
        extractor
            .stop
            .ask(format!("the rest needs about {need}, {have} are free; --force begins all the same"));
    } else if needed > free / 10 * 9 {
        tracing::warn!(need, free = have, "the disk may become full");
    } else {
        tracing::info!(need, free = have, "there is room for the rest");
    }
}
