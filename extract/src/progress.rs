//! Shows how a run gets on: a bar on a terminal, a line every few seconds elsewhere.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal as _, Write},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};

use crate::tally::Tally;

/// How often a bar moves.
const BAR_INTERVAL: Duration = Duration::from_millis(250);
/// How often a line is logged.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// "Now" is the mean over this long.
const WINDOW: Duration = Duration::from_secs(30);

/// The bar that is on the terminal now, if any. Log lines go around it.
#[derive(Clone, Debug, Default)]
pub struct Terminal(Arc<Mutex<Option<ProgressBar>>>);

impl Terminal {
    fn set(&self, bar: Option<ProgressBar>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }

    /// A writer of log lines to standard error.
    pub fn writer(&self) -> impl Write + use<> {
        Lines { bar: self.0.lock().unwrap_or_else(PoisonError::into_inner).clone() }
    }
}

struct Lines {
    bar: Option<ProgressBar>,
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.bar {
            Some(bar) => bar.suspend(|| io::stderr().write_all(bytes))?,
            None => io::stderr().write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Shows one run.
#[derive(Debug)]
pub struct Progress {
    terminal: Terminal,
    bar: Option<ProgressBar>,
    seen: VecDeque<(Instant, u64, u64)>,
    shown: Instant,
}

impl Progress {
    /// Begins to show `tally`.
    pub fn begin(terminal: &Terminal, tally: &Tally) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(tally.planned_tokens);
            let style =
                ProgressStyle::with_template("{bar:30} {percent:>3}%  {msg}").expect("the template is valid");
            bar.set_style(style);
            bar
        });
        terminal.set(bar.clone());
        let now = Instant::now();
        Self { terminal: terminal.clone(), bar, seen: VecDeque::from([(now, 0, 0)]), shown: now }
    }

    /// How often [`Progress::show`] wants to be called.
    pub fn interval(&self) -> Duration {
        if self.bar.is_some() { BAR_INTERVAL } else { LINE_INTERVAL }
    }

    /// Shows where `tally` stands.
    pub fn show(&mut self, tally: &Tally) {
        let now = Instant::now();
        self.seen.push_back((now, tally.done, tally.tokens));
        while self.seen.len() > 2 && self.seen.get(1).is_some_and(|(at, ..)| now.duration_since(*at) > WINDOW)
        {
            self.seen.pop_front();
        }
        let (since, done_then, tokens_then) = self.seen[0];
        let seconds = now.duration_since(since).as_secs_f64().max(1e-3);
        let samples = (tally.done - done_then) as f64 / seconds;
        let tokens = (tally.tokens - tokens_then) as f64 / seconds;
        let eta = eta(tally);
        let failed = tally.failures.len();
        if let Some(bar) = &self.bar {
            let failed = if failed == 0 { String::new() } else { format!("  {failed} FAILED") };
            bar.set_position(tally.tokens + tally.failed_tokens);
            bar.set_message(format!(
                "{}/{} samples  {samples:.1} samples/s  {} tokens/s  ETA {}{failed}",
                HumanCount(tally.done),
                HumanCount(tally.planned),
                HumanCount(tokens as u64),
                eta.map_or_else(|| "-".into(), |eta| HumanDuration(eta).to_string()),
            ));
        } else if now.duration_since(self.shown) >= LINE_INTERVAL / 2 {
            self.shown = now;
            let (_, mean_samples, mean_tokens) = tally.rates();
            tracing::info!(
                done = tally.done,
                of = tally.planned,
                failed,
                samples_per_s = format_args!("{samples:.2}"),
                tokens_per_s = format_args!("{tokens:.0}"),
                mean_samples_per_s = format_args!("{mean_samples:.2}"),
                mean_tokens_per_s = format_args!("{mean_tokens:.0}"),
                eta_s = eta.map(|eta| eta.as_secs()),
                "progress"
            );
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
        self.terminal.set(None);
    }
}

/// Time until all planned tokens are done at the mean rate so far.
pub(crate) fn eta(tally: &Tally) -> Option<Duration> {
    let remaining = tally.pending_tokens();
    let (_, _, tokens_per_second) = tally.rates();
    (tally.tokens > 0).then(|| Duration::from_secs_f64((remaining as f64 / tokens_per_second).min(1e9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_tokens_not_the_samples() {
        let mut tally = Tally::new(10, 1000);
        assert_eq!(eta(&tally), None);
        tally.started = Instant::now() - Duration::from_secs(10);
        (tally.done, tally.tokens) = (9, 100);
        let left = eta(&tally).unwrap().as_secs_f64();
        assert!((89.0..92.0).contains(&left), "{left}");
    }
}
