//! Moves over JSON text without building anything: strings, whole values, whitespace.
//!
//! Only what is needed to find the members of the outermost object is checked. For text that is JSON the ends of values
//! are found exactly; of text that is not, some passes, and the upstream refuses it. Nothing here recurses, so nesting
//! costs nothing.

use std::ops::Range;

use super::InvalidBody;

/// A position in JSON text.
pub(super) struct Cursor<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    /// The byte here, if any is left.
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    pub(super) fn skip_whitespace(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    /// Goes past `byte`, or says what stands there instead.
    pub(super) fn expect(&mut self, byte: u8, what: &'static str) -> Result<(), InvalidBody> {
        if self.peek() != Some(byte) {
            return Err(self.unexpected(what));
        }
        self.at += 1;
        Ok(())
    }

    pub(super) fn unexpected(&self, expected: &'static str) -> InvalidBody {
        match self.peek() {
            Some(_) => InvalidBody::Unexpected { at: self.at, expected },
            None => InvalidBody::CutShort,
        }
    }

    /// Goes past the string that begins here; what is between its quotes.
    pub(super) fn string(&mut self) -> Result<Range<usize>, InvalidBody> {
        self.expect(b'"', "a string")?;
        let start = self.at;
        loop {
            let rest = &self.bytes[self.at..];
            let found = memchr::memchr2(b'"', b'\\', rest).ok_or(InvalidBody::CutShort)?;
            self.at += found;
            if self.bytes[self.at] == b'"' {
                self.at += 1;
                return Ok(start..self.at - 1);
            }
            // A backslash and the character that it escapes, which may be a quote.
            self.at += 2;
            if self.at > self.bytes.len() {
                return Err(InvalidBody::CutShort);
            }
        }
    }

    /// Goes past the value that begins here; where it stands.
    pub(super) fn value(&mut self) -> Result<Range<usize>, InvalidBody> {
        let start = self.at;
        match self.peek() {
            Some(b'"') => {
                self.string()?;
            }
            Some(b'{' | b'[') => self.container()?,
            _ => self.scalar()?,
        }
        Ok(start..self.at)
    }

    /// Goes to the next element of the array whose inside this is: past a comma, if it is not the first. `false` at the
    /// bracket that closes it, which is passed.
    pub(super) fn next_element(&mut self, first: bool) -> Result<bool, InvalidBody> {
        self.skip_whitespace();
        match self.peek() {
            Some(b']') => {
                self.at += 1;
                Ok(false)
            }
            Some(b',') if !first => {
                self.at += 1;
                self.skip_whitespace();
                Ok(true)
            }
            Some(_) if first => Ok(true),
            _ => Err(self.unexpected("`,` or `]`")),
        }
    }

    /// A number, a literal, or whatever else stands up to the next delimiter: `NaN` and `1e999` pass.
    fn scalar(&mut self) -> Result<(), InvalidBody> {
        let start = self.at;
        while let Some(byte) = self.peek() {
            match byte {
                b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t' => break,
                b'"' | b'{' | b'[' | b':' => return Err(self.unexpected("the end of a value")),
                _ => self.at += 1,
            }
        }
        if self.at == start { Err(self.unexpected("a value")) } else { Ok(()) }
    }

    fn container(&mut self) -> Result<(), InvalidBody> {
        let mut depth = 0usize;
        loop {
            match self.structural()? {
                b'"' => {
                    self.string()?;
                    continue;
                }
                // Brackets of either kind count as one: in JSON they match, so the end is the same.
                b'[' | b'{' => depth += 1,
                _ => depth -= 1,
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Goes to the next quote or bracket.
    fn structural(&mut self) -> Result<u8, InvalidBody> {
        // `[` and `{`, and `]` and `}`, differ in one bit: three comparisons a byte, which the compiler does 16 or 32 at
        // a time.
        let is = |byte: u8| (byte == b'"') | (byte | 0x20 == b'{') | (byte | 0x20 == b'}');
        let mut rest = &self.bytes[self.at..];
        while let Some((block, after)) = rest.split_first_chunk::<64>() {
            if block.iter().fold(0, |any, &byte| any | u8::from(is(byte))) != 0 {
                break;
            }
            rest = after;
        }
        let ahead = rest.iter().position(|&byte| is(byte)).ok_or(InvalidBody::CutShort)?;
        self.at = self.bytes.len() - rest.len() + ahead;
        Ok(self.bytes[self.at])
    }
}
