//! How many bytes the dump directory may hold: a request reserves its share before it is computed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tether_dump::DumpLayout;
use tokio::sync::Notify;

use crate::error::ApiError;
use crate::metrics::Metrics;

/// Between two looks at the directory.
const RESCAN: Duration = Duration::from_secs(5);
/// The same while a request waits for room, which a client makes by deleting a dump.
const RESCAN_AWAITED: Duration = Duration::from_millis(250);

/// The byte budget of a dump directory. Files count as they are found by a scan, dumps under way as what they reserved.
pub struct Budget {
    dir: PathBuf,
    limit: u64,
    ttl: Option<Duration>,
    state: Mutex<State>,
    /// Room may have been made.
    freed: Notify,
    /// A waiter wants the directory looked at soon.
    wanted: Notify,
    /// Waiters stand here, so that a large request is not overtaken by small ones for ever.
    turn: tokio::sync::Mutex<()>,
    metrics: Metrics,
}

#[derive(Default)]
struct State {
    /// Bytes of files, by the last scan and what was published since.
    used: u64,
    reserved: u64,
    /// Published since the scan that is under way began; it may or may not have seen them.
    during_scan: u64,
    waiting: usize,
    /// Entries of the directory that the last scan could not read.
    unread: usize,
}

/// Bytes set aside for a request until dropped or published.
#[must_use = "dropping a reservation gives it back"]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// The budget of `dir`, with the files that are there counted. With `ttl`, dumps older than that are deleted at
    /// every scan.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub fn new(dir: &Path, limit: u64, ttl: Option<Duration>, metrics: &Metrics) -> io::Result<Arc<Self>> {
        let budget = Self {
            dir: dir.to_owned(),
            limit,
            ttl,
            state: Mutex::default(),
            freed: Notify::new(),
            wanted: Notify::new(),
            turn: tokio::sync::Mutex::default(),
            metrics: metrics.clone(),
        };
        budget.metrics.dump_budget_bytes.set(gauge(limit));
        budget.scan()?;
        Ok(Arc::new(budget))
    }

    /// All that the directory may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Sets `bytes` aside, waiting up to `patience` for clients to delete what they have read.
    ///
    /// # Errors
    /// [`ApiError::OverBudget`] at once if it can never fit, [`ApiError::BudgetSpent`] if it did not in time.
    pub async fn reserve(self: &Arc<Self>, bytes: u64, patience: Duration) -> Result<Reservation, ApiError> {
        if bytes > self.limit {
            return Err(ApiError::OverBudget { needed: bytes, budget: self.limit });
        }
        let waited = tokio::time::timeout(patience, async {
            let _turn = self.turn.lock().await;
            let mut waiting = None;
            loop {
                // Listening begins before the look, or room made in between would go unnoticed.
                let freed = self.freed.notified();
                if let Some(reservation) = self.try_reserve(bytes) {
                    return reservation;
                }
                waiting.get_or_insert_with(|| Waiting::begin(self));
                self.wanted.notify_one();
                freed.await;
            }
        });
        let seconds = patience.as_secs();
        waited.await.map_err(|_| ApiError::BudgetSpent { needed: bytes, seconds })
    }

    /// Sets `bytes` aside if there is room now.
    pub(crate) fn try_reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut state = self.lock();
        if state.used + state.reserved + bytes > self.limit {
            return None;
        }
        state.reserved += bytes;
        self.show(&state);
        Some(Reservation { budget: Arc::clone(self), bytes })
    }

    /// Looks at the directory again and again until `stop`.
    pub async fn keep_scanning(self: Arc<Self>, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        loop {
            let awaited = self.lock().waiting > 0;
            let pause = if awaited { RESCAN_AWAITED } else { RESCAN };
            tokio::select! {
                () = &mut stop => return,
                () = tokio::time::sleep(pause) => {}
                // The first waiter cuts the long pause short; while one waits, the short pause is kept.
                () = self.wanted.notified(), if !awaited => tokio::time::sleep(RESCAN_AWAITED).await,
            }
            let budget = Arc::clone(&self);
            match tokio::task::spawn_blocking(move || budget.scan()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(%error, dir = %self.dir.display(), "cannot scan the dump directory");
                }
                Err(error) => tracing::error!(%error, "the scan of the dump directory ended abnormally"),
            }
        }
    }

    fn scan(&self) -> io::Result<()> {
        self.lock().during_scan = 0;
        let Found { bytes: found, expired, unread } = measure(&self.dir, self.ttl)?;
        if expired > 0 {
            self.metrics.dumps_expired.inc_by(expired);
            tracing::info!(dumps = expired, "removed dumps older than --dump-ttl");
        }
        // Said when it begins, not at every scan.
        let was_unread = std::mem::replace(&mut self.lock().unread, unread.len());
        if let Some(first) = unread.first().filter(|_| unread.len() > was_unread) {
            tracing::error!(entries = unread.len(), first, "a part of the dump directory is not counted");
        }
        if let Ok(stat) = rustix::fs::statvfs(&self.dir) {
            self.metrics.dump_free_bytes.set(gauge(stat.f_bavail.saturating_mul(stat.f_frsize)));
        }
        let mut state = self.lock();
        // What was published meanwhile may be counted twice until the next scan: too careful rather than too bold.
        state.used = found + state.during_scan;
        self.show(&state);
        drop(state);
        self.freed.notify_waiters();
        Ok(())
    }

    fn show(&self, state: &State) {
        self.metrics.dump_used_bytes.set(gauge(state.used));
        self.metrics.dump_reserved_bytes.set(gauge(state.reserved));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is a few numbers, each updated whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Takes `bytes` out into a reservation of their own, one for each prompt of a batch.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { budget: Arc::clone(&self.budget), bytes }
    }

    /// The dump is on disk with `bytes`, counted from now on as a file.
    pub fn publish(self, bytes: u64) {
        let mut state = self.budget.lock();
        state.used += bytes;
        state.during_scan += bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.reserved -= self.bytes;
        self.budget.show(&state);
        drop(state);
        self.budget.freed.notify_waiters();
    }
}

/// Counts a request as waiting for room.
struct Waiting<'a>(&'a Budget);

impl<'a> Waiting<'a> {
    fn begin(budget: &'a Budget) -> Self {
        budget.lock().waiting += 1;
        budget.metrics.budget_waiting.inc();
        Self(budget)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting -= 1;
        self.0.metrics.budget_waiting.dec();
    }
}

/// What a look at the dump directory found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    bytes: u64,
    /// Dumps past their time that were removed.
    expired: u64,
    /// What could not be looked at or removed, and is not counted.
    unread: Vec<String>,
}

/// Bytes of the files in `dir` and of dumps in folders that readers can see, after deleting dumps older than `ttl`. Dot-names are
/// dumps under way, which their reservations count. One entry that cannot be read is no reason not to count the others.
fn measure(dir: &Path, ttl: Option<Duration>) -> io::Result<Found> {
    measure_by(dir, ttl, entry_len)
}

fn measure_by(
    dir: &Path,
    ttl: Option<Duration>,
    entry_len: impl Fn(&fs::DirEntry) -> io::Result<Option<(u64, SystemTime)>>,
) -> io::Result<Found> {
    let mut found = Found::default();
    let now = SystemTime::now();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let (len, modified) = match entry_len(&entry) {
            Ok(Some(measured)) => measured,
            Ok(None) => continue,
            // Deleted by its reader since the listing.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                found.unread.push(format!("{}: {error}", entry.path().display()));
                continue;
            }
        };
        let age = now.duration_since(modified).unwrap_or_default();
        if ttl.is_none_or(|ttl| age <= ttl) || !is_dump(&name) {
            found.bytes += len;
            continue;
        }
        match DumpLayout::remove(&entry.path()) {
            Ok(()) => found.expired += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                found.unread.push(format!(
                    "{} is past --dump-ttl and cannot be removed: {error}",
                    entry.path().display()
                ));
                found.bytes += len;
            }
        }
    }
    Ok(found)
}

/// Bytes of an entry and when it was made; `None` of what is no file and no dump.
fn entry_len(entry: &fs::DirEntry) -> io::Result<Option<(u64, SystemTime)>> {
    let metadata = entry.metadata()?;
    let len = match metadata.is_dir() {
        true if is_dump(&entry.file_name()) => folder_len(&entry.path())?,
        false if metadata.is_file() => metadata.len(),
        _ => return Ok(None),
    };
    Ok(Some((len, metadata.modified()?)))
}

/// Bytes of the files in a dump of the legacy layout.
fn folder_len(folder: &Path) -> io::Result<u64> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let files = match fs::read_dir(folder) {
        // Deleted by its reader since the listing, as each of the files may be.
        Err(error) if gone(&error) => return Ok(0),
        files => files?,
    };
    let mut bytes = 0;
    for file in files {
        match file.and_then(|file| file.metadata()) {
            Err(error) if gone(&error) => {}
            metadata => bytes += metadata?.len(),
        }
    }
    Ok(bytes)
}

fn is_dump(name: &std::ffi::OsStr) -> bool {
    let name = name.to_str();
    let id = name.and_then(|name| name.strip_suffix(".safetensors").or(name.strip_prefix("req_")));
    id.is_some_and(|id| id.parse::<tether_dump::RequestId>().is_ok())
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tether_dump::{RequestId, dump_path};

    const SOON: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn folders_of_dumps_count_with_all_their_files_and_expire_whole() {
        let dir = tempfile::tempdir().unwrap();
        let folder = tether_dump::folder_path(dir.path(), RequestId::new());
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("aux_0.pt"), [0; 700]).unwrap();
        fs::write(folder.join("meta.json"), [0; 50]).unwrap();
        fs::write(folder.join("done"), []).unwrap();
        fs::create_dir(dir.path().join("somebody's")).unwrap();
        fs::write(dir.path().join("somebody's/file"), [0; 9000]).unwrap();
        let found = |ttl| measure(dir.path(), ttl).map(|found| (found.bytes, found.expired)).unwrap();
        assert_eq!(found(None), (750, 0));
        assert_eq!(found(Some(LONG)), (750, 0));
        let old = SystemTime::now() - 2 * LONG;
        fs::File::open(&folder).unwrap().set_modified(old).unwrap();
        assert_eq!(found(Some(LONG)), (0, 1));
        assert!(!folder.exists());
    }

    #[test]
    fn an_entry_that_cannot_be_read_is_named_and_the_others_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let [good, bad] = [RequestId::new(), RequestId::new()].map(|id| dump_path(dir.path(), id));
        fs::write(good, [0; 300]).unwrap();
        fs::write(&bad, [0; 50]).unwrap();
        let refuse = |entry: &fs::DirEntry| match entry.path() == bad {
            true => Err(io::ErrorKind::StaleNetworkFileHandle.into()),
            false => entry_len(entry),
        };
        let found = measure_by(dir.path(), Some(LONG), refuse).unwrap();
        assert_eq!((found.bytes, found.unread.len()), (300, 1));
        assert!(found.unread[0].starts_with(bad.to_str().unwrap()), "{:?}", found.unread);
    }

    fn budget(dir: &Path, limit: u64, ttl: Option<Duration>) -> Arc<Budget> {
        Budget::new(dir, limit, ttl, &Metrics::unregistered()).unwrap()
    }

    #[tokio::test]
    async fn files_and_reservations_together_stay_within_the_budget() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("there-before"), [0; 40]).unwrap();
        let budget = budget(dir.path(), 100, None);
        let first = budget.reserve(50, SOON).await.unwrap();
        let error = budget.reserve(11, SOON).await.map(drop).unwrap_err();
        assert!(matches!(error, ApiError::BudgetSpent { needed: 11, .. }), "{error}");
        let _second = budget.reserve(10, SOON).await.unwrap();
        first.publish(30);
        assert!(budget.try_reserve(20).is_some(), "40 + 30 + 10 + 20");
        assert!(budget.try_reserve(21).is_none());
    }

    #[tokio::test]
    async fn more_than_the_whole_budget_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let error = budget(dir.path(), 100, None).reserve(101, LONG).await.map(drop).unwrap_err();
        assert_eq!(error, ApiError::OverBudget { needed: 101, budget: 100 });
    }

    #[tokio::test]
    async fn a_waiting_request_goes_on_once_a_client_has_deleted_a_dump() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("read-soon");
        fs::write(&file, [0; 100]).unwrap();
        let budget = budget(dir.path(), 100, None);
        let (_stop, stopped) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(Arc::clone(&budget).keep_scanning(async { drop(stopped.await) }));
        let waiter = tokio::spawn({
            let budget = Arc::clone(&budget);
            async move { budget.reserve(60, LONG).await.map(drop) }
        });
        while budget.lock().waiting == 0 {
            tokio::task::yield_now().await;
        }
        fs::remove_file(&file).unwrap();
        waiter.await.unwrap().unwrap();
        let state = budget.lock();
        assert_eq!((state.waiting, state.reserved), (0, 0));
    }

    #[tokio::test]
    async fn a_large_request_is_not_overtaken_by_a_small_one() {
        let dir = tempfile::tempdir().unwrap();
        let budget = budget(dir.path(), 100, None);
        let held = budget.reserve(50, SOON).await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for (name, bytes) in [("large", 90), ("small", 10)] {
            let (budget, order) = (Arc::clone(&budget), Arc::clone(&order));
            tasks.push(tokio::spawn(async move {
                let _reservation = budget.reserve(bytes, LONG).await.unwrap();
                order.lock().unwrap().push(name);
            }));
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(order.lock().unwrap().is_empty(), "10 bytes would fit, but the 90 came first");
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), ["large", "small"]);
    }

    #[test]
    fn only_dumps_past_their_time_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let old = dump_path(dir.path(), RequestId::new());
        let young = dump_path(dir.path(), RequestId::new());
        let other = dir.path().join("notes.txt");
        for path in [&old, &young, &other] {
            fs::write(path, [0; 10]).unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        for path in [&old, &other] {
            fs::File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
        }
        let found = measure(dir.path(), Some(Duration::from_secs(60))).unwrap();
        assert_eq!((found.bytes, found.expired), (20, 1));
        assert!(!old.exists() && young.exists() && other.exists());
    }

    #[tokio::test]
    async fn a_batch_reserves_once_and_gives_each_prompt_its_share() {
        let dir = tempfile::tempdir().unwrap();
        let budget = budget(dir.path(), 100, None);
        let mut whole = budget.reserve(90, SOON).await.unwrap();
        let part = whole.split(40);
        drop(whole);
        assert_eq!(budget.lock().reserved, 40);
        drop(part);
        assert_eq!(budget.lock().reserved, 0);
    }
}
