//! A connection to an upstream that remembers enough to tell whether a lost request can have been read.
//!
//! A kept-alive connection may be closed by the upstream just as the next request is written to it. Sending that request
//! once more is right, and sending one more that the upstream has begun to work on is wrong: it would be computed twice,
//! or kill a second server. The two look alike to an HTTP client, but not to the kernel:
//!
//! - A reset at once means that bytes were left unread, or came after the close: the request was not read whole. One that
//!   comes later may be the end of a server that had begun to compute, or of something on the way that forgot the
//!   connection.
//! - An orderly end with none of the request's bytes acknowledged means that the close came first.
//! - An orderly end after they were acknowledged means that the upstream read the request and then went away.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::tcp;

/// A reset after this long does not come from a race with an idle connection's end: a server that was about to close it
/// does so at its next turn.
const AT_ONCE: Duration = Duration::from_secs(1);

/// What is remembered of a connection.
#[derive(Debug, Default)]
pub(super) struct Wire {
    read: AtomicU64,
    written: AtomicU64,
    end: AtomicU8,
    acked_at_end: AtomicU64,
}

/// Where a connection stood when a request was given to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    read: u64,
    written: u64,
    since: Instant,
}

const ORDERLY: u8 = 1;
const RESET: u8 = 2;

impl Wire {
    pub(super) fn mark(&self) -> Mark {
        Mark {
            read: self.read.load(Ordering::Acquire),
            written: self.written.load(Ordering::Acquire),
            since: Instant::now(),
        }
    }

    /// Whether the request that was given at `mark` cannot have been read whole by the upstream.
    pub(super) fn is_untaken_since(&self, mark: Mark) -> bool {
        if self.read.load(Ordering::Acquire) != mark.read {
            return false;
        }
        match self.end.load(Ordering::Acquire) {
            RESET => mark.since.elapsed() < AT_ONCE,
            // The handshake counts as one acknowledged byte.
            ORDERLY => self.acked_at_end.load(Ordering::Acquire) <= mark.written + 1,
            // It failed before it reached the socket.
            _ => self.written.load(Ordering::Acquire) == mark.written,
        }
    }

    fn end(&self, stream: &TcpStream, how: u8) {
        // Where the kernel does not say, assume that all arrived.
        self.acked_at_end.store(tcp::bytes_acked(stream).unwrap_or(u64::MAX), Ordering::Release);
        // What comes first counts: an error after an orderly end tells nothing new.
        let _ = self.end.compare_exchange(0, how, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The socket, with its [`Wire`].
#[derive(Debug)]
pub(super) struct WiredStream {
    stream: TcpStream,
    wire: Arc<Wire>,
}

impl WiredStream {
    pub(super) fn new(stream: TcpStream) -> (Self, Arc<Wire>) {
        let wire = Arc::new(Wire::default());
        (Self { stream, wire: wire.clone() }, wire)
    }

    fn note(&self, error: &io::Error) {
        if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) {
            self.wire.end(&self.stream, RESET);
        }
    }

    fn wrote(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &result {
            Poll::Ready(Ok(len)) => {
                self.wire.written.fetch_add(*len as u64, Ordering::AcqRel);
            }
            Poll::Ready(Err(error)) => self.note(error),
            Poll::Pending => {}
        }
        result
    }
}

impl AsyncRead for WiredStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let (before, room) = (buf.filled().len(), buf.remaining());
        let result = Pin::new(&mut this.stream).poll_read(cx, buf);
        match &result {
            Poll::Ready(Ok(())) if buf.filled().len() > before => {
                this.wire.read.fetch_add((buf.filled().len() - before) as u64, Ordering::AcqRel);
            }
            Poll::Ready(Ok(())) if room > 0 => this.wire.end(&this.stream, ORDERLY),
            Poll::Ready(Err(error)) => this.note(error),
            _ => {}
        }
        result
    }
}

impl AsyncWrite for WiredStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.wrote(result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.wrote(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
