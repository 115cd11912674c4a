//! Strings that end a text.

use super::TextStream;
use crate::engine::StopText;

/// Watches a growing text for the first of some strings.
pub struct StopStrings {
    text: TextStream,
    strings: Vec<String>,
    /// The end of the text: as much as the longest string needs to be found across two tokens.
    tail: String,
    longest: usize,
}

impl StopStrings {
    /// Of a text that has no tokens yet. Empty strings are in every text and are not looked for.
    pub fn new(text: TextStream, strings: Vec<String>) -> Self {
        let strings: Vec<String> = strings.into_iter().filter(|string| !string.is_empty()).collect();
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        Self { text, strings, tail: String::new(), longest }
    }
}

impl StopText for StopStrings {
    fn push(&mut self, token: i64) -> Option<String> {
        // A token that has no text cannot complete a string. The reply's own decoding says so to the client.
        self.tail.push_str(&self.text.push(token).unwrap_or_default());
        let found = first_stop(&self.tail, &self.strings).map(|(_, string)| string.to_owned());
        let mut cut = self.tail.len().saturating_sub(self.longest);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
        found
    }
}

/// Where the first of the strings stands in the text, and which it is; of several at one place the one listed first.
pub(crate) fn first_stop<'a>(text: &str, strings: &'a [String]) -> Option<(usize, &'a str)> {
    let found = strings.iter().filter_map(|string| Some((text.find(string.as_str())?, string.as_str())));
    found.min_by_key(|(at, _)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_string_in_the_text_counts() {
        let strings = ["b".to_owned(), "aa".to_owned(), "a".to_owned()];
        assert_eq!(first_stop("xxaab", &strings), Some((2, "aa")));
        assert_eq!(first_stop("xxab", &strings), Some((2, "a")));
        assert_eq!(first_stop("xx", &strings), None);
    }
}
