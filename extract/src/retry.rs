//! When a sample is tried again, and when it is given up.

use std::time::{Duration, Instant};

use http::StatusCode;

use crate::client::CallError;

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What a failed attempt says about trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Another attempt would end the same way.
    Final,
    /// Another sample would end the same way: it is the address or the permission that is wrong.
    Hopeless,
    /// It may have been chance; each counts against the sample's attempts.
    Counted,
    /// The server is alive and asks for patience: only time is counted.
    Busy(Option<Duration>),
    /// Nobody answers. Counts against the sample only if the server is alive all the same: then it may be this sample
    /// that it does not survive.
    Unreachable,
}

impl Kind {
    /// What a failed call says.
    pub fn of(error: &CallError) -> Self {
        match error {
            CallError::NoAnswer(_) => Self::Unreachable,
            CallError::Reply(_) | CallError::Mismatch { .. } => Self::Counted,
            CallError::Status { status, retry_after, .. } => match *status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Self::Busy(*retry_after),
                StatusCode::REQUEST_TIMEOUT | StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => {
                    Self::Unreachable
                }
                // An ID in use. The next attempt has another.
                StatusCode::CONFLICT => Self::Counted,
                status if status.is_server_error() => Self::Counted,
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => Self::Hopeless,
                // Redirects too: the address is not the proxy's.
                status if status.is_redirection() => Self::Hopeless,
                _ => Self::Final,
            },
        }
    }
}

/// How often and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Attempts after the first that may fail.
    pub retries: u32,
    /// How long a server may be busy or gone.
    pub patience: Duration,
}

/// The attempts at one sample.
#[derive(Debug)]
pub struct Attempts {
    policy: Policy,
    /// Attempts made.
    pub made: u32,
    counted: u32,
    pauses: u32,
    /// Since when the server has been busy or gone for this sample.
    waiting_since: Option<Instant>,
}

/// What to do after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try again after a pause.
    After(Duration),
    /// The sample has failed.
    GiveUp,
    /// Nobody has been answered for as long as the policy allows: the run cannot go on.
    Outage,
}

impl Attempts {
    /// None made yet.
    pub fn new(policy: Policy) -> Self {
        Self { policy, made: 0, counted: 0, pauses: 0, waiting_since: None }
    }

    /// Judges an attempt that began at `began` and failed at `now`. `alive` is whether the server is known to be up, and
    /// `last_answer` when any sample was last answered.
    pub fn failed(
        &mut self,
        kind: Kind,
        began: Instant,
        alive: bool,
        last_answer: Option<Instant>,
        now: Instant,
    ) -> Next {
        self.made += 1;
        let counts = match kind {
            Kind::Final | Kind::Hopeless => return Next::GiveUp,
            Kind::Counted => true,
            Kind::Busy(_) => false,
            Kind::Unreachable => alive,
        };
        if counts {
            self.counted += 1;
            self.waiting_since = None;
            if self.counted > self.policy.retries {
                return Next::GiveUp;
            }
        } else {
            let since = *self.waiting_since.get_or_insert(began);
            if now.duration_since(since) >= self.policy.patience {
                let silent_since = last_answer.unwrap_or(since).max(since);
                let outage = now.duration_since(silent_since) >= self.policy.patience;
                return if outage { Next::Outage } else { Next::GiveUp };
            }
        }
        let pause = (FIRST_PAUSE * 2u32.saturating_pow(self.pauses.min(10))).min(LONGEST_PAUSE);
        self.pauses += 1;
        let pause = match kind {
            Kind::Busy(Some(asked)) => asked.max(FIRST_PAUSE),
            _ => pause,
        };
        // Spread by up to a quarter, so that many samples do not come back in step.
        Next::After(pause + pause.mul_f64(f64::from(now.elapsed().subsec_nanos() % 1000) / 4000.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy { retries: 3, patience: Duration::from_secs(60) };

    fn status(code: u16, retry_after: Option<u64>) -> CallError {
        let status = StatusCode::from_u16(code).unwrap();
        CallError::Status { status, text: String::new(), retry_after: retry_after.map(Duration::from_secs) }
    }

    #[test]
    fn every_status_has_its_kind() {
        for (code, kind) in [
            (302, Kind::Hopeless),
            (400, Kind::Final),
            (401, Kind::Hopeless),
            (403, Kind::Hopeless),
            (404, Kind::Hopeless),
            (413, Kind::Final),
            (408, Kind::Unreachable),
            (409, Kind::Counted),
            (429, Kind::Busy(None)),
            (500, Kind::Counted),
            (502, Kind::Unreachable),
            (503, Kind::Busy(None)),
            (504, Kind::Unreachable),
        ] {
            assert_eq!(Kind::of(&status(code, None)), kind, "{code}");
        }
        assert_eq!(Kind::of(&status(503, Some(7))), Kind::Busy(Some(Duration::from_secs(7))));
        assert_eq!(Kind::of(&CallError::NoAnswer(String::new())), Kind::Unreachable);
        assert_eq!(Kind::of(&CallError::Mismatch { text: String::new() }), Kind::Counted);
    }

    #[test]
    fn attempts_are_bounded_and_pauses_grow() {
        let mut attempts = Attempts::new(POLICY);
        let now = Instant::now();
        let mut last = Duration::ZERO;
        for _ in 0..3 {
            let Next::After(pause) = attempts.failed(Kind::Counted, now, true, Some(now), now) else {
                panic!()
            };
            assert!(pause > last && pause < LONGEST_PAUSE * 2);
            last = pause;
        }
        assert_eq!(attempts.failed(Kind::Counted, now, true, Some(now), now), Next::GiveUp);
        assert_eq!(attempts.made, 4);
    }

    #[test]
    fn a_final_failure_is_not_repeated() {
        let now = Instant::now();
        assert_eq!(Attempts::new(POLICY).failed(Kind::Final, now, true, None, now), Next::GiveUp);
    }

    #[test]
    fn a_server_that_is_gone_uses_up_time_and_no_attempts() {
        let start = Instant::now();
        let mut attempts = Attempts::new(POLICY);
        for second in 0..60 {
            let now = start + Duration::from_secs(second);
            assert!(
                matches!(attempts.failed(Kind::Unreachable, now, false, None, now), Next::After(_)),
                "{second}"
            );
        }
        let end = start + Duration::from_secs(60);
        assert_eq!(attempts.failed(Kind::Unreachable, end, false, None, end), Next::Outage);
    }

    #[test]
    fn a_sample_that_a_live_server_does_not_answer_is_given_up() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let mut attempts = Attempts::new(POLICY);
        for _ in 0..3 {
            assert!(matches!(attempts.failed(Kind::Unreachable, start, true, None, later), Next::After(_)));
        }
        assert_eq!(attempts.failed(Kind::Unreachable, start, true, None, later), Next::GiveUp);
    }

    #[test]
    fn a_busy_server_is_asked_again_when_it_says_and_given_up_in_the_end() {
        let start = Instant::now();
        let mut attempts = Attempts::new(POLICY);
        let asked = Duration::from_secs(7);
        let Next::After(pause) = attempts.failed(Kind::Busy(Some(asked)), start, true, Some(start), start)
        else {
            panic!()
        };
        assert!(pause >= asked && pause < asked * 2);
        let end = start + Duration::from_secs(61);
        let answered = end - Duration::from_secs(1);
        assert_eq!(attempts.failed(Kind::Busy(None), end, true, Some(answered), end), Next::GiveUp);
    }
}
