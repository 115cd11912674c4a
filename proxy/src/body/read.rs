//! Reads a request body whole, under a limit of its own and one for all bodies together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use prometheus::IntGauge;

/// The memory that all request bodies share.
#[derive(Clone, Debug)]
pub struct Budget {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    limit: u64,
    used: AtomicU64,
    gauge: IntGauge,
}

/// A part of a [`Budget`], given back when dropped.
#[derive(Debug)]
#[must_use = "dropping this gives the memory back"]
pub struct Reserved {
    shared: Arc<Shared>,
    bytes: u64,
}

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is longer than is accepted.
    #[error("the body is longer than {limit} bytes")]
    TooLong {
        /// Most bytes accepted.
        limit: u64,
    },
    /// Other bodies fill the memory.
    #[error("the bodies of other requests fill the memory of {limit} bytes")]
    NoMemory {
        /// Bytes for all bodies.
        limit: u64,
    },
    /// The client sent nothing for too long.
    #[error("the client sent nothing for {} s inside the body", after.as_secs())]
    Stalled {
        /// How long.
        after: Duration,
    },
    /// The client went away, or sent broken chunks.
    #[error("the body cannot be read")]
    Broken(#[source] hyper::Error),
}

impl Budget {
    /// A budget of `limit` bytes whose use shows in `gauge`.
    pub fn new(limit: u64, gauge: IntGauge) -> Self {
        Self { shared: Arc::new(Shared { limit, used: AtomicU64::new(0), gauge }) }
    }

    /// Nothing yet; see [`Reserved::grow`].
    pub fn nothing(&self) -> Reserved {
        Reserved { shared: self.shared.clone(), bytes: 0 }
    }
}

impl Reserved {
    /// Takes `bytes` more.
    ///
    /// # Errors
    /// [`ReadError::NoMemory`]; what was taken before stays.
    pub fn grow(&mut self, bytes: u64) -> Result<(), ReadError> {
        let limit = self.shared.limit;
        self.shared
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|used| *used <= limit)
            })
            .map_err(|_| ReadError::NoMemory { limit })?;
        self.bytes += bytes;
        self.shared.gauge.add(bytes as i64);
        Ok(())
    }

    /// Gives `bytes` back.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.shared.used.fetch_sub(bytes, Ordering::Relaxed);
        self.shared.gauge.sub(bytes as i64);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

/// Reads `body` to its end. A body that came in one piece is not copied.
///
/// # Errors
/// See [`ReadError`].
pub async fn read<B>(
    mut body: B,
    limit: u64,
    stall: Duration,
    memory: &mut Reserved,
) -> Result<Bytes, ReadError>
where
    B: Body<Data = Bytes, Error = hyper::Error> + Unpin,
{
    let announced = body.size_hint().lower();
    if announced > limit {
        return Err(ReadError::TooLong { limit });
    }
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    let mut len = 0u64;
    while let Some(frame) = next_frame(&mut body, stall).await? {
        let Ok(data) = frame.into_data() else { continue };
        len += data.len() as u64;
        if len > limit {
            return Err(ReadError::TooLong { limit });
        }
        memory.grow(data.len() as u64)?;
        if first.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            // Pages of it become real as they are written, so a lie costs nothing.
            whole.reserve(usize::try_from(announced.max(len)).unwrap_or(0));
            whole.extend_from_slice(&first);
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}

/// Reads and forgets what a client still sends, for a short time. A client that is answered and cut off while it sends
/// may never see the answer.
pub async fn discard<B>(mut body: B)
where
    B: Body<Data = Bytes, Error = hyper::Error> + Unpin,
{
    const LONGEST: Duration = Duration::from_secs(1);
    let all = async { while let Some(Ok(_)) = body.frame().await {} };
    // Whether it ended or not, the answer is due.
    let _ = tokio::time::timeout(LONGEST, all).await;
}

async fn next_frame<B>(body: &mut B, stall: Duration) -> Result<Option<http_body::Frame<Bytes>>, ReadError>
where
    B: Body<Data = Bytes, Error = hyper::Error> + Unpin,
{
    if body.is_end_stream() {
        return Ok(None);
    }
    match tokio::time::timeout(stall, body.frame()).await {
        Ok(frame) => frame.transpose().map_err(ReadError::Broken),
        Err(_) => Err(ReadError::Stalled { after: stall }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_when_the_body_is_gone() {
        let gauge = IntGauge::new("used", "used").unwrap();
        let budget = Budget::new(10, gauge.clone());
        let mut one = budget.nothing();
        let mut two = budget.nothing();
        one.grow(6).unwrap();
        assert!(matches!(two.grow(5), Err(ReadError::NoMemory { limit: 10 })));
        two.grow(4).unwrap();
        assert_eq!(gauge.get(), 10);
        drop(one);
        two.grow(6).unwrap();
        two.shrink(3);
        assert_eq!(gauge.get(), 7);
        drop(two);
        assert_eq!(gauge.get(), 0);
    }
}
