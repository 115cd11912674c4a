//! A client's socket with a limit on how long a request's head may take.
//!
//! hyper's own limit also runs while a kept-alive connection is idle, and then ends it without a word, just as a client
//! may be about to use it. This one runs from the first byte of a head to its last.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const BUSY: u8 = 2;

/// Sent before a connection is closed whose head did not come. It is a complete reply of its own.
const TIMED_OUT: &[u8] = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: 91\r\n\
connection: close\r\n\r\n{\"error\":{\"code\":408,\"message\":\"the head of the request took too long\",\"type\":\"timeout\"}}  ";

/// What a connection is doing.
#[derive(Clone, Debug, Default)]
pub struct Connection(Arc<AtomicU8>);

/// One request on a connection, from its head to the end of the reply.
#[derive(Debug)]
#[must_use = "dropping this makes the connection idle"]
pub struct Turn(Connection);

impl Connection {
    /// The head of a request is read.
    pub fn turn(&self) -> Turn {
        self.0.store(BUSY, Ordering::Relaxed);
        Turn(self.clone())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.0.store(IDLE, Ordering::Relaxed);
    }
}

/// A client's socket.
#[derive(Debug)]
pub struct ClientIo {
    stream: TcpStream,
    connection: Connection,
    limit: Duration,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl ClientIo {
    /// `stream`, on which a head may take `limit`.
    pub fn new(stream: TcpStream, connection: Connection, limit: Duration) -> Self {
        Self { stream, connection, limit, alarm: None }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        let state = &this.connection.0;
        if polled.is_ready() {
            if buf.filled().len() > before {
                // Fails while busy, when the bytes are a body's or a request's that waits its turn.
                if state.compare_exchange(IDLE, HEAD, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                    this.alarm = None;
                }
            }
            return polled;
        }
        if state.load(Ordering::Relaxed) != HEAD {
            this.alarm = None;
            return Poll::Pending;
        }
        let limit = this.limit;
        let alarm = this.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        if alarm.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        // Nothing else is being written between two requests. Whether it arrives or not, the connection ends.
        let _ = Pin::new(&mut this.stream).poll_write(cx, TIMED_OUT);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the head of a request took too long")))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_reply_has_the_length_it_says() {
        let text = std::str::from_utf8(TIMED_OUT).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
