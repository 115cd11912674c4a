//! Where the answer of a job comes in: what became of the text, and what became of its dump.

use tokio::sync::oneshot;

use super::{Done, Finish};
use crate::error::ApiError;
use crate::sink::{self, CaptureReply, Written};

/// Sends what became of a job's text.
pub type DoneSender = oneshot::Sender<Result<Done, ApiError>>;
/// Sends what became of its dump. Dropped without a word when the job was withdrawn before it was published.
pub type CaptureSender = oneshot::Sender<Result<Written, ApiError>>;

/// The client's side of a job. The two halves come in any order: the states of a prompt are written while its text goes on.
#[derive(Debug)]
pub struct Pending {
    done: oneshot::Receiver<Result<Done, ApiError>>,
    capture: Option<oneshot::Receiver<Result<Written, ApiError>>>,
    captures: bool,
    early: bool,
    published: Option<Written>,
}

impl Pending {
    /// One for a job, with where the engine and the writers send to; the latter if the job `captures`.
    /// `early` says that the dump does not wait for the text's end.
    pub fn new(captures: bool, early: bool) -> (Self, DoneSender, Option<CaptureSender>) {
        let (send_done, done) = oneshot::channel();
        let (send_capture, capture) = captures.then(oneshot::channel).unzip();
        (Self { done, capture, captures, early, published: None }, send_done, send_capture)
    }

    /// Whether a dump was asked for.
    pub fn captures(&self) -> bool {
        self.captures
    }

    /// Whether one was that is published before the text ends.
    pub fn is_captured_early(&self) -> bool {
        self.captures && self.early
    }

    /// Waits for the dump, of which there is none if none was asked for or the job was withdrawn before.
    ///
    /// # Errors
    /// It could not be written.
    pub async fn captured(&mut self) -> Result<Option<&CaptureReply>, ApiError> {
        captured(&mut self.capture, &mut self.published).await?;
        Ok(self.published.as_ref().map(|written| &written.capture))
    }

    /// Waits for the text and the dump. An error of one of them does not wait for the other.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn finished(&mut self) -> Result<Done, ApiError> {
        // A sender that is dropped without a word: the thread that had it is gone.
        let done = async { (&mut self.done).await.unwrap_or(Err(ApiError::EngineStopped)) };
        let captured = captured(&mut self.capture, &mut self.published);
        let (done, ()) = futures_util::future::try_join(done, captured).await?;
        if self.captures && self.published.is_none() && done.finish != Finish::Aborted {
            return Err(ApiError::WriteFailed("the writing of the dump ended abnormally".to_owned()));
        }
        let capture = self.published.as_ref().map(|written| written.capture.clone());
        Ok(Done { capture, ..done })
    }

    /// Gives back the names that a published dump holds.
    pub fn free_names(&mut self) {
        if let Some(written) = &mut self.published {
            written.names.clear();
        }
    }

    /// Nobody wants the answer any more: a dump that was published is removed, and one that is being written will be.
    pub fn abandon(&mut self) {
        self.done.close();
        if let Some(capture) = &mut self.capture {
            capture.close();
            // It may have come between the last look and now.
            if let Ok(Ok(written)) = capture.try_recv() {
                self.published = Some(written);
            }
        }
        if let Some(Written { capture, names }) = self.published.take() {
            sink::remove(&capture.path);
            drop(names);
        }
    }
}

async fn captured(
    receiver: &mut Option<oneshot::Receiver<Result<Written, ApiError>>>,
    published: &mut Option<Written>,
) -> Result<(), ApiError> {
    let Some(waiting) = receiver else { return Ok(()) };
    // If this is dropped while it waits, nothing was taken out of the channel.
    let outcome = waiting.await;
    *receiver = None;
    if let Ok(outcome) = outcome {
        *published = Some(outcome?);
    }
    Ok(())
}
