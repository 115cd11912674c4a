//! Deletes the dumps of replies that could not be delivered, also those that appear later.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use tether_dump::RequestId;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::dump_files;
use crate::metrics::{Metrics, Orphan};

/// For how long a dump that has not appeared is waited for.
pub const REMEMBERED: Duration = Duration::from_secs(600);

/// How long to wait between two looks for a dump: at first, and at most. In between it is an eighth of the time since the
/// reply failed, so a dump that comes 10 s late stays for about 1 s.
const FIRST_GAP: Duration = Duration::from_millis(20);
const LONGEST_GAP: Duration = Duration::from_secs(15);

/// Most IDs that are remembered; about 50 MB. One more pushes out the one that has been waited for longest.
const MOST: usize = 1 << 18;

/// The IDs whose dumps are not wanted. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Orphans {
    watched: Arc<DashMap<RequestId, Arc<Path>>>,
    added: mpsc::UnboundedSender<RequestId>,
    metrics: Arc<Metrics>,
}

/// The task that deletes them.
#[derive(Debug)]
pub struct Sweeper {
    orphans: Orphans,
    added: mpsc::UnboundedReceiver<RequestId>,
}

/// When to look next, for what, and since when it is watched.
type Due = Reverse<(Instant, RequestId, Instant)>;

impl Orphans {
    /// An empty set, and what must be run for anything to be deleted.
    pub fn new(metrics: Arc<Metrics>) -> (Self, Sweeper) {
        let (added, receiver) = mpsc::unbounded_channel();
        let orphans = Self { watched: Arc::default(), added, metrics };
        (orphans.clone(), Sweeper { orphans, added: receiver })
    }

    /// From now on the dump of `id` is deleted, now or when it appears in `dir`.
    pub fn add(&self, id: RequestId, dir: Arc<Path>) {
        if self.watched.insert(id, dir).is_none() {
            self.metrics.orphans_watched.inc();
        }
        // The sweeper is only gone when the process ends.
        let _ = self.added.send(id);
    }

    /// The dump of `id` is wanted again: the client has sent the same ID once more. Where it was watched for, if it was.
    pub fn forget(&self, id: RequestId) -> Option<Arc<Path>> {
        if self.watched.is_empty() {
            return None;
        }
        let (_, dir) = self.watched.remove(&id)?;
        self.metrics.orphans_watched.dec();
        Some(dir)
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.watched.len()
    }

    /// Whether none is remembered.
    pub fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    fn done(&self, id: RequestId, how: Orphan) {
        if self.watched.remove(&id).is_some() {
            self.metrics.orphans_watched.dec();
            self.metrics.orphans.at(how).inc();
        }
    }

    /// Tries to delete the dump of `id`. Whether it need not be looked for again.
    fn look(&self, id: RequestId) -> bool {
        let Some(dir) = self.watched.get(&id).map(|dir| dir.clone()) else { return true };
        match dump_files::remove(&dir, id) {
            Ok(true) => {
                info!(request_id = %id, "deleted the dump of an undelivered reply");
                self.done(id, Orphan::Deleted);
                true
            }
            Ok(false) => false,
            Err(error) => {
                warn!(request_id = %id, %error, "cannot delete the dump of an undelivered reply, will try again");
                false
            }
        }
    }

    /// Looks at all of them once, for the last time.
    pub fn sweep(&self) {
        let ids: Vec<_> = self.watched.iter().map(|entry| *entry.key()).collect();
        ids.into_iter().for_each(|id| {
            self.look(id);
        });
    }
}

impl Sweeper {
    /// Deletes dumps until all [`Orphans`] are gone.
    pub async fn run(self) {
        let Self { orphans, mut added } = self;
        let mut due: BinaryHeap<Due> = BinaryHeap::new();
        loop {
            let next = due.peek().map(|Reverse((at, ..))| *at);
            tokio::select! {
                id = added.recv() => {
                    let Some(id) = id else { return };
                    let now = Instant::now();
                    due.push(Reverse((now, id, now)));
                }
                () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let now = Instant::now();
                    let mut batch = Vec::new();
                    while due.peek().is_some_and(|Reverse((at, ..))| *at <= now) || due.len() > MOST {
                        batch.extend(due.pop());
                    }
                    let looker = orphans.clone();
                    let work = move || {
                        batch.retain(|Reverse((_, id, ..))| !looker.look(*id));
                        batch
                    };
                    let Ok(left) = tokio::task::spawn_blocking(work).await else { return };
                    let room = MOST.saturating_sub(due.len());
                    for (index, Reverse((_, id, since))) in left.into_iter().enumerate() {
                        let age = now - since;
                        if age >= REMEMBERED || index >= room {
                            debug!(request_id = %id, "no dump of an undelivered reply has appeared");
                            orphans.done(id, Orphan::Expired);
                            continue;
                        }
                        due.push(Reverse((Instant::now() + (age / 8).clamp(FIRST_GAP, LONGEST_GAP), id, since)));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    fn orphans() -> (Orphans, Arc<Metrics>) {
        let metrics = Arc::new(Metrics::register(&Registry::new()).unwrap());
        let (orphans, sweeper) = Orphans::new(metrics.clone());
        tokio::spawn(sweeper.run());
        (orphans, metrics)
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        tokio::time::timeout(Duration::from_secs(30), async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"));
    }

    #[tokio::test]
    async fn dumps_of_both_layouts_are_deleted_also_when_they_come_late() {
        let dir = tempfile::tempdir().unwrap();
        let (orphans, metrics) = orphans();
        let (early, late, legacy) = (RequestId::new(), RequestId::new(), RequestId::new());
        let path = |id| tether_dump::dump_path(dir.path(), id);
        std::fs::write(path(early), b"dump").unwrap();
        for id in [early, late, legacy] {
            orphans.add(id, dir.path().into());
        }
        until("the first deletion", || !path(early).exists()).await;
        let folder = dir.path().join(format!("req_{legacy}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("done"), b"").unwrap();
        std::fs::write(path(late), b"dump").unwrap();
        until("the late deletions", || !path(late).exists() && !folder.exists()).await;
        until("the end of the watch", || orphans.is_empty()).await;
        assert_eq!(metrics.orphans.at(Orphan::Deleted).get(), 3);
        assert_eq!(metrics.orphans_watched.get(), 0);
    }

    #[tokio::test]
    async fn an_id_that_is_wanted_again_keeps_its_dump() {
        let dir = tempfile::tempdir().unwrap();
        let (orphans, _) = orphans();
        let (again, witness) = (RequestId::new(), RequestId::new());
        orphans.add(again, dir.path().into());
        orphans.forget(again);
        let path = |id| tether_dump::dump_path(dir.path(), id);
        std::fs::write(path(again), b"dump").unwrap();
        std::fs::write(path(witness), b"dump").unwrap();
        orphans.add(witness, dir.path().into());
        until("the sweep", || !path(witness).exists()).await;
        assert!(path(again).exists());
    }

    #[tokio::test(start_paused = true)]
    async fn an_id_whose_dump_never_comes_is_forgotten_after_ten_minutes() {
        let dir = tempfile::tempdir().unwrap();
        let (orphans, metrics) = orphans();
        orphans.add(RequestId::new(), dir.path().into());
        tokio::time::sleep(REMEMBERED - Duration::from_secs(20)).await;
        assert_eq!(orphans.len(), 1);
        tokio::time::sleep(Duration::from_secs(40)).await;
        until("forgetting", || orphans.is_empty()).await;
        assert_eq!(metrics.orphans.at(Orphan::Expired).get(), 1);
    }
}
