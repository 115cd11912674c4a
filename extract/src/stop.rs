//! Ends a run before its work is done, so that it can be resumed.

use std::sync::Arc;

use tokio::sync::watch;

/// Asks a run to stop. Clones ask the same run.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<Option<String>>>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Stop {
    /// Starts no more samples; those in flight are finished. The first reason given stands.
    pub fn ask(&self, reason: impl Into<String>) {
        self.0.send_if_modified(|current| {
            let first = current.is_none();
            if first {
                *current = Some(reason.into());
            }
            first
        });
    }

    /// Why the run is to stop, if it is.
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Whether the run is to stop.
    pub fn is_asked(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Returns once the run is to stop.
    pub async fn asked(&self) {
        let mut receiver = self.0.subscribe();
        // An error means that every sender is gone, and `self` is one.
        let _ = receiver.wait_for(Option::is_some).await;
    }
}
