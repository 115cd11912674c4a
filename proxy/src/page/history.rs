//! Half an hour of counters, a point a second, so that a page that is opened late shows what was.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Points kept.
const KEPT: usize = 1800;

/// What is plotted. Counters are totals; who draws them takes differences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// Unix time.
    pub(super) time: f64,
    /// Requests answered.
    pub(super) answered: u64,
    /// Prompt tokens of requests.
    pub(super) tokens: u64,
    /// Requests that failed.
    pub(super) failed: u64,
    /// Requests in flight.
    pub(super) in_flight: i64,
}

/// The points, oldest first.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<VecDeque<Point>>);

impl History {
    pub(super) fn push(&self, point: Point) {
        let mut points = self.lock();
        if points.len() == KEPT {
            points.pop_front();
        }
        points.push_back(point);
    }

    /// Those after `since`.
    pub(super) fn after(&self, since: f64) -> Vec<Point> {
        let points = self.lock();
        let first = points.partition_point(|point| point.time <= since);
        points.range(first..).copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Point>> {
        // Each change leaves a list.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_half_hour_is_kept_and_only_what_is_new_is_told() {
        let history = History::default();
        for time in 0..3000u32 {
            history.push(Point { time: time.into(), answered: 0, tokens: 0, failed: 0, in_flight: 0 });
        }
        let all = history.after(0.0);
        assert_eq!((all.len(), all[0].time, all[KEPT - 1].time), (KEPT, 1200.0, 2999.0));
        assert_eq!(history.after(2997.0).len(), 2);
        assert_eq!(history.after(1e12), []);
    }
}
