//! Kept-alive connections to one upstream.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tracing::debug;

use super::wire::{Wire, WiredStream};
use crate::body::Spliced;

/// For how long an idle connection is kept. uvicorn closes its own after 5 s, and the side that is first does not meet a
/// connection that the other has just closed.
const IDLE: Duration = Duration::from_secs(3);

/// Most header lines of a reply.
const MAX_HEADERS: usize = 256;

/// The idle connections to one address.
#[derive(Debug)]
pub struct Pool {
    address: String,
    /// For how long a connection may take to open.
    connect: Duration,
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

/// A connection that can take a request.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) sender: SendRequest<Spliced>,
    pub(super) wire: Arc<Wire>,
    /// Whether it has carried a request before.
    pub(super) reused: bool,
}

/// A connection that carries a request. It goes back to the pool with [`Lease::keep`], and is closed when dropped.
#[derive(Debug)]
pub struct Lease {
    pub(super) connection: Connection,
}

impl Pool {
    /// A pool for `address`, host and port. A connection that is not open after `connect` has failed.
    pub fn new(address: String, connect: Duration) -> Self {
        Self { address, connect, idle: Mutex::new(Vec::new()) }
    }

    /// An idle connection that can be used at once, the last used first.
    pub(super) fn idle(&self) -> Option<Connection> {
        let mut idle = self.lock();
        let mut busy = Vec::new();
        let mut found = None;
        while let Some(Idle { connection, since }) = idle.pop() {
            if connection.sender.is_closed() || since.elapsed() > IDLE {
                continue;
            }
            if connection.sender.is_ready() {
                found = Some(connection);
                break;
            }
            // The last reply's end is still on its way through it, or a request that was answered early.
            busy.push(Idle { connection, since });
        }
        idle.extend(busy.into_iter().rev());
        found
    }

    /// A new connection.
    pub(super) async fn connect(&self) -> io::Result<Connection> {
        let stream = tokio::time::timeout(self.connect, TcpStream::connect(&self.address))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        // Events of a stream and small requests must not wait for the acknowledgement of what went before.
        stream.set_nodelay(true)?;
        let (stream, wire) = WiredStream::new(stream);
        let (sender, connection) = http1::Builder::new()
            .max_headers(MAX_HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                // Whoever waits for the reply is told; this is for a connection that nobody waits for.
                debug!(%error, "upstream connection ended");
            }
        });
        Ok(Connection { sender, wire, reused: false })
    }

    /// Takes a connection back whose reply has ended.
    fn put(&self, mut connection: Connection) {
        if !connection.sender.is_closed() {
            connection.reused = true;
            self.lock().push(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes connections that were idle for too long.
    pub fn close_idle(&self) {
        self.lock().retain(|idle| !idle.connection.sender.is_closed() && idle.since.elapsed() <= IDLE);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Idle>> {
        // The list is whole between any two statements that could panic.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Gives the connection back to its pool.
    pub fn keep(self, pool: &Pool) {
        pool.put(self.connection);
    }
}
