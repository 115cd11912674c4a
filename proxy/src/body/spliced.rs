//! A body with one value put into it, without copying the rest.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::tag::Slot;

/// Bodies up to this size are copied into one piece: cheaper than handing over three.
const SMALL: usize = 32 << 10;

/// A request body in up to three pieces. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Spliced {
    segments: [Bytes; 3],
    next: usize,
}

impl Spliced {
    /// `body` with `value` in its slot.
    pub fn new(body: &Bytes, slot: &Slot, value: &str) -> Self {
        let (range, text) = match slot {
            Slot::Replace(range) => (range.clone(), value.to_owned()),
            Slot::Insert { at, comma } => {
                (*at..*at, format!("\"rid\":{value}{}", if *comma { "," } else { "" }))
            }
        };
        if body.len() > SMALL {
            return Self {
                segments: [body.slice(..range.start), text.into(), body.slice(range.end..)],
                next: 0,
            };
        }
        let mut whole = BytesMut::with_capacity(body.len() + text.len());
        whole.put_slice(&body[..range.start]);
        whole.put_slice(text.as_bytes());
        whole.put_slice(&body[range.end..]);
        Self::from(whole.freeze())
    }

    /// Bytes that are left to send.
    pub fn len(&self) -> u64 {
        self.segments[self.next..].iter().map(|segment| segment.len() as u64).sum()
    }

    /// Whether nothing is left to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces.
    pub fn into_segments(self) -> [Bytes; 3] {
        self.segments
    }
}

impl From<Bytes> for Spliced {
    fn from(whole: Bytes) -> Self {
        Self { segments: [whole, Bytes::new(), Bytes::new()], next: 0 }
    }
}

impl Body for Spliced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        while self.next < self.segments.len() {
            let next = self.next;
            self.next += 1;
            let segment = std::mem::take(&mut self.segments[next]);
            if !segment.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(segment))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len())
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn small_and_large_bodies_are_spliced_alike() {
        for padding in [0, SMALL + 1] {
            let body = Bytes::from(format!("{{\"a\":\"{}\"}}", "x".repeat(padding)));
            let spliced = Spliced::new(&body, &Slot::Insert { at: 1, comma: true }, "\"id\"");
            assert_eq!(spliced.size_hint().exact(), Some(body.len() as u64 + 11));
            let sent = spliced.collect().await.unwrap().to_bytes();
            assert_eq!(&sent[..12], b"{\"rid\":\"id\",");
            assert_eq!(&sent[12..], &body[1..]);
        }
    }
}
