//! A tagged request from the moment it has IDs: in the table, and its dumps are orphans unless the reply arrives.

use std::path::Path;
use std::sync::Arc;

use tether_dump::RequestId;

use crate::orphans::Orphans;
use crate::table::Entered;
use crate::upstream::Upstream;

/// Takes a request out of the table when dropped. If its reply was not delivered by then, its dumps are deleted.
#[derive(Debug)]
pub struct Delivery {
    entered: Entered,
    captured: Vec<RequestId>,
    /// IDs that a client sent before, whose dumps of then were still watched for.
    watched: Vec<(RequestId, Arc<Path>)>,
    dir: Option<Arc<Path>>,
    orphans: Orphans,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Underway,
    Delivered,
    Refused,
    NoUse,
}

impl Delivery {
    /// For a request that is about to be sent to `upstream`. `captured` are those of its IDs that may get a dump.
    pub fn new(entered: Entered, captured: Vec<RequestId>, upstream: &Upstream, orphans: Orphans) -> Self {
        let watched = captured.iter().filter_map(|&id| Some((id, orphans.forget(id)?))).collect();
        Self { entered, captured, watched, dir: upstream.dump_dir.clone(), orphans, state: State::Underway }
    }

    /// Where its dumps are looked for.
    pub fn dir(&self) -> Option<&Arc<Path>> {
        self.dir.as_ref()
    }

    /// It goes to another upstream, the first having taken nothing.
    pub fn moved(&mut self, upstream: &Arc<Upstream>) {
        self.entered.moved(upstream);
        self.dir = upstream.dump_dir.clone();
    }

    /// Its dumps are the client's.
    pub fn delivered(&mut self) {
        if self.state == State::Underway {
            self.state = State::Delivered;
        }
    }

    /// The upstream refused it and computed nothing. A dump that is there under its ID is not its own: the client chose
    /// the ID, and used it before.
    pub fn was_refused(&mut self) {
        self.state = State::Refused;
    }

    /// The reply is an error, whether it arrives or not: what was published before it, nobody will fetch.
    pub fn is_of_no_use(&mut self) {
        self.state = State::NoUse;
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        match (self.state, &self.dir) {
            (State::Underway | State::NoUse, Some(dir)) => {
                self.captured.iter().for_each(|&id| self.orphans.add(id, dir.clone()));
            }
            // The dump of the request before may still come.
            (State::Refused, _) => self.watched.drain(..).for_each(|(id, dir)| self.orphans.add(id, dir)),
            _ => {}
        }
    }
}
