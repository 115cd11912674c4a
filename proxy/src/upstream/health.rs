//! Whether an upstream gets requests: what its health checks say, and what its answers say.
//!
//! - **Health check**: `GET` of a path at an interval. A number of failures in a row takes the upstream out, a number of
//!   passes in a row brings it back.
//! - **Circuit breaker**: a number of requests in a row that failed for the upstream's own reasons (no connection, none
//!   kept up to the reply's head, silence, a 5xx) opens it. While it is open, one request in each [`Limits::open`] is let
//!   through on trial; what comes of that one closes the breaker or leaves it open. A trial that the client gave up on
//!   says nothing, and the next is as far away as after any other.
//!
//! Errors of the client (4xx) and words of a busy server (429, 503) are neither failures nor successes: a client that sends
//! nonsense, or a queue that is full, must not take a server away from everybody else.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::StatusCode;

/// When an upstream is taken out and brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Failed requests in a row that open the breaker; 0 for none that ever do.
    pub failures: u32,
    /// How long the breaker keeps requests away, between one trial and the next.
    pub open: Duration,
    /// Failed health checks in a row that take the upstream out.
    pub failed_checks: u32,
    /// Passed health checks in a row that bring it back.
    pub passed_checks: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { failures: 10, open: Duration::from_secs(5), failed_checks: 3, passed_checks: 2 }
    }
}

/// The state of the circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breaker {
    /// Requests pass.
    Closed,
    /// Requests are kept away.
    Open,
    /// The next request is let through on trial.
    HalfOpen,
}

/// What a reply says of the upstream that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It works.
    Success,
    /// It does not.
    Failure,
    /// Nothing.
    Neutral,
}

/// Health of one upstream. Times are milliseconds since it was made, and 0 stands for none.
#[derive(Debug)]
pub struct Health {
    limits: Limits,
    made: Instant,
    failures: AtomicU32,
    open_until: AtomicU64,
    checks_failed: AtomicU32,
    checks_passed: AtomicU32,
    out: AtomicBool,
}

impl Verdict {
    /// Of a reply with this status.
    pub fn of(status: StatusCode) -> Self {
        match status.as_u16() {
            400..500 | 503 => Self::Neutral,
            500.. => Self::Failure,
            _ => Self::Success,
        }
    }
}

impl Health {
    /// Of an upstream of which nothing bad is known.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            made: Instant::now(),
            failures: AtomicU32::new(0),
            open_until: AtomicU64::new(0),
            checks_failed: AtomicU32::new(0),
            checks_passed: AtomicU32::new(0),
            out: AtomicBool::new(false),
        }
    }

    /// Whether a request may go there now.
    pub fn allows(&self) -> bool {
        !self.out.load(Ordering::Relaxed) && self.breaker() != Breaker::Open
    }

    /// Takes the right to send one request. `false` if another request took the trial first.
    pub fn admit(&self) -> bool {
        let until = self.open_until.load(Ordering::Acquire);
        if until == 0 {
            return true;
        }
        let now = self.now();
        if now < until {
            return false;
        }
        let next = now + millis(self.limits.open);
        self.open_until.compare_exchange(until, next, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The state of the breaker.
    pub fn breaker(&self) -> Breaker {
        match self.open_until.load(Ordering::Acquire) {
            0 => Breaker::Closed,
            until if self.now() < until => Breaker::Open,
            _ => Breaker::HalfOpen,
        }
    }

    /// Whether health checks have taken it out.
    pub fn is_out(&self) -> bool {
        self.out.load(Ordering::Relaxed)
    }

    /// How long until the breaker lets a request try, at the earliest.
    pub fn wait(&self) -> Duration {
        Duration::from_millis(self.open_until.load(Ordering::Acquire).saturating_sub(self.now()))
    }

    /// Notes what came of a request. The breaker's new state, if it changed between closed and not.
    pub fn note(&self, verdict: Verdict) -> Option<Breaker> {
        match verdict {
            Verdict::Neutral => None,
            Verdict::Success => {
                // Written only if it changes something: all connections share this line of the cache.
                if self.failures.load(Ordering::Relaxed) != 0 {
                    self.failures.store(0, Ordering::Relaxed);
                }
                if self.open_until.load(Ordering::Acquire) == 0 {
                    return None;
                }
                (self.open_until.swap(0, Ordering::AcqRel) != 0).then_some(Breaker::Closed)
            }
            Verdict::Failure => {
                let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                if self.limits.failures == 0 || failures < self.limits.failures {
                    return None;
                }
                let until = self.now() + millis(self.limits.open);
                (self.open_until.swap(until, Ordering::AcqRel) == 0).then_some(Breaker::Open)
            }
        }
    }

    /// Notes what came of a health check. Whether the upstream is out, if that changed.
    pub fn checked(&self, passed: bool) -> Option<bool> {
        let (mine, other, limit) = if passed {
            (&self.checks_passed, &self.checks_failed, self.limits.passed_checks)
        } else {
            (&self.checks_failed, &self.checks_passed, self.limits.failed_checks)
        };
        other.store(0, Ordering::Relaxed);
        let in_a_row = mine.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let out = !passed;
        (in_a_row >= limit && self.out.swap(out, Ordering::Relaxed) != out).then_some(out)
    }

    fn now(&self) -> u64 {
        // Never 0, which stands for none.
        millis(self.made.elapsed()) + 1
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { failures: 3, open: Duration::from_secs(3600), failed_checks: 2, passed_checks: 2 };

    #[test]
    fn only_failures_in_a_row_open_the_breaker() {
        let health = Health::new(LIMITS);
        for _ in 0..5 {
            assert_eq!(health.note(Verdict::Failure), None);
            assert_eq!(health.note(Verdict::Failure), None);
            assert_eq!(health.note(Verdict::Success), None);
        }
        health.note(Verdict::Failure);
        health.note(Verdict::Neutral);
        health.note(Verdict::Failure);
        assert_eq!(health.note(Verdict::Failure), Some(Breaker::Open));
        assert!(!health.allows() && !health.admit());
        assert!(health.wait() > Duration::from_secs(3000));
        assert_eq!(health.note(Verdict::Success), Some(Breaker::Closed));
        assert!(health.allows() && health.admit());
    }

    #[test]
    fn the_client_s_errors_and_a_busy_server_say_nothing() {
        for status in [400, 404, 408, 413, 422, 429, 499, 503] {
            assert_eq!(Verdict::of(StatusCode::from_u16(status).unwrap()), Verdict::Neutral, "{status}");
        }
        for (status, verdict) in [
            (200, Verdict::Success),
            (307, Verdict::Success),
            (500, Verdict::Failure),
            (504, Verdict::Failure),
        ] {
            assert_eq!(Verdict::of(StatusCode::from_u16(status).unwrap()), verdict, "{status}");
        }
    }

    #[test]
    fn an_open_breaker_lets_one_request_try_at_a_time() {
        let health = Health::new(Limits { open: Duration::from_millis(20), ..LIMITS });
        for _ in 0..3 {
            health.note(Verdict::Failure);
        }
        while !health.allows() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(health.breaker(), Breaker::HalfOpen);
        // The next trial is far away, whatever this machine does in between.
        let health = Health { limits: LIMITS, ..health };
        assert!(health.admit());
        assert!(!health.admit());
        assert_eq!(health.note(Verdict::Failure), None);
        assert_eq!(health.breaker(), Breaker::Open);
    }

    #[test]
    fn a_breaker_that_is_switched_off_stays_closed() {
        let health = Health::new(Limits { failures: 0, ..LIMITS });
        (0..100).for_each(|_| assert_eq!(health.note(Verdict::Failure), None));
        assert!(health.allows());
    }

    #[test]
    fn health_checks_count_in_a_row_in_both_directions() {
        let health = Health::new(LIMITS);
        assert_eq!(health.checked(false), None);
        assert_eq!(health.checked(true), None);
        assert_eq!(health.checked(false), None);
        assert!(health.allows());
        assert_eq!(health.checked(false), Some(true));
        assert_eq!(health.checked(false), None);
        assert!(!health.allows() && health.is_out());
        assert_eq!(health.checked(true), None);
        assert_eq!(health.checked(true), Some(false));
        assert!(health.allows());
    }
}
