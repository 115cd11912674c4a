//! Waiting on a condition.

use std::time::{Duration, Instant};

/// How long a condition may take to come true. Far beyond what a loaded machine needs: when it passes, something is
/// stuck, not slow.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Asks `probe` until it gives a value.
///
/// # Panics
/// When [`DEADLINE`] has passed, naming `what`.
pub async fn eventually<T, F>(what: &str, mut probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let started = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(started.elapsed() < DEADLINE, "{what}: still not so after {DEADLINE:?}");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
