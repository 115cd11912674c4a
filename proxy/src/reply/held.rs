//! A stream of server-sent events whose end waits for the dumps.
//!
//! The rows of generated tokens are only complete when the last token is, so the dump of such a request is published
//! with the last event, not before the first. That event and `[DONE]` are held back until the dumps are checked. Which
//! event is the last is not known until the next one comes, unless it says that its samples go on
//! (`"finish_reason": null`): then it is not, and is passed on at once.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use memchr::memmem;

use super::{Cut, UpstreamBody};
use crate::gate::Failure;

/// Longest event that is held back.
const MAX_EVENT: usize = 64 << 20;

/// The comparison of the dumps with the request.
type Gate = Pin<Box<dyn Future<Output = Result<Vec<PathBuf>, Failure>> + Send>>;

/// A stream of events whose end is held back.
pub struct HeldStream {
    inner: UpstreamBody,
    events: Events,
    gate: Option<Gate>,
    /// Whether the end goes out though the dumps are not right.
    warn_only: bool,
    /// Whether it is of one prompt, so that an end without a dump is the end of all of it.
    single: bool,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Events pass, the last that may be final held back.
    Streaming,
    /// The end is here; the dumps are looked at.
    Checking,
    /// All passes.
    Open,
}

impl fmt::Debug for HeldStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldStream").field("state", &self.state).finish_non_exhaustive()
    }
}

impl HeldStream {
    /// Holds back the end of `inner` until `gate` is through.
    pub fn new(inner: UpstreamBody, gate: Gate, warn_only: bool, single: bool) -> Self {
        Self {
            inner,
            events: Events::default(),
            gate: Some(gate),
            warn_only,
            single,
            state: State::Streaming,
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            match self.state {
                State::Streaming => match ready!(self.inner.poll(cx)) {
                    Some(Ok(frame)) => {
                        let Ok(data) = frame.into_data() else { continue };
                        let free = self.events.push(&data);
                        if self.events.ended {
                            self.state = State::Checking;
                        } else if self.events.held() > MAX_EVENT {
                            return Poll::Ready(Some(Err(Cut::Event(MAX_EVENT))));
                        }
                        if !free.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(free))));
                        }
                    }
                    Some(Err(cut)) => return Poll::Ready(Some(Err(cut))),
                    None => self.state = State::Checking,
                },
                State::Checking => {
                    if self.single && self.events.dumpless {
                        // It was aborted or failed, and says so: there is no dump to wait for.
                        self.gate = None;
                    }
                    if let Some(gate) = &mut self.gate {
                        let result = ready!(gate.as_mut().poll(cx));
                        self.gate = None;
                        match result {
                            Err(failure) if !self.warn_only => {
                                return Poll::Ready(Some(Err(Cut::Mismatch(Box::new(failure)))));
                            }
                            _ => {}
                        }
                    }
                    self.state = State::Open;
                    let rest = self.events.rest();
                    if !rest.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(rest))));
                    }
                }
                State::Open => return self.inner.poll(cx),
            }
        }
    }

    pub(super) fn delivered(&mut self) {
        self.inner.delivered();
    }
}

/// Tells events apart, however the bytes are cut.
#[derive(Debug, Default)]
struct Events {
    bytes: BytesMut,
    /// Where the first event begins that is not complete.
    partial: usize,
    /// How far a line end was looked for.
    seen: usize,
    /// `[DONE]` has come.
    ended: bool,
    /// An event said that its text was aborted or failed.
    dumpless: bool,
}

impl Events {
    /// Adds bytes; what may be passed on.
    fn push(&mut self, data: &[u8]) -> Bytes {
        self.bytes.extend_from_slice(data);
        let mut free = 0;
        // The event that is held: from `free` to `partial`, always the last complete one.
        while let Some(end) = self.next_end() {
            let event = &self.bytes[self.partial..end];
            if is_done(event) {
                self.ended = true;
                break;
            }
            let goes_on = goes_on(event);
            self.dumpless |= !goes_on && is_dumpless(event);
            // Another event has come, so the one that was held is not the last.
            free = if goes_on { end } else { self.partial };
            self.partial = end;
            self.seen = end;
        }
        let free = self.bytes.split_to(free).freeze();
        self.partial -= free.len();
        self.seen -= free.len();
        free
    }

    /// Where the event ends that begins at `partial`: after an empty line.
    fn next_end(&mut self) -> Option<usize> {
        // Line ends may be LF, CR LF or CR; an empty line is two of one kind in a row, of which a cut may part the first
        // from the rest.
        let from = self.seen.saturating_sub(3).max(self.partial);
        for at in memchr::memchr2_iter(b'\n', b'\r', &self.bytes[from..]).map(|at| from + at) {
            for end in [&b"\n\n"[..], b"\r\n\r\n", b"\r\r"] {
                if self.bytes[at..].starts_with(end) {
                    return Some(at + end.len());
                }
            }
        }
        self.seen = self.bytes.len();
        None
    }

    fn held(&self) -> usize {
        self.bytes.len()
    }

    fn rest(&mut self) -> Bytes {
        self.bytes.split().freeze()
    }
}

fn is_done(event: &[u8]) -> bool {
    let mut lines = event.split(|byte| matches!(byte, b'\n' | b'\r'));
    lines.any(|line| line.strip_prefix(b"data:").is_some_and(|data| data.trim_ascii() == b"[DONE]"))
}

/// Whether the event is an error, or the end of a text that was aborted.
fn is_dumpless(event: &[u8]) -> bool {
    let Some(data) = event.strip_prefix(b"data:") else { return false };
    let Ok(event) = serde_json::from_slice::<serde_json::Value>(data.trim_ascii()) else { return false };
    let reason = |path: &str| event.pointer(path).and_then(serde_json::Value::as_str) == Some("abort");
    event.get("error").is_some()
        || reason("/meta_info/finish_reason/type")
        || reason("/choices/0/finish_reason")
}

/// Whether the event says of every sample in it that more will come. Inside a JSON string the quotes of the key would be
/// escaped, so the text cannot be met there.
fn goes_on(event: &[u8]) -> bool {
    let mut found = false;
    for at in memmem::find_iter(event, b"\"finish_reason\":") {
        found = true;
        let value = event[at + b"\"finish_reason\":".len()..].trim_ascii_start();
        if !value.starts_with(b"null") {
            return false;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_event_is_held_and_those_that_go_on_are_not() {
        let mut events = Events::default();
        let (going, last) =
            ("data: {\"finish_reason\": null}\n\n", "data: {\"finish_reason\":{\"type\":\"length\"}}\n\n");
        assert_eq!(events.push(going.as_bytes()), going);
        assert_eq!(events.push(last.as_bytes()), "");
        assert_eq!(events.push(b"data: [DO"), "");
        assert!(!events.ended);
        assert_eq!(events.push(b"NE]\n\n"), "");
        assert!(events.ended);
        assert_eq!(events.rest(), [last, "data: [DONE]\n\n"].concat());
    }

    #[test]
    fn an_event_that_does_not_tell_is_held_until_the_next() {
        let mut events = Events::default();
        assert_eq!(events.push(b"data:{\"a\":1}\r\n\r\n"), "");
        assert_eq!(events.push(b"data:{\"a\":2}\r\n\r\n"), "data:{\"a\":1}\r\n\r\n");
        assert_eq!(events.push(b"data:[DONE]\r\n\r\n"), "");
        assert_eq!(events.rest(), "data:{\"a\":2}\r\n\r\ndata:[DONE]\r\n\r\n");
    }

    #[test]
    fn an_abort_and_an_error_say_that_there_is_no_dump() {
        for (last, expected) in [
            (r#"{"meta_info":{"finish_reason":{"type":"abort","message":"Aborted"}}}"#, true),
            (r#"{"choices":[{"finish_reason":"abort"}]}"#, true),
            (r#"{"error":{"message":"the forward pass failed","code":500}}"#, true),
            (r#"{"text":"abort","meta_info":{"finish_reason":{"type":"length"}}}"#, false),
            ("not JSON", false),
        ] {
            let mut events = Events::default();
            events.push(b"data: {\"finish_reason\": null}\n\n");
            events.push(format!("data: {last}\n\ndata: [DONE]\n\n").as_bytes());
            assert_eq!((events.ended, events.dumpless), (true, expected), "{last}");
        }
    }

    #[test]
    fn text_that_looks_like_the_key_does_not_count() {
        assert!(!goes_on(br#"data: {"text":"\"finish_reason\":null","finish_reason":"stop"}"#));
        assert!(!goes_on(br#"data: {"choices":[{"finish_reason":null},{"finish_reason":"stop"}]}"#));
        assert!(!goes_on(br#"data: {"text":"\"finish_reason\":null"}"#));
    }

    proptest! {
        #[test]
        fn any_cut_gives_all_bytes_in_order_and_holds_the_end(
            texts in prop::collection::vec("[a-zé\":]{0,12}", 1..8),
            going in any::<bool>(),
            end in prop::sample::select(vec!["\n\n", "\r\n\r\n", "\r\r"]),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        ) {
            let event = |text: &String| format!("data: {}{}{end}", text, if going { "\"finish_reason\":null" } else { "" });
            let passing: String = texts.iter().map(event).collect();
            let last = format!("data: {{\"finish_reason\":\"stop\"}}{end}data: [DONE]{end}");
            let whole = [passing.as_bytes(), last.as_bytes()].concat();
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(whole.len())).collect();
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            let mut events = Events::default();
            let mut passed = Vec::new();
            for pair in cuts.windows(2) {
                prop_assert!(!events.ended || pair[0] == pair[1]);
                passed.extend_from_slice(&events.push(&whole[pair[0]..pair[1]]));
            }
            prop_assert!(events.ended);
            prop_assert_eq!(&passed, passing.as_bytes());
            prop_assert_eq!(events.rest(), last);
        }
    }
}
