//! A body with a value or two put into it, without copying the rest.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

use crate::tag::Slot;

/// Bodies up to this size are copied into one piece: cheaper than handing over several.
const SMALL: usize = 32 << 10;

/// One member that is written into the outermost object of a body.
#[derive(Clone, Copy, Debug)]
pub struct Edit<'a> {
    /// Where its value goes, or the whole of it.
    pub slot: &'a Slot,
    /// Its key, written only where the member is inserted.
    pub key: &'static str,
    /// Its value, as JSON.
    pub value: &'a str,
}

/// Most members written into one body.
const EDITS: usize = 2;

/// What is left of a body between them, and they.
const SEGMENTS: usize = 2 * EDITS + 1;

/// A request body in up to five pieces. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Spliced {
    segments: [Bytes; SEGMENTS],
    next: usize,
}

impl Spliced {
    /// `body` with the values in their slots, of which there are one or two.
    pub fn new<const N: usize>(body: &Bytes, mut edits: [Edit<'_>; N]) -> Self {
        const { assert!(N >= 1 && N <= EDITS) };
        // Stable: what is inserted at one place keeps its order.
        edits.sort_by_key(|edit| edit.slot.range().start);
        let mut inserts = edits.iter().filter(|edit| matches!(edit.slot, Slot::Insert { .. })).count();
        let edits = edits.map(|edit| match edit.slot {
            Slot::Replace(range) => (range.clone(), edit.value.to_owned()),
            Slot::Insert { at, comma } => {
                inserts -= 1;
                let comma = if *comma || inserts > 0 { "," } else { "" };
                (*at..*at, format!("\"{}\":{}{comma}", edit.key, edit.value))
            }
        });
        let mut from = 0;
        if body.len() > SMALL {
            let mut spliced = Self::from(Bytes::new());
            let mut next = spliced.segments.iter_mut();
            let mut push =
                |segment| *next.next().expect("an edit makes two pieces and the end one") = segment;
            for (range, text) in edits {
                push(body.slice(from..range.start));
                push(text.into());
                from = range.end;
            }
            push(body.slice(from..));
            return spliced;
        }
        let added: usize = edits.iter().map(|(_, text)| text.len()).sum();
        let mut whole = BytesMut::with_capacity(body.len() + added);
        for (range, text) in edits {
            whole.put_slice(&body[from..range.start]);
            whole.put_slice(text.as_bytes());
            from = range.end;
        }
        whole.put_slice(&body[from..]);
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
    pub fn into_segments(self) -> [Bytes; SEGMENTS] {
        self.segments
    }
}

impl From<Bytes> for Spliced {
    fn from(whole: Bytes) -> Self {
        Self { segments: [whole, Bytes::new(), Bytes::new(), Bytes::new(), Bytes::new()], next: 0 }
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
        let insert = Slot::Insert { at: 1, comma: true };
        for padding in [0, SMALL + 1] {
            let body = Bytes::from(format!("{{\"a\":\"{}\"}}", "x".repeat(padding)));
            let edit = Edit { slot: &insert, key: "rid", value: "\"id\"" };
            let spliced = Spliced::new(&body, [edit]);
            assert_eq!(spliced.size_hint().exact(), Some(body.len() as u64 + 11));
            let sent = spliced.collect().await.unwrap().to_bytes();
            assert_eq!(&sent[..12], b"{\"rid\":\"id\",");
            assert_eq!(&sent[12..], &body[1..]);
        }
    }

    #[tokio::test]
    async fn two_members_are_written_wherever_each_of_them_goes() {
        let padding = "x".repeat(SMALL);
        let long = format!(r#","z":"{padding}""#);
        for (tail, comma) in [("", ""), (long.as_str(), ",")] {
            let rest = tail.trim_start_matches(',');
            let first = Slot::Insert { at: 1, comma: !rest.is_empty() };
            for (body, rid, salt, expected) in [
                (
                    format!("{{{rest}}}"),
                    first.clone(),
                    first.clone(),
                    format!(r#"{{"rid":1,"salt":2{comma}{rest}}}"#),
                ),
                (
                    format!(r#"{{"rid":9{tail}}}"#),
                    Slot::Replace(7..8),
                    Slot::Insert { at: 1, comma: true },
                    format!(r#"{{"salt":2,"rid":1{tail}}}"#),
                ),
                (
                    format!(r#"{{"salt":9,"rid":"x"{tail}}}"#),
                    Slot::Replace(16..19),
                    Slot::Replace(8..9),
                    format!(r#"{{"salt":2,"rid":1{tail}}}"#),
                ),
            ] {
                let rid = Edit { slot: &rid, key: "rid", value: "1" };
                let salt = Edit { slot: &salt, key: "salt", value: "2" };
                let sent = Spliced::new(&body.into(), [rid, salt]).collect().await.unwrap().to_bytes();
                assert_eq!(std::str::from_utf8(&sent).unwrap(), expected);
            }
        }
    }
}
