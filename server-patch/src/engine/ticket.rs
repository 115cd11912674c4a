//! The state of a job that its client and the engine share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::Notify;

/// Where a job is. The client's side withdraws it, the engine's side moves it on; whoever comes first wins.
#[derive(Debug)]
pub struct Ticket {
    state: AtomicU8,
    withdrawal: Notify,
}

/// Why a job was withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    /// Nobody waits for the answer any more.
    Gone,
    /// `/abort_request` named it: the answer says so.
    Aborted,
}

const QUEUED: u8 = 0;
const RUNNING: u8 = 1;
const FINISHED: u8 = 2;
const GONE: u8 = 3;
const ABORTED: u8 = 4;

impl Ticket {
    /// Of a job that waits.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(QUEUED), withdrawal: Notify::new() })
    }

    /// The job goes into its first step; `false` if it was withdrawn.
    pub(crate) fn start(&self) -> bool {
        self.state.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Withdraws the job if it has not started; `false` if it has.
    pub(crate) fn expire(&self) -> bool {
        self.state.compare_exchange(QUEUED, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The job has its result: it can no longer be withdrawn. `false` if it was before.
    pub(crate) fn finish(&self) -> bool {
        self.state.compare_exchange(RUNNING, FINISHED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Withdraws the job wherever it is, unless it has ended.
    pub fn withdraw(&self, why: Withdrawn) {
        let to = match why {
            Withdrawn::Gone => GONE,
            Withdrawn::Aborted => ABORTED,
        };
        let open = |state| (state == QUEUED || state == RUNNING).then_some(to);
        // Nothing to do for one that has ended or was withdrawn already.
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, open);
        self.withdrawal.notify_waiters();
    }

    /// Returns once the job is withdrawn.
    pub(crate) async fn wait_withdrawn(&self) {
        loop {
            // Listening begins before the look, or a withdrawal in between would go unnoticed.
            let mut withdrawal = std::pin::pin!(self.withdrawal.notified());
            withdrawal.as_mut().enable();
            if self.withdrawn().is_some() {
                return;
            }
            withdrawal.await;
        }
    }

    /// Whether and why the job was withdrawn.
    pub fn withdrawn(&self) -> Option<Withdrawn> {
        match self.state.load(Ordering::Acquire) {
            GONE => Some(Withdrawn::Gone),
            ABORTED => Some(Withdrawn::Aborted),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_started_does_not_expire_and_one_that_expired_does_not_start() {
        let ticket = Ticket::new();
        assert!(ticket.start());
        assert!(!ticket.expire());
        let ticket = Ticket::new();
        assert!(ticket.expire());
        assert!(!ticket.start());
    }

    #[test]
    fn a_job_is_withdrawn_until_it_has_its_result() {
        let ticket = Ticket::new();
        assert!(ticket.start());
        ticket.withdraw(Withdrawn::Aborted);
        ticket.withdraw(Withdrawn::Gone);
        assert_eq!(ticket.withdrawn(), Some(Withdrawn::Aborted), "the first one counts");
        assert!(!ticket.finish());
        let ticket = Ticket::new();
        assert!(ticket.start() && ticket.finish());
        ticket.withdraw(Withdrawn::Gone);
        assert_eq!(ticket.withdrawn(), None);
    }
}
