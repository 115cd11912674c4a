//! Strings that end a text.

use std::sync::Arc;

use super::Tokenizer;
use crate::engine::StopText;

/// Watches a growing text for the first of some strings.
pub struct StopStrings {
    tokenizer: Arc<Tokenizer>,
    strings: Vec<String>,
    /// The last tokens: as many as the longest string can be made of, and some without a text.
    tail: Vec<i64>,
    window: usize,
}

/// Tokens without a text that may lie within a string.
const SPARE: usize = 16;

impl StopStrings {
    /// Of a text that has no tokens yet. Empty strings are in every text and are not looked for.
    pub fn new(tokenizer: Arc<Tokenizer>, strings: Vec<String>) -> Self {
        let strings: Vec<String> = strings.into_iter().filter(|string| !string.is_empty()).collect();
        // A token that has a text has a byte of it at least.
        let window = strings.iter().map(String::len).max().unwrap_or(0) + SPARE;
        Self { tokenizer, strings, tail: Vec::new(), window }
    }
}

impl StopText for StopStrings {
    fn push(&mut self, token: i64) -> Option<String> {
        if self.tail.len() == self.window {
            self.tail.remove(0);
        }
        self.tail.push(token);
        // With special tokens, as SGLang looks: a string that spells one (`<|im_end|>`) ends the text even if the reply leaves
        // such tokens out. Tokens that have no text complete no string; the reply's own decoding tells the client so.
        let text = self.tokenizer.decode(&self.tail, false).ok()?;
        first_stop(&text, &self.strings).map(|(_, string)| string.to_owned())
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
