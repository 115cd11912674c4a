//! How old the oldest of many pieces of work is.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, Registry};

/// A gauge of the seconds since the oldest piece of work under way began; 0 when there is none. Clones share it.
#[derive(Clone, Debug)]
pub struct OldestAge(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    gauge: Gauge,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order of their beginning.
    begun: BTreeMap<u64, Instant>,
}

/// One piece of work, under way until this is dropped.
#[derive(Debug)]
#[must_use = "dropping this ends the work"]
pub struct Begun {
    shared: Arc<Shared>,
    number: u64,
}

impl OldestAge {
    /// Makes and registers the gauge.
    ///
    /// # Errors
    /// `registry` has a series of this name.
    pub fn register(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Self> {
        let gauge = Gauge::new(name, help)?;
        let age = Self(Arc::new(Shared { gauge, state: Mutex::default() }));
        registry.register(Box::new(age.clone()))?;
        Ok(age)
    }

    /// A piece of work begins.
    pub fn begin(&self) -> Begun {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.begun.insert(number, Instant::now());
        Begun { shared: Arc::clone(&self.0), number }
    }

    /// Seconds since the oldest began.
    pub fn seconds(&self) -> f64 {
        self.0.lock().begun.first_key_value().map_or(0.0, |(_, begun)| begun.elapsed().as_secs_f64())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is a single one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.shared.lock().begun.remove(&self.number);
    }
}

impl Collector for OldestAge {
    fn desc(&self) -> Vec<&Desc> {
        self.0.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.0.gauge.set(self.seconds());
        self.0.gauge.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_age_is_that_of_the_oldest_until_it_ends() {
        let registry = Registry::new();
        let age = OldestAge::register(&registry, "oldest_seconds", "Help.").unwrap();
        assert_eq!(age.seconds(), 0.0);
        let first = age.begin();
        std::thread::sleep(Duration::from_millis(5));
        let second = age.begin();
        let with_both = age.seconds();
        assert!(with_both >= 0.005);
        drop(first);
        let begun = age.0.lock().begun.clone();
        assert_eq!(begun.keys().copied().collect::<Vec<_>>(), [1]);
        drop(second);
        assert_eq!(age.seconds(), 0.0);
        assert!(crate::text(&registry).unwrap().contains("\noldest_seconds 0\n"));
    }
}
