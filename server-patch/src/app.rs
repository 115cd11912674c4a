//! The server's state behind HTTP, and the way of one `/generate` call through it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use serde_json::Value;
use tether_dump::{DumpLayout, RequestId, Rows};
use tokio::sync::{Notify, mpsc};

use crate::auth::Keys;
use crate::budget::Budget;
use crate::engine::{
    Done, DoneSender, Engine, Finish, Job, JobCapture, Pending, StopText, Ticket, Withdrawn,
};
use crate::error::ApiError;
use crate::identity::{InFlightRids, RidGuard, is_plain_name};
use crate::metrics::Metrics;
use crate::openai::Chunks;
use crate::plan::{Originals, Plan, Planner};
use crate::reply::{self, Part};
use crate::request::GenerateRequest;
use crate::sampling::Logprobs;
use crate::stream::{Feed, Shape, Streamed};
use crate::tokenizer::{StopStrings, Tokenizer};

/// Bodies up to this long are read and tokenised where they arrive; longer ones would hold up other connections.
const INLINE_BODY: usize = 16 * 1024;

/// Everything a request handler needs.
pub struct App {
    /// Requests into plans.
    pub planner: Planner,
    /// The engine.
    pub engine: Engine,
    /// Room in the dump directory.
    pub budget: Arc<Budget>,
    /// Where dumps are published.
    pub dump_dir: PathBuf,
    /// Longest wait for room and for a first step, together.
    pub queue_timeout: Duration,
    /// Whether the events of a streamed `/generate` have what is new, instead of all so far.
    pub incremental_streaming: bool,
    /// Who may ask.
    pub keys: Keys,
    /// How the server was launched, by SGLang's names where it has them.
    pub launch: Value,
    /// The series.
    pub metrics: Metrics,
    /// What `/metrics` gathers.
    pub registry: prometheus::Registry,
    /// Who has not been answered.
    pub rids: InFlightRids,
    /// Whether requests are taken.
    pub lifecycle: Lifecycle,
}

/// Loading, serving, draining: in this order.
#[derive(Default)]
pub struct Lifecycle {
    phase: AtomicU8,
    in_flight: Mutex<usize>,
    idle: Notify,
}

const LOADING: u8 = 0;
const SERVING: u8 = 1;
const DRAINING: u8 = 2;

impl Lifecycle {
    /// The model is loaded. Not once draining has begun.
    pub fn serve(&self) {
        // Losing means that the server drains already.
        let _ = self.phase.compare_exchange(LOADING, SERVING, Ordering::AcqRel, Ordering::Acquire);
    }

    /// No new work from now on.
    pub fn drain(&self) {
        self.phase.store(DRAINING, Ordering::Release);
    }

    /// Whether new work is taken.
    ///
    /// # Errors
    /// [`ApiError::Loading`] or [`ApiError::Draining`].
    pub fn check(&self) -> Result<(), ApiError> {
        match self.phase.load(Ordering::Acquire) {
            LOADING => Err(ApiError::Loading),
            SERVING => Ok(()),
            _ => Err(ApiError::Draining),
        }
    }

    /// Calls that have not been answered whole.
    pub fn in_flight(&self) -> usize {
        *self.count()
    }

    /// Returns once there are none.
    pub async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }

    pub(crate) fn enter(&self) {
        *self.count() += 1;
    }

    pub(crate) fn leave(&self) {
        let mut count = self.count();
        *count -= 1;
        if *count == 0 {
            self.idle.notify_waiters();
        }
    }

    fn count(&self) -> std::sync::MutexGuard<'_, usize> {
        // A number, updated whole.
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call as it was read.
struct Prepared {
    batch: bool,
    stream: bool,
    plans: Vec<Plan>,
}

/// A reply that is no refusal.
pub enum Answer {
    /// In one piece.
    Whole(Generated),
    /// Event by event.
    Stream(Streamed),
}

/// A successful reply.
#[derive(Debug)]
pub struct Generated {
    /// The JSON.
    pub body: Value,
    /// Of each prompt whether it has a dump.
    pub captured: Vec<bool>,
    /// Whether a prompt was aborted.
    pub aborted: bool,
}

impl App {
    /// Runs one call. If the future is dropped, its jobs are withdrawn and nothing of it is left. A streamed reply of one of
    /// OpenAI's routes is made of `chunks`.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn generate(
        self: &Arc<Self>,
        body: bytes::Bytes,
        call_id: &mut CallId,
        originals: Originals,
        started: Instant,
        chunks: Option<Chunks>,
    ) -> Result<Answer, ApiError> {
        let deadline = tokio::time::Instant::now() + self.queue_timeout;
        let Prepared { batch, stream, mut plans } = self.prepare(body, call_id, originals).await?;
        // Samples of one prompt are a list, too.
        let list = batch || plans.first().is_some_and(|plan| plan.sample.1 > 1);
        if stream {
            let mut feeds = Vec::with_capacity(plans.len());
            let call = self.begin(&mut plans, deadline, Some(&mut feeds)).await?;
            let shape = match chunks {
                Some(chunks) => Shape::OpenAi(Box::new(chunks)),
                None => Shape::Generate { list, incremental: self.incremental_streaming },
            };
            return Ok(Answer::Stream(self.stream(call, plans, feeds, shape, started, deadline).await?));
        }
        let mut call = self.begin(&mut plans, deadline, None).await?;
        let done = call.wait(deadline, self.queue_timeout).await?;
        let tokenizer = self.planner.tokenizer.as_deref();
        let elements = plans.iter().zip(&done);
        let elements = elements.map(|(plan, done)| reply::element(plan, &Part::of(done), started, tokenizer));
        let elements: Vec<Value> = elements.collect::<Result<_, _>>()?;
        let body =
            if list { Value::Array(elements) } else { elements.into_iter().next().unwrap_or_default() };
        call.delivered = true;
        Ok(Answer::Whole(Generated {
            body,
            captured: captured(&plans, &done),
            aborted: done.iter().any(|done| done.finish == Finish::Aborted),
        }))
    }

    /// The text of a JSON list of token IDs.
    pub(crate) fn text_of(&self, ids: &Value) -> String {
        let ids: Vec<i64> = ids.as_array().into_iter().flatten().filter_map(Value::as_i64).collect();
        let text = self.planner.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&ids, true).ok());
        text.unwrap_or_default()
    }

    /// Gives the prompts of a call to the engine, once their dumps have room. Jobs that were all aborted meanwhile are not
    /// given to it.
    /// `feeds` get the tokens as they come.
    async fn begin(
        &self,
        plans: &mut [Plan],
        deadline: tokio::time::Instant,
        mut feeds: Option<&mut Vec<Feed>>,
    ) -> Result<Call, ApiError> {
        let mut call = Call::default();
        call.tickets.extend(plans.iter().map(|_| Ticket::new()));
        for (index, plan) in plans.iter().enumerate() {
            let mut names = vec![Arc::new(self.rids.take(&plan.identity.rid, &call.tickets[index..=index])?)];
            if let (Some(rid), (0, samples)) = (&plan.prompt_rid, plan.sample) {
                names.push(Arc::new(self.rids.take(rid, &call.tickets[index..index + samples])?));
            }
            call.names.push(names);
        }
        for plan in plans.iter().filter(|plan| plan.capture.is_some()) {
            let id = plan.identity.id;
            if DumpLayout::find(&self.dump_dir, id).is_some() {
                return Err(ApiError::AlreadyPublished { id });
            }
        }
        let needed: u64 = plans.iter().filter_map(|plan| Some(plan.capture.as_ref()?.max_bytes)).sum();
        let mut reservation = None;
        if needed > 0 {
            let patience = deadline.saturating_duration_since(tokio::time::Instant::now());
            let aborted =
                futures_util::future::join_all(call.tickets.iter().map(|ticket| ticket.wait_withdrawn()));
            tokio::select! {
                reserved = self.budget.reserve(needed, patience) => reservation = Some(reserved?),
                // The engine answers them as it does those that it finds aborted in its queue.
                _ = aborted => plans.iter_mut().for_each(|plan| plan.capture = None),
            }
        }
        // Draining may have begun while this call waited for room, but it was in flight then and is to be finished.
        let mut jobs = Vec::with_capacity(plans.len());
        for ((plan, ticket), names) in plans.iter_mut().zip(&call.tickets).zip(&call.names) {
            let early = plan.capture.as_ref().is_some_and(|capture| capture.metadata.rows == Rows::Prompt);
            let (pending, done, capture) = Pending::new(plan.capture.is_some(), early);
            call.pending.push(pending);
            let capture = plan.capture.take().zip(reservation.as_mut()).zip(capture);
            let capture = capture.map(|((capture, whole), reply)| JobCapture {
                spec: capture.spec,
                metadata: capture.metadata,
                reservation: whole.split(capture.max_bytes),
                bytes: capture.max_bytes,
                reply,
            });
            let mut job = job(plan, ticket, names, done, capture, self.planner.tokenizer.as_ref());
            if let Some(feeds) = &mut feeds {
                let (events, receiver) = mpsc::unbounded_channel();
                job.events = Some(events);
                feeds.push(Feed::new(receiver));
            }
            jobs.push(job);
        }
        self.engine.submit(jobs)?;
        Ok(call)
    }

    async fn prepare(
        self: &Arc<Self>,
        body: bytes::Bytes,
        call_id: &mut CallId,
        originals: Originals,
    ) -> Result<Prepared, ApiError> {
        let app = Arc::clone(self);
        let (given, fresh) = (call_id.given().map(str::to_owned), call_id.as_str().to_owned());
        let short = body.len() <= INLINE_BODY;
        let work = move || {
            let request = GenerateRequest::parse(&body, app.planner.model.vocab_size)?;
            // Millions of numbers are in their vectors now.
            drop(body);
            let (batch, stream) = (request.batch, request.stream);
            // For a single prompt the rid is the call's ID, unless a header says otherwise.
            let own = match request.prompts.as_slice() {
                [prompt] if !batch => prompt.rid.clone().filter(|rid| is_plain_name(rid)),
                _ => Some(fresh),
            };
            let call_id = given.or(own);
            let mut plans = app.planner.plan(request, call_id.as_deref(), &originals)?;
            // A single prompt without any name of its own has the one that its dump gets.
            let call_id = call_id.or_else(|| Some(plans.first()?.identity.id.to_string()));
            for metadata in plans.iter_mut().filter_map(|plan| Some(&mut plan.capture.as_mut()?.metadata)) {
                metadata.call_id.clone_from(&call_id);
            }
            Ok::<_, ApiError>((Prepared { batch, stream, plans }, call_id))
        };
        let (prepared, known) = if short {
            work()?
        } else {
            let prepared = tokio::task::spawn_blocking(work).await;
            prepared
                .map_err(|error| ApiError::StepFailed(format!("reading the request failed: {error}")))??
        };
        if let Some(known) = known {
            call_id.set(known);
        }
        Ok(prepared)
    }

    /// `/abort_request`: withdraws the request called exactly `rid`, with all its samples. SGLang answers alike whether there
    /// is one or not.
    pub fn abort(&self, rid: &str) {
        for ticket in self.rids.find(rid).unwrap_or_default() {
            ticket.withdraw(Withdrawn::Aborted);
        }
    }

    /// Withdraws every request.
    pub fn abort_all(&self) {
        self.rids.all().iter().for_each(|ticket| ticket.withdraw(Withdrawn::Aborted));
    }
}

/// The name of one HTTP call in logs, in the reply and in the dump: `x-request-id`, else a single prompt's rid, else fresh.
pub struct CallId {
    text: String,
    given: bool,
}

impl CallId {
    /// From the header, if it says something that can be repeated.
    pub fn new(header: Option<&str>) -> Self {
        match header.filter(|text| is_plain_name(text)) {
            Some(text) => Self { text: text.to_owned(), given: true },
            None => Self { text: RequestId::new().to_string(), given: false },
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn given(&self) -> Option<&str> {
        self.given.then_some(&*self.text)
    }

    fn set(&mut self, text: String) {
        *self = Self { text, given: true };
    }
}

/// Of each prompt whether it has a dump: the first of its samples would.
fn captured(plans: &[Plan], done: &[Done]) -> Vec<bool> {
    let first = plans.iter().zip(done).filter(|(plan, _)| plan.sample.0 == 0);
    first.map(|(_, done)| done.capture.is_some()).collect()
}

fn job(
    plan: &mut Plan,
    ticket: &Arc<Ticket>,
    names: &[Arc<RidGuard>],
    reply: DoneSender,
    capture: Option<JobCapture>,
    tokenizer: Option<&Arc<Tokenizer>>,
) -> Job {
    Job {
        ticket: Arc::clone(ticket),
        token_ids: std::mem::take(&mut plan.token_ids),
        prompt_tokens: plan.prompt_tokens,
        max_new_tokens: plan.max_new_tokens,
        flexible: plan.flexible,
        stop_ids: std::mem::take(&mut plan.stop_ids),
        ends: std::mem::take(&mut plan.ends),
        stop_text: tokenizer.filter(|_| !plan.stop.is_empty()).map(|tokenizer| {
            let (tokenizer, strings) = (Arc::clone(tokenizer), plan.stop.clone());
            Box::new(StopStrings::new(tokenizer, strings)) as Box<dyn StopText>
        }),
        sampling: std::mem::take(&mut plan.sampling),
        sample: plan.sample.0,
        logprobs: plan.logprobs.as_ref().map(|wanted| Logprobs {
            // The first position that is asked about is said to have no value.
            prompt_from: wanted.prompt_from.map(|from| from + 1),
            top: wanted.top,
            token_ids: wanted.token_ids.clone().unwrap_or_default(),
        }),
        events: None,
        capture,
        reply,
        names: names.to_vec(),
        queued: Instant::now(),
    }
}

/// The jobs of one call. Dropping it before [`Call::delivered`] withdraws them and removes the dumps that they had
/// published: a call that is not answered 200 leaves nothing.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) tickets: Vec<Arc<Ticket>>,
    pub(crate) pending: Vec<Pending>,
    /// Of each job; it keeps them as long as it runs, this call until it is answered.
    names: Vec<Vec<Arc<RidGuard>>>,
    pub(crate) delivered: bool,
}

impl Call {
    /// Gives the names back while the call is still to be delivered.
    pub(crate) fn free_names(&mut self) {
        self.names.clear();
        self.pending.iter_mut().for_each(Pending::free_names);
    }

    /// The results in order, or the first error.
    async fn wait(
        &mut self,
        deadline: tokio::time::Instant,
        patience: Duration,
    ) -> Result<Vec<Done>, ApiError> {
        let mut all = std::pin::pin!(try_join_all(self.pending.iter_mut().map(Pending::finished)));
        tokio::select! {
            done = &mut all => return done,
            () = tokio::time::sleep_until(deadline) => {}
        }
        // Jobs that have started are not bound by the queue's time.
        if self.tickets.iter().any(|ticket| ticket.expire()) {
            return Err(ApiError::QueueTimeout { seconds: patience.as_secs() });
        }
        all.await
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.delivered {
            return;
        }
        self.tickets.iter().for_each(|ticket| ticket.withdraw(Withdrawn::Gone));
        self.pending.iter_mut().for_each(Pending::abandon);
    }
}
