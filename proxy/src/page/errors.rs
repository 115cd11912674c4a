//! The last errors, in memory.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tether_dump::RequestId;

/// How many are kept.
const KEPT: usize = 50;
/// Longest message kept, in bytes: a client may have put much into it.
const MESSAGE: usize = 400;

/// One request that went wrong.
#[derive(Clone, Debug, Serialize)]
pub struct RecentError {
    /// When, Unix time.
    pub time: f64,
    /// Which request.
    pub request_id: RequestId,
    /// What was asked for.
    pub route: &'static str,
    /// Status of the reply.
    pub status: u16,
    /// Where it went.
    pub upstream: Option<String>,
    /// In words.
    pub message: String,
}

/// A list that forgets its oldest.
#[derive(Debug, Default)]
pub struct RecentErrors(Mutex<VecDeque<RecentError>>);

impl RecentErrors {
    /// Adds one, as the newest.
    pub fn push(&self, mut error: RecentError) {
        if error.message.len() > MESSAGE {
            error.message.truncate(error.message.floor_char_boundary(MESSAGE));
            error.message.push('…');
        }
        let mut list = self.lock();
        list.push_front(error);
        list.truncate(KEPT);
    }

    /// All that are kept, the newest first.
    pub fn all(&self) -> Vec<RecentError> {
        self.lock().iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<RecentError>> {
        // Each change leaves a list.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_come_first_and_the_list_does_not_grow_without_end() {
        let errors = RecentErrors::default();
        for time in 0..200 {
            errors.push(RecentError {
                time: f64::from(time),
                request_id: RequestId::new(),
                route: "generate",
                status: 502,
                upstream: None,
                message: "ä".repeat(1000),
            });
        }
        let all = errors.all();
        assert_eq!((all.len(), all[0].time, all[KEPT - 1].time), (KEPT, 199.0, 150.0));
        assert!(all.iter().all(|error| error.message.len() <= MESSAGE + 3 && error.message.ends_with('…')));
    }
}
