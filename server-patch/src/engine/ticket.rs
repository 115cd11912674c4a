//! The state of a job that its client and the engine share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Where a job is. The client's side withdraws it, the engine's side moves it on; whoever comes first wins.
#[derive(Debug)]
pub struct Ticket(AtomicU8);

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
        Arc::new(Self(AtomicU8::new(QUEUED)))
    }

    /// The job goes into its first step; `false` if it was withdrawn.
    pub(crate) fn start(&self) -> bool {
        self.0.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Withdraws the job if it has not started; `false` if it has.
    pub(crate) fn expire(&self) -> bool {
        self.0.compare_exchange(QUEUED, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The job has its result: it can no longer be withdrawn. `false` if it was before.
    pub(crate) fn finish(&self) -> bool {
        self.0.compare_exchange(RUNNING, FINISHED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Withdraws the job wherever it is, unless it has ended.
    pub fn withdraw(&self, why: Withdrawn) {
        let to = match why {
            Withdrawn::Gone => GONE,
            Withdrawn::Aborted => ABORTED,
        };
        let open = |state| (state == QUEUED || state == RUNNING).then_some(to);
        // Nothing to do for one that has ended or was withdrawn already.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, open);
    }

    /// Whether and why the job was withdrawn.
    pub fn withdrawn(&self) -> Option<Withdrawn> {
        match self.0.load(Ordering::Acquire) {
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
