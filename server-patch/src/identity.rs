//! Who a prompt is: the ID its dump is named after, and the names its client knows it by.

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::sync::Arc;

use tether_dump::RequestId;

use crate::engine::Ticket;
use crate::error::ApiError;
use crate::json::clipped;

/// Longest rid that is no request ID.
const MAX_CLIENT_RID: usize = 128;

/// The names of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Names the dump. The rid, where that is a request ID; else fresh.
    pub id: RequestId,
    /// What `meta_info.id` says: the rid as it came, or the fresh ID.
    pub rid: String,
    /// The client's own name, kept in the dump.
    pub client_rid: Option<String>,
    /// Whether the rid is a request ID, which asks for a dump.
    pub tagged: bool,
}

impl Identity {
    /// The identity of a prompt with `rid` in the body; `original` is what a proxy says its client had called it.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] for a rid that is neither a request ID nor a plain name: it goes into logs, replies and metadata.
    pub fn new(rid: Option<String>, original: Option<String>) -> Result<Self, ApiError> {
        let Some(rid) = rid else {
            let id = RequestId::new();
            return Ok(Self { id, rid: id.to_string(), client_rid: original, tagged: false });
        };
        if let Ok(id) = rid.parse::<RequestId>() {
            return Ok(Self { id, rid, client_rid: original, tagged: true });
        }
        if !is_plain_name(&rid) {
            return Err(ApiError::Invalid(format!(
                "`rid` is {:?}; a lower-case version 7 UUID or 1 to {MAX_CLIENT_RID} characters of A-Z a-z 0-9 . _ : - are accepted",
                clipped(&rid)
            )));
        }
        Ok(Self { id: RequestId::new(), client_rid: Some(rid.clone()), rid, tagged: false })
    }
}

/// Whether `text` is 1 to 128 bytes of `[A-Za-z0-9._:-]`.
pub fn is_plain_name(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-');
    (1..=MAX_CLIENT_RID).contains(&text.len()) && text.bytes().all(plain)
}

/// The rids whose requests have not been answered or still run, with the tickets to withdraw each by: one, or those of all
/// samples.
#[derive(Clone, Debug, Default)]
pub struct InFlightRids(Arc<DashMap<String, Vec<Arc<Ticket>>>>);

/// Keeps a rid in flight until dropped.
#[must_use = "dropping it makes the rid free"]
#[derive(Debug)]
pub struct RidGuard {
    rids: InFlightRids,
    rid: String,
}

impl InFlightRids {
    /// Takes `rid` for a request.
    ///
    /// # Errors
    /// [`ApiError::InFlight`] if it is taken.
    pub fn take(&self, rid: &str, tickets: &[Arc<Ticket>]) -> Result<RidGuard, ApiError> {
        match self.0.entry(rid.to_owned()) {
            Entry::Occupied(_) => Err(ApiError::InFlight { rid: clipped(rid) }),
            Entry::Vacant(entry) => {
                entry.insert(tickets.to_vec());
                Ok(RidGuard { rids: self.clone(), rid: rid.to_owned() })
            }
        }
    }

    /// The tickets of the request called exactly `rid`.
    pub fn find(&self, rid: &str) -> Option<Vec<Arc<Ticket>>> {
        self.0.get(rid).map(|tickets| tickets.clone())
    }

    /// The tickets of all requests.
    pub fn all(&self) -> Vec<Arc<Ticket>> {
        self.0.iter().flat_map(|entry| entry.clone()).collect()
    }
}

impl Drop for RidGuard {
    fn drop(&mut self) {
        self.rids.0.remove(&self.rid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_names_the_dump_and_asks_for_it() {
        let id = RequestId::new();
        let identity = Identity::new(Some(id.to_string()), Some("theirs".into())).unwrap();
        assert_eq!(identity.id, id);
        assert!(identity.tagged);
        assert_eq!((identity.rid, identity.client_rid), (id.to_string(), Some("theirs".into())));
    }

    #[test]
    fn a_clients_own_rid_is_echoed_and_gets_a_fresh_id() {
        let a = Identity::new(Some("job.7:row_12-b".into()), None).unwrap();
        let b = Identity::new(Some("job.7:row_12-b".into()), None).unwrap();
        assert_eq!(a.rid, "job.7:row_12-b");
        assert_eq!(a.client_rid.as_deref(), Some("job.7:row_12-b"));
        assert!(!a.tagged);
        assert_ne!(a.id, b.id);
    }

    #[test]
    fn an_upper_case_uuid_is_a_clients_name_and_not_a_second_spelling() {
        let id = RequestId::new();
        let identity = Identity::new(Some(id.to_string().to_uppercase()), None).unwrap();
        assert!(!identity.tagged);
        assert_ne!(identity.id, id);
    }

    #[test]
    fn a_rid_that_could_be_a_path_is_refused_by_name() {
        for rid in ["../../x", "", "a b", "a/b", "ä", "a\n", &"x".repeat(129)] {
            let error = Identity::new(Some(rid.to_owned()), None).unwrap_err();
            assert_eq!(error.status(), 400);
            assert!(error.to_string().starts_with("`rid` is \""), "{error}");
        }
        assert!(Identity::new(Some("x".repeat(128)), None).is_ok());
    }

    #[test]
    fn a_rid_in_flight_is_refused_until_its_request_is_answered() {
        let rids = InFlightRids::default();
        let guard = rids.take("a", &[Ticket::new()]).unwrap();
        let error = rids.take("a", &[Ticket::new()]).map(drop).unwrap_err();
        assert!(error.to_string().contains("Duplicate request ID detected"), "{error}");
        let _other = rids.take("a0", &[Ticket::new()]).unwrap();
        assert!(rids.find("a").is_some());
        drop(guard);
        assert!(rids.find("a").is_none(), "names match exactly, not by prefix");
        let _again = rids.take("a", &[Ticket::new()]).unwrap();
    }
}
