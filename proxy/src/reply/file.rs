//! The body of a reply that is a file.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use tokio::fs::File;
use tokio::io::{AsyncRead, ReadBuf};

use super::Cut;

/// Bytes read at once.
const BLOCK: usize = 256 << 10;

/// A file from its beginning, as long as it was when it was opened.
#[derive(Debug)]
pub struct FileBody {
    file: File,
    left: u64,
    buffer: BytesMut,
}

impl FileBody {
    /// The first `len` bytes of `file`.
    pub fn new(file: File, len: u64) -> Self {
        Self { file, left: len, buffer: BytesMut::new() }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.buffer.resize(BLOCK.min(usize::try_from(self.left).unwrap_or(BLOCK)), 0);
        let mut block = ReadBuf::new(&mut self.buffer);
        if let Err(error) = ready!(Pin::new(&mut self.file).poll_read(cx, &mut block)) {
            return Poll::Ready(Some(Err(Cut::File(error))));
        }
        let len = block.filled().len();
        if len == 0 {
            // A dump never gets shorter; it must not look complete.
            return Poll::Ready(Some(Err(Cut::File(std::io::ErrorKind::UnexpectedEof.into()))));
        }
        self.left -= len as u64;
        Poll::Ready(Some(Ok(Frame::data(self.buffer.split_to(len).freeze()))))
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
