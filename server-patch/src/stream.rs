//! Streamed replies: server-sent events in SGLang's forms, each a JSON after `data: `, the last one `[DONE]`.
//!
//! The head of the reply leaves when the dumps of all prompts are published (rows `prompt`) or the first token is there (all
//! else), so whatever goes wrong before has a status of its own. What goes wrong later is an event with `error`. Tokens that
//! come faster than the client reads are put into one event; at most two events wait.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{BufMut, Bytes, BytesMut};
use http_body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::app::{App, Call};
use crate::engine::{Done, DoneLogprobs, Finish, Pending, Ticket, TokenEvent, Withdrawn};
use crate::error::ApiError;
use crate::metrics::Outcome;
use crate::openai::Chunks;
use crate::plan::Plan;
use crate::reply::{self, Part};
use crate::tokenizer::TextStream;

/// Events that wait for the client to read.
const WAITING: usize = 1;

/// What the events of a stream are.
#[derive(Debug)]
pub enum Shape {
    /// Elements of `/generate`.
    Generate {
        /// Whether each says which prompt's it is.
        list: bool,
        /// Whether texts and tokens are those since the last event, instead of all.
        incremental: bool,
    },
    /// Chunks of one of OpenAI's routes.
    OpenAi(Box<Chunks>),
}

impl Shape {
    /// Whether its events have only what is new.
    fn is_incremental(&self) -> bool {
        !matches!(self, Self::Generate { incremental: false, .. })
    }
}

/// A reply that has begun.
pub struct Streamed {
    /// Of each prompt whether it has a dump or will have one.
    pub captured: Vec<bool>,
    /// Its events.
    pub events: Events,
}

enum Item {
    Event(Bytes),
    End(Outcome),
}

/// The events as a body. Dropping it before its end withdraws what still runs.
pub struct Events {
    receiver: mpsc::Receiver<Item>,
    outcome: Option<Outcome>,
}

impl Events {
    /// How the call ended; `None` while it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// The next event.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        if self.outcome.is_some() {
            return Poll::Ready(None);
        }
        Poll::Ready(match ready!(Pin::new(&mut self.receiver).poll_recv(cx)) {
            Some(Item::Event(bytes)) => Some(Frame::data(bytes)),
            Some(Item::End(outcome)) => {
                self.outcome = Some(outcome);
                None
            }
            None => {
                self.outcome = Some(Outcome::Failed);
                None
            }
        })
    }
}

/// Tokens of one job as they come.
pub(crate) struct Feed {
    receiver: mpsc::UnboundedReceiver<TokenEvent>,
    ahead: VecDeque<TokenEvent>,
}

impl Feed {
    pub(crate) fn new(receiver: mpsc::UnboundedReceiver<TokenEvent>) -> Self {
        Self { receiver, ahead: VecDeque::new() }
    }

    /// Waits until a token is there; `false` if there will be none.
    async fn ready(&mut self) -> bool {
        if self.ahead.is_empty() {
            match self.receiver.recv().await {
                Some(event) => self.ahead.push_back(event),
                None => return false,
            }
        }
        true
    }

    /// What is there.
    fn take(&mut self) -> impl Iterator<Item = TokenEvent> + '_ {
        std::iter::from_fn(|| self.ahead.pop_front().or_else(|| self.receiver.try_recv().ok()))
    }
}

/// One prompt, or one sample of it, on its way out.
struct Row {
    index: usize,
    ticket: Arc<Ticket>,
    plan: Plan,
    feed: Feed,
    /// Its text so far; `None` without a tokenizer.
    stream: Option<TextStream>,
    text: String,
    output_ids: Vec<i64>,
    logprobs: Option<DoneLogprobs>,
    /// Its end, where the head of the reply had to wait for it.
    done: Option<Done>,
}

impl App {
    /// Begins a streamed reply of a call whose jobs are under way.
    ///
    /// # Errors
    /// What the client is to be told instead of it.
    pub(crate) async fn stream(
        self: &Arc<Self>,
        mut call: Call,
        plans: Vec<Plan>,
        feeds: Vec<Feed>,
        shape: Shape,
        started: Instant,
        deadline: tokio::time::Instant,
    ) -> Result<Streamed, ApiError> {
        let tokenizer = self.planner.tokenizer.as_ref();
        let tickets: Vec<_> = call.tickets.clone();
        let rows = plans.into_iter().zip(feeds).zip(tickets).enumerate();
        let rows = rows.map(|(index, ((plan, feed), ticket))| Row {
            index,
            ticket,
            stream: tokenizer
                .map(|tokenizer| TextStream::new(Arc::clone(tokenizer), plan.skip_special_tokens)),
            text: String::new(),
            output_ids: Vec::new(),
            logprobs: plan.logprobs.as_ref().map(|_| DoneLogprobs::default()),
            done: None,
            plan,
            feed,
        });
        let mut rows: Vec<Row> = rows.collect();
        let captured = call.head(&mut rows, deadline, self.queue_timeout).await?;
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(run(Arc::clone(self), call, rows, shape, started, sender));
        Ok(Streamed { captured, events: Events { receiver, outcome: None } })
    }
}

impl Call {
    /// Waits until the head of the reply can leave. Of each prompt whether it has a dump, or will have one.
    async fn head(
        &mut self,
        rows: &mut [Row],
        deadline: tokio::time::Instant,
        patience: std::time::Duration,
    ) -> Result<Vec<bool>, ApiError> {
        let captured = {
            let work = self.pending.iter_mut().zip(rows.iter_mut()).map(|(pending, row)| row.begin(pending));
            let mut work = std::pin::pin!(futures_util::future::try_join_all(work));
            let early = tokio::select! {
                captured = &mut work => Some(captured?),
                () = tokio::time::sleep_until(deadline) => None,
            };
            match early {
                Some(captured) => captured,
                // Jobs that have started are not bound by the queue's time.
                None if self.tickets.iter().any(|ticket| ticket.expire()) => {
                    return Err(ApiError::QueueTimeout { seconds: patience.as_secs() });
                }
                None => work.await?,
            }
        };
        let first = rows.iter().zip(captured).filter(|(row, _)| row.plan.sample.0 == 0);
        Ok(first.map(|(_, captured)| captured).collect())
    }
}

impl Row {
    /// Waits for what the head of the reply waits for. Whether there is a dump, or will be one.
    async fn begin(&mut self, pending: &mut Pending) -> Result<bool, ApiError> {
        if pending.is_captured_early() {
            if let Some(_published) = pending.captured().await? {
                return Ok(true);
            }
        } else if self.feed.ready().await {
            return Ok(pending.captures());
        }
        if self.feed.ready().await {
            return Ok(false);
        }
        // It ended without a token.
        let done = pending.finished().await?;
        let captured = done.capture.is_some();
        self.done = Some(done);
        Ok(captured)
    }

    /// Takes in the tokens that are there. Whether the last is among them.
    fn take(&mut self) -> Result<bool, ApiError> {
        let mut last = false;
        for TokenEvent { token, logprob, is_last } in self.feed.take() {
            last = is_last;
            // What ends the text may not be a part of it: the last event says what it is as a whole.
            if !is_last {
                self.output_ids.push(token);
                if let (Some(logprobs), Some(logprob)) = (&mut self.logprobs, logprob) {
                    logprobs.output.push(logprob);
                }
                if let Some(stream) = &mut self.stream {
                    let piece =
                        stream.push(token).map_err(|error| ApiError::StepFailed(error.to_string()))?;
                    self.text.push_str(&piece);
                }
            }
        }
        Ok(last)
    }

    /// The element of what is there so far.
    /// Log-probabilities begin with token `from`, and the prompt is in it if it is the first.
    fn element(&self, app: &App, started: Instant, from: usize, first: bool) -> Result<Value, ApiError> {
        let shown = self.text.len() - held_back(&self.text, &self.plan.stop);
        let part = Part {
            output_ids: &self.output_ids,
            finish: None,
            capture: None,
            logprobs: self.logprobs.as_ref(),
            text: self.stream.is_some().then(|| self.text[..shown].to_owned()),
            logprobs_from: from,
            with_prompt: first,
        };
        reply::element(&self.plan, &part, started, app.planner.tokenizer.as_deref())
    }

    async fn run(
        mut self,
        app: &App,
        pending: &mut Pending,
        shape: &Mutex<Shape>,
        started: Instant,
        sender: &mpsc::Sender<Item>,
    ) -> Outcome {
        let mut emitted = Emitted::default();
        let result = async {
            while self.done.is_none() && self.feed.ready().await {
                let Ok(room) = sender.reserve().await else { return Ok(None) };
                let last = self.take()?;
                if !self.output_ids.is_empty() && self.output_ids.len() > emitted.tokens {
                    let from = if lock(shape).is_incremental() { emitted.tokens } else { 0 };
                    let element = self.element(app, started, from, emitted.tokens == 0)?;
                    let bytes = events(app, shape, self.index, element, &mut emitted);
                    if !bytes.is_empty() {
                        room.send(Item::Event(bytes));
                    }
                }
                if last {
                    break;
                }
            }
            let done = match self.done.take() {
                Some(done) => done,
                None => pending.finished().await?,
            };
            let tokenizer = app.planner.tokenizer.as_deref();
            let element = reply::element(&self.plan, &Part::of(&done), started, tokenizer)?;
            let bytes = events(app, shape, self.index, element, &mut emitted);
            let aborted = done.finish == Finish::Aborted;
            Ok((sender.send(Item::Event(bytes)).await.is_ok()).then_some(aborted))
        };
        match result.await {
            Ok(Some(aborted)) => {
                if aborted {
                    Outcome::Aborted
                } else {
                    Outcome::Ok
                }
            }
            Ok(None) => Outcome::ClientGone,
            Err(error) => {
                tracing::error!(rid = self.plan.identity.rid, %error, "a stream failed");
                // A dump that was published before the head of the reply stays: the client was told of it.
                if !pending.is_captured_early() {
                    pending.abandon();
                }
                self.ticket.withdraw(Withdrawn::Gone);
                let _ = sender.send(Item::Event(error_event(&error))).await;
                Outcome::Failed
            }
        }
    }
}

/// How much of a row is out.
#[derive(Debug, Default)]
pub(crate) struct Emitted {
    pub(crate) tokens: usize,
    pub(crate) text: usize,
    pub(crate) begun: bool,
}

impl Emitted {
    /// What `element` has beyond what is out, which it then is: text, and the number of tokens that were.
    pub(crate) fn advance(&mut self, element: &Value) -> (String, usize) {
        let text = element["text"].as_str().unwrap_or_default();
        // A text that ends before what was given out has nothing new: a stop string that came to be in it was held back.
        let added = text.get(self.text..).unwrap_or_default().to_owned();
        let tokens =
            std::mem::replace(&mut self.tokens, element["output_ids"].as_array().map_or(0, Vec::len));
        self.text = self.text.max(text.len());
        (added, tokens)
    }
}

/// The events for `element`, which has all that there is of a row so far.
fn events(app: &App, shape: &Mutex<Shape>, index: usize, mut element: Value, emitted: &mut Emitted) -> Bytes {
    match &mut *lock(shape) {
        Shape::Generate { list, incremental } => {
            let (added, tokens) = emitted.advance(&element);
            if *incremental {
                if element.get("text").is_some() {
                    element["text"] = added.into();
                }
                let new = emitted.tokens - tokens;
                keep_last(&mut element["output_ids"], new);
                for key in ["output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"] {
                    if let Some(list) = element["meta_info"].get_mut(key) {
                        keep_last(list, new);
                    }
                }
            }
            if *list {
                element["index"] = json!(index);
            }
            event(&element)
        }
        Shape::OpenAi(chunks) => {
            let chunks = chunks.of(index, &element, emitted, &|ids| app.text_of(ids));
            chunks
                .iter()
                .map(event)
                .fold(BytesMut::new(), |mut all, event| {
                    all.put(event);
                    all
                })
                .freeze()
        }
    }
}

/// Takes all but the last `count` items out of a list.
fn keep_last(list: &mut Value, count: usize) {
    if let Value::Array(items) = list {
        items.drain(..items.len().saturating_sub(count));
    }
}

fn lock(shape: &Mutex<Shape>) -> std::sync::MutexGuard<'_, Shape> {
    // No panic can leave it half changed: chunks are only counted.
    shape.lock().unwrap_or_else(PoisonError::into_inner)
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

fn error_event(error: &ApiError) -> Bytes {
    let status = error.status();
    let kind = if status.is_client_error() { "invalid_request_error" } else { "internal_error" };
    event(&json!({"error": {
        "message": error.to_string(), "type": kind, "code": status.as_u16(), "retryable": error.retry_after().is_some(),
    }}))
}

/// Writes all rows out, then the end.
async fn run(
    app: Arc<App>,
    mut call: Call,
    rows: Vec<Row>,
    shape: Shape,
    started: Instant,
    sender: mpsc::Sender<Item>,
) {
    let shape = Mutex::new(shape);
    let outcomes = {
        let rows = call.pending.iter_mut().zip(rows);
        let rows = rows.map(|(pending, row)| row.run(&app, pending, &shape, started, &sender));
        tokio::select! {
            outcomes = futures_util::future::join_all(rows) => outcomes,
            // The client is gone: dropping the call withdraws what runs and removes what was published.
            () = sender.closed() => return,
        }
    };
    if outcomes.contains(&Outcome::ClientGone) {
        return;
    }
    let worst = [Outcome::Failed, Outcome::Aborted].into_iter().find(|outcome| outcomes.contains(outcome));
    let shape = shape.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut end = BytesMut::new();
    if let Shape::OpenAi(chunks) = shape
        && let Some(usage) = chunks.usage()
    {
        end.put(event(&usage));
    }
    end.put(&b"data: [DONE]\n\n"[..]);
    // A client that has the end may use its names again.
    call.free_names();
    if sender.send(Item::Event(end.freeze())).await.is_ok() {
        call.delivered = true;
        // The body ends without it, too; this says how.
        let _ = sender.send(Item::End(worst.unwrap_or(Outcome::Ok))).await;
    }
}

/// Bytes at the end of `text` that one of the strings may begin with: a piece that was given out cannot be taken back.
fn held_back(text: &str, strings: &[String]) -> usize {
    let of_one = |string: &String| {
        let ends = string.char_indices().map(|(at, _)| at).filter(|at| *at > 0);
        ends.filter(|&end| text.ends_with(&string[..end])).max().unwrap_or(0)
    };
    strings.iter().map(of_one).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stop_string_may_begin_with_is_held_back() {
        let strings = ["STOP".to_owned(), "世界".to_owned()];
        for (text, held) in [("", 0), ("a S", 1), ("a STO", 3), ("STOP", 0), ("S T", 0), ("世", 3), ("SS", 1)]
        {
            assert_eq!(held_back(text, &strings), held, "{text}");
        }
        assert_eq!(held_back("anything", &[]), 0);
    }

    #[test]
    fn only_what_is_new_goes_out() {
        let mut emitted = Emitted::default();
        let element = |text: &str, ids: &[i64]| json!({"text": text, "output_ids": ids});
        assert_eq!(emitted.advance(&element("ab", &[1, 2])), ("ab".to_owned(), 0));
        assert_eq!(emitted.advance(&element("abc", &[1, 2, 3])), ("c".to_owned(), 2));
        assert_eq!(emitted.advance(&element("abc", &[1, 2, 3, 4])), (String::new(), 3));
    }
}
