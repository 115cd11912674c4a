//! The body of a reply, which owns whatever must last until its end.

mod file;
mod held;
mod upstream;

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

pub use self::file::FileBody;
pub use self::held::HeldStream;
pub use self::upstream::{Flow, UpstreamBody};
use crate::call::Call;
use crate::client_io::Turn;
use crate::metrics::Abort;

/// The body of a reply.
#[derive(Debug)]
pub struct ReplyBody {
    kind: Kind,
    call: Option<Call>,
    /// Last, so that the connection counts as idle only after all else is undone.
    _turn: Turn,
}

/// Where the bytes come from.
#[derive(Debug)]
pub enum Kind {
    /// The proxy itself.
    Full(Bytes),
    /// An upstream, as they come.
    Upstream(Box<UpstreamBody>),
    /// An upstream, the end held back until the dumps are checked.
    Held(Box<HeldStream>),
    /// A file.
    File(Box<FileBody>),
}

/// Why a reply is cut. The client sees an end that is not clean.
#[derive(Debug, thiserror::Error)]
pub enum Cut {
    /// The upstream's connection ended.
    #[error("the upstream ended the reply early")]
    Died(#[source] hyper::Error),
    /// The upstream went silent.
    #[error("the upstream went silent within the reply")]
    Silent,
    /// The dumps are not right.
    #[error(transparent)]
    Mismatch(#[from] Box<crate::gate::Failure>),
    /// One event of a stream that is held back is too long.
    #[error("an event of more than {0} bytes cannot be held back")]
    Event(usize),
    /// A file cannot be read.
    #[error("the dump cannot be read")]
    File(#[source] std::io::Error),
}

impl Cut {
    fn reason(&self) -> Abort {
        match self {
            Self::Died(_) | Self::Event(_) | Self::File(_) => Abort::UpstreamDied,
            Self::Silent => Abort::UpstreamSilent,
            Self::Mismatch(_) => Abort::Mismatch,
        }
    }
}

impl ReplyBody {
    /// A body for the reply to `call`, if the request counts as one.
    pub fn new(kind: Kind, mut call: Option<Call>, turn: Turn) -> Self {
        if let Some(call) = &mut call {
            call.replying();
        }
        let mut body = Self { kind, call, _turn: turn };
        // Such a body is not even looked at by the server.
        if body.is_end_stream() || body.call.as_ref().is_some_and(Call::is_head) {
            body.ended();
        }
        body
    }

    fn ended(&mut self) {
        match &mut self.kind {
            Kind::Upstream(body) => body.delivered(),
            Kind::Held(body) => body.delivered(),
            Kind::Full(_) | Kind::File(_) => {}
        }
        if let Some(mut call) = self.call.take() {
            call.answered();
        }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = self.get_mut();
        let polled = match &mut this.kind {
            Kind::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Kind::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Kind::Upstream(body) => body.poll(cx),
            Kind::Held(body) => body.poll(cx),
            Kind::File(body) => body.poll(cx),
        };
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let (Some(call), Some(data)) = (&mut this.call, frame.data_ref()) {
                    call.sent += data.len() as u64;
                }
                // The server does not ask again after the last frame of a known length, or after trailers.
                if frame.is_trailers() || this.is_end_stream() {
                    this.ended();
                }
            }
            Poll::Ready(None) => this.ended(),
            Poll::Ready(Some(Err(cut))) => {
                if let Some(mut call) = this.call.take() {
                    tracing::warn!(request_id = %call.id, error = crate::gate::error_chain(cut), "reply cut");
                    call.aborted(cut.reason());
                }
            }
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Full(bytes) => bytes.is_empty(),
            Kind::Upstream(body) => body.is_end_stream(),
            Kind::Held(_) => false,
            Kind::File(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Upstream(body) => body.size_hint(),
            Kind::Held(_) => SizeHint::default(),
            Kind::File(body) => body.size_hint(),
        }
    }
}
