//! The requests that are in flight, by the ID of each prompt.

use std::sync::Arc;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tether_dump::RequestId;

use crate::tag::ClientRid;
use crate::upstream::Upstream;

/// Every prompt in flight, and the names that clients have for them.
#[derive(Debug, Default)]
pub struct Table {
    prompts: DashMap<RequestId, Arc<Upstream>>,
    names: DashMap<String, Vec<RequestId>>,
}

/// The entries of one request, removed when dropped.
#[derive(Debug)]
#[must_use = "dropping this takes the request out of the table"]
pub struct Entered {
    table: Arc<Table>,
    ids: Vec<RequestId>,
    names: Vec<(String, RequestId)>,
}

/// An ID is in flight already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request ID {0} is in flight")]
pub struct InFlight(pub RequestId);

impl Table {
    /// Enters the prompts of one request, which goes to `upstream`. `client` is what the client calls them.
    ///
    /// # Errors
    /// [`InFlight`]; nothing is then entered.
    pub fn enter(
        self: &Arc<Self>,
        ids: &[RequestId],
        batch: bool,
        client: Option<&ClientRid>,
        upstream: &Arc<Upstream>,
    ) -> Result<Entered, InFlight> {
        let mut entered =
            Entered { table: self.clone(), ids: Vec::with_capacity(ids.len()), names: Vec::new() };
        for &id in ids {
            match self.prompts.entry(id) {
                Entry::Occupied(_) => return Err(InFlight(id)),
                Entry::Vacant(vacant) => vacant.insert(upstream.clone()),
            };
            entered.ids.push(id);
        }
        match client {
            Some(ClientRid::One(name)) if batch => {
                // As SGLang names the items of a batch.
                for (index, &id) in ids.iter().enumerate() {
                    entered.name(name.clone(), id);
                    entered.name(format!("{name}_{index}"), id);
                }
            }
            Some(ClientRid::One(name)) => ids.iter().for_each(|&id| entered.name(name.clone(), id)),
            Some(ClientRid::Many(names)) => {
                names.iter().zip(ids).for_each(|(name, &id)| entered.name(name.clone(), id));
            }
            Some(ClientRid::Other(_)) | None => {}
        }
        Ok(entered)
    }

    /// The upstream that has the prompt `id`.
    pub fn upstream(&self, id: RequestId) -> Option<Arc<Upstream>> {
        self.prompts.get(&id).map(|upstream| upstream.clone())
    }

    /// The prompts in flight that a client calls `name`, or that is called so itself.
    pub fn named(&self, name: &str) -> Vec<RequestId> {
        match name.parse() {
            Ok(id) if self.prompts.contains_key(&id) => vec![id],
            _ => self.names.get(name).map(|ids| ids.clone()).unwrap_or_default(),
        }
    }

    /// How many prompts are in flight.
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Whether none is in flight and no name is kept.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty() && self.names.is_empty()
    }
}

impl Entered {
    /// The prompts, in the order of the request.
    pub fn ids(&self) -> &[RequestId] {
        &self.ids
    }

    /// Notes that they go to another upstream.
    pub fn moved(&self, upstream: &Arc<Upstream>) {
        for id in &self.ids {
            if let Some(mut entry) = self.table.prompts.get_mut(id) {
                *entry = upstream.clone();
            }
        }
    }

    fn name(&mut self, name: String, id: RequestId) {
        self.table.names.entry(name.clone()).or_default().push(id);
        self.names.push((name, id));
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        for id in &self.ids {
            self.table.prompts.remove(id);
        }
        for (name, id) in &self.names {
            if let Entry::Occupied(mut entry) = self.table.names.entry(name.clone()) {
                entry.get_mut().retain(|other| other != id);
                if entry.get().is_empty() {
                    entry.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::metrics::Metrics;
    use crate::upstream::Limits;

    fn upstream() -> Arc<Upstream> {
        let metrics = Metrics::register(&Registry::new()).unwrap();
        let spec = "http://a:1".parse().unwrap();
        let connect = std::time::Duration::from_secs(1);
        Arc::new(Upstream::new(&spec, Limits::default(), connect, &metrics).unwrap())
    }

    #[test]
    fn the_table_is_empty_once_the_guards_are_gone() {
        let (table, upstream) = (Arc::new(Table::default()), upstream());
        let ids = [RequestId::new(), RequestId::new()];
        let name = ClientRid::One("job".into());
        let batch = table.enter(&ids, true, Some(&name), &upstream).unwrap();
        let other = table.enter(&[RequestId::new()], false, Some(&name), &upstream).unwrap();
        assert_eq!(table.named("job").len(), 3);
        assert_eq!(table.named("job_1"), [ids[1]]);
        assert_eq!(table.named(&ids[0].to_string()), [ids[0]]);
        assert_eq!(table.named("jo"), []);
        drop(batch);
        assert_eq!(table.named("job"), other.ids());
        drop(other);
        assert!(table.is_empty());
    }

    #[test]
    fn an_id_enters_once_and_a_refused_request_leaves_no_trace() {
        let (table, upstream) = (Arc::new(Table::default()), upstream());
        let (id, fresh) = (RequestId::new(), RequestId::new());
        let first = table.enter(&[id], false, None, &upstream).unwrap();
        assert_eq!(table.enter(&[fresh, id], true, None, &upstream).unwrap_err(), InFlight(id));
        assert_eq!(table.enter(&[fresh, fresh], true, None, &upstream).unwrap_err(), InFlight(fresh));
        assert_eq!(table.len(), 1);
        assert!(table.upstream(id).is_some());
        drop(first);
        assert!(table.is_empty());
    }
}
