//! The bounded queue between the HTTP side and the engine thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::Job;
use crate::error::ApiError;
use crate::metrics::Metrics;

/// Jobs that wait for their first step, in order of arrival.
pub(super) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    limit: usize,
    metrics: Metrics,
}

struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    pub(super) fn new(limit: usize, metrics: Metrics) -> Self {
        let state = State { jobs: VecDeque::new(), closed: false };
        Self { state: Mutex::new(state), wake: Condvar::new(), limit, metrics }
    }

    /// Queues all of `jobs` or none. A batch longer than the whole queue goes in when nothing else waits.
    pub(super) fn push(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state.closed {
            return Err(ApiError::EngineStopped);
        }
        // A withdrawn job takes no place, even if the engine has not come by to drop it.
        if state.jobs.len() + jobs.len() > self.limit {
            drop_withdrawn(&mut state.jobs);
        }
        if !state.jobs.is_empty() && state.jobs.len() + jobs.len() > self.limit {
            self.show(&state);
            return Err(ApiError::QueueFull);
        }
        state.jobs.extend(jobs);
        self.show(&state);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Lets `choose` take jobs from the head. Waits for one if `idle`; `None` once the queue is closed.
    pub(super) fn take<T>(&self, idle: bool, choose: impl FnOnce(&mut VecDeque<Job>) -> T) -> Option<T> {
        let mut state = self.lock();
        loop {
            drop_withdrawn(&mut state.jobs);
            if state.closed {
                return None;
            }
            if !state.jobs.is_empty() || !idle {
                break;
            }
            self.show(&state);
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let chosen = choose(&mut state.jobs);
        self.show(&state);
        Some(chosen)
    }

    /// Takes no more jobs and answers those that wait.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        self.show(&state);
        drop(state);
        self.wake.notify_all();
        for job in jobs {
            job.refuse(ApiError::EngineStopped);
        }
    }

    /// Closes the queue when dropped.
    pub(super) fn close_on_drop(&self) -> impl Drop + '_ {
        struct Closing<'a>(&'a Queue);
        impl Drop for Closing<'_> {
            fn drop(&mut self) {
                self.0.close();
            }
        }
        Closing(self)
    }

    fn show(&self, state: &State) {
        self.metrics.queue_depth.set(i64::try_from(state.jobs.len()).unwrap_or(i64::MAX));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can happen between two related changes of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn drop_withdrawn(jobs: &mut VecDeque<Job>) {
    if jobs.iter().any(|job| job.ticket.withdrawn().is_some()) {
        let all = std::mem::take(jobs).into_iter();
        let (withdrawn, waiting): (VecDeque<Job>, _) = all.partition(|job| job.ticket.withdrawn().is_some());
        *jobs = waiting;
        withdrawn.into_iter().for_each(Job::answer_withdrawn);
    }
}
