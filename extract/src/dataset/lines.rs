//! Lines of a file with their positions, each bounded.

use std::{
    fmt,
    io::{self, BufRead},
};

use xxhash_rust::xxh3::Xxh3Default;

/// The longest line that is read. A million tokens are about 7 MB of JSON; what is beyond this is not a sample but a
/// file without line ends, which must not be taken into memory whole.
pub(super) const MAX_LINE_BYTES: usize = 1 << 28;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// One line.
pub(super) struct Line<'a> {
    /// From 1.
    pub(super) number: u64,
    /// Byte offset of `text` in the file.
    pub(super) offset: u64,
    /// Without its line feed.
    pub(super) text: Result<&'a [u8], LineTooLong>,
}

/// The line is longer than [`MAX_LINE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LineTooLong {
    bytes: u64,
    limit: usize,
}

impl fmt::Display for LineTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the line is {} bytes long; at most {} are read", self.bytes, self.limit)
    }
}

/// Reads lines one after the other into one buffer.
pub(super) struct Lines<R> {
    reader: R,
    buffer: Vec<u8>,
    offset: u64,
    number: u64,
    limit: usize,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self::with_limit(reader, MAX_LINE_BYTES)
    }

    pub(super) fn with_limit(reader: R, limit: usize) -> Self {
        Self { reader, buffer: Vec::new(), offset: 0, number: 0, limit }
    }

    /// Bytes read so far.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next line, feeding every byte read to `whole`; `None` at the end of the file.
    pub(super) fn next(&mut self, whole: &mut Xxh3Default) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let start = self.offset;
        let mut length = 0u64;
        let mut ended = false;
        while !ended {
            let chunk = match self.reader.fill_buf() {
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if chunk.is_empty() {
                break;
            }
            let end = chunk.iter().position(|&byte| byte == b'\n');
            ended = end.is_some();
            let text = &chunk[..end.unwrap_or(chunk.len())];
            let used = text.len() + usize::from(ended);
            whole.update(&chunk[..used]);
            length += text.len() as u64;
            if length <= self.limit as u64 {
                self.buffer.extend_from_slice(text);
            }
            self.offset += used as u64;
            self.reader.consume(used);
        }
        if length == 0 && !ended {
            return Ok(None);
        }
        self.number += 1;
        let limit = self.limit;
        if length > limit as u64 {
            // What was taken before the limit was passed need not stay.
            self.buffer = Vec::new();
            let text = Err(LineTooLong { bytes: length, limit });
            return Ok(Some(Line { number: self.number, offset: start, text }));
        }
        let mark = if self.number == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
            BYTE_ORDER_MARK.len()
        } else {
            0
        };
        Ok(Some(Line { number: self.number, offset: start + mark as u64, text: Ok(&self.buffer[mark..]) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Seen = (u64, u64, Result<Vec<u8>, String>);

    fn lines(input: &[u8], limit: usize) -> (Vec<Seen>, u128) {
        let mut whole = Xxh3Default::new();
        let mut lines = Lines::with_limit(io::BufReader::with_capacity(3, input), limit);
        let mut seen = Vec::new();
        while let Some(line) = lines.next(&mut whole).unwrap() {
            let text = line.text.map(<[u8]>::to_vec).map_err(|error| error.to_string());
            seen.push((line.number, line.offset, text));
        }
        (seen, whole.digest128())
    }

    #[test]
    fn every_line_has_its_number_and_place() {
        let (seen, hash) = lines(b"ab\n\ncdefg\nh", 100);
        let expected = [(1, 0, "ab"), (2, 3, ""), (3, 4, "cdefg"), (4, 10, "h")]
            .map(|(n, o, t)| (n, o, Ok(t.as_bytes().to_vec())));
        assert_eq!(seen, expected);
        assert_eq!(hash, xxhash_rust::xxh3::xxh3_128(b"ab\n\ncdefg\nh"));
    }

    #[test]
    fn a_line_beyond_the_limit_is_passed_over_and_the_next_is_read() {
        let (seen, _) = lines(b"abcdefghij\nok\n", 5);
        assert_eq!(seen[0], (1, 0, Err("the line is 10 bytes long; at most 5 are read".into())));
        assert_eq!(seen[1], (2, 11, Ok(b"ok".to_vec())));
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_the_first_line() {
        let (seen, _) = lines(b"\xEF\xBB\xBFx\n\xEF\xBB\xBFy", 100);
        assert_eq!(seen[0], (1, 3, Ok(b"x".to_vec())));
        assert_eq!(seen[1], (2, 5, Ok(b"\xEF\xBB\xBFy".to_vec())));
    }
}
