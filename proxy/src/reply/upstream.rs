//! The body of an upstream's reply, passed on frame by frame.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use super::Cut;
use crate::delivery::Delivery;
use crate::upstream::{Lease, Load, Upstream};

/// What a request holds until its reply has ended.
#[derive(Debug)]
pub struct Flow {
    /// Its place in the table, and its dumps. Dropped first: an orphan is known before the load is gone.
    pub delivery: Option<Delivery>,
    /// The connection.
    pub lease: Lease,
    /// The share of the upstream's load.
    pub load: Load,
    /// The upstream.
    pub upstream: Arc<Upstream>,
}

/// The body of an upstream's reply.
#[derive(Debug)]
pub struct UpstreamBody {
    ahead: VecDeque<Bytes>,
    incoming: Incoming,
    flow: Option<Flow>,
    limit: Duration,
    heard: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl UpstreamBody {
    /// A body whose upstream may be silent for `limit`.
    pub fn new(incoming: Incoming, flow: Flow, limit: Duration) -> Self {
        Self { ahead: VecDeque::new(), incoming, flow: Some(flow), limit, heard: Instant::now(), alarm: None }
    }

    /// Reads up to about `most` bytes before they are asked for. The whole body, if that is all of it.
    ///
    /// # Errors
    /// The upstream ended or went silent.
    pub async fn read_ahead(&mut self, most: usize) -> Result<Option<Vec<u8>>, Cut> {
        let mut len = 0;
        while !self.incoming.is_end_stream() {
            match std::future::poll_fn(|cx| self.poll_incoming(cx)).await {
                Some(frame) => {
                    let Ok(data) = frame?.into_data() else { break };
                    len += data.len();
                    self.ahead.push_back(data);
                }
                None => break,
            }
            if len > most {
                return Ok(None);
            }
        }
        Ok(Some(self.ahead.iter().flatten().copied().collect()))
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.ahead.pop_front() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None => self.poll_incoming(cx),
        }
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Ready(frame) => {
                self.heard = Instant::now();
                Poll::Ready(frame.map(|frame| frame.map_err(Cut::Died)))
            }
            Poll::Pending => {
                ready!(self.poll_silence(cx));
                Poll::Ready(Some(Err(Cut::Silent)))
            }
        }
    }

    /// Ready once nothing was heard for too long. The alarm is not set anew with each frame: when it rings, it is set to
    /// the time that is left.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let due = self.heard + self.limit;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        loop {
            ready!(alarm.as_mut().poll(cx));
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            alarm.as_mut().reset(due);
        }
    }

    /// All of it was handed on: the dumps are the client's, and the connection can take the next request.
    pub(super) fn delivered(&mut self) {
        if let Some(Flow { delivery, lease, load, upstream }) = self.flow.take() {
            if let Some(mut delivery) = delivery {
                delivery.delivered();
            }
            lease.keep(&upstream.pool);
            drop(load);
        }
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.incoming.is_end_stream()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let ahead: usize = self.ahead.iter().map(Bytes::len).sum();
        let rest = self.incoming.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + ahead as u64);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + ahead as u64);
        }
        hint
    }
}
