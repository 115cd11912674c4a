//! How many generations run at once, and how many wait for their turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A limit on what runs at once, with a queue in front. Who waits longest goes first.
#[derive(Debug)]
pub struct Admission {
    /// `None` without a limit.
    running: Option<Arc<Semaphore>>,
    limit: usize,
    queue: usize,
    timeout: Duration,
    waiting: AtomicUsize,
    gauge: IntGauge,
}

/// The right to run, given back when dropped. Without a limit there is nothing to give back.
#[derive(Debug)]
#[must_use = "dropping this lets another request run"]
pub struct Permit {
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why a request may not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Busy {
    /// As many wait as may.
    #[error(
        "{limit} requests are running and {queue} are waiting, which is as many as may; see --max-concurrent and --queue"
    )]
    Full {
        /// Most requests that run.
        limit: usize,
        /// Most that wait.
        queue: usize,
    },
    /// It has waited as long as one may.
    #[error("none of the {limit} requests that are running has ended within {} s; see --queue-timeout", after.as_secs_f64())]
    TimedOut {
        /// Most requests that run.
        limit: usize,
        /// How long it waited.
        after: Duration,
    },
}

/// Counts a request as waiting until dropped, so that a client that goes away while it waits frees its place.
struct Waiting<'a>(&'a Admission);

impl Admission {
    /// At most `limit` at once, or any number if it is 0, and at most `queue` waiting, each for `timeout`. `gauge` shows how
    /// many wait.
    pub fn new(limit: usize, queue: usize, timeout: Duration, gauge: IntGauge) -> Self {
        let running = (limit > 0).then(|| Arc::new(Semaphore::new(limit)));
        Self { running, limit, queue, timeout, waiting: AtomicUsize::new(0), gauge }
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// See [`Busy`].
    pub async fn enter(&self) -> Result<Permit, Busy> {
        let Some(running) = &self.running else { return Ok(Permit { _permit: None }) };
        // Fails also while others wait: a permit that is given back goes to the first of them.
        if let Ok(permit) = running.clone().try_acquire_owned() {
            return Ok(Permit { _permit: Some(permit) });
        }
        let _waiting = self.wait().ok_or(Busy::Full { limit: self.limit, queue: self.queue })?;
        match tokio::time::timeout(self.timeout, running.clone().acquire_owned()).await {
            Ok(permit) => Ok(Permit { _permit: Some(permit.expect("the semaphore is never closed")) }),
            Err(_) => Err(Busy::TimedOut { limit: self.limit, after: self.timeout }),
        }
    }

    /// A place in the queue, if there is one.
    fn wait(&self) -> Option<Waiting<'_>> {
        let one_more = |waiting| (waiting < self.queue).then_some(waiting + 1);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        self.gauge.inc();
        Some(Waiting(self))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        self.0.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(limit: usize, queue: usize) -> (Arc<Admission>, IntGauge) {
        let gauge = IntGauge::new("waiting", "waiting").unwrap();
        (Arc::new(Admission::new(limit, queue, Duration::from_secs(60), gauge.clone())), gauge)
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_refuses_at_once_and_a_place_in_it_expires() {
        let (admission, gauge) = admission(1, 1);
        let first = admission.enter().await.unwrap();
        let second = tokio::spawn({
            let admission = admission.clone();
            async move { admission.enter().await.map(drop) }
        });
        tokio::task::yield_now().await;
        assert_eq!(gauge.get(), 1);
        assert_eq!(admission.enter().await.unwrap_err(), Busy::Full { limit: 1, queue: 1 });
        let expired = second.await.unwrap();
        assert_eq!(expired, Err(Busy::TimedOut { limit: 1, after: Duration::from_secs(60) }));
        assert_eq!(gauge.get(), 0);
        drop(first);
        drop(admission.enter().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn who_goes_away_while_waiting_frees_the_place_and_the_next_gets_the_turn() {
        let (admission, gauge) = admission(1, 2);
        let first = admission.enter().await.unwrap();
        let enter = |admission: Arc<Admission>| tokio::spawn(async move { admission.enter().await });
        let (gone, next) = (enter(admission.clone()), enter(admission.clone()));
        tokio::task::yield_now().await;
        assert_eq!(gauge.get(), 2);
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        assert_eq!(gauge.get(), 1);
        drop(first);
        assert!(next.await.unwrap().is_ok());
        assert_eq!(gauge.get(), 0);
    }

    #[tokio::test]
    async fn without_a_limit_everybody_runs() {
        let (admission, gauge) = admission(0, 0);
        let mut permits = Vec::new();
        for _ in 0..1000 {
            permits.push(admission.enter().await.unwrap());
        }
        assert_eq!(gauge.get(), 0);
    }
}
