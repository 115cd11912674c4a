//! The text of tokens that come one at a time.

use std::sync::Arc;

use super::{Tokenizer, TokenizerError};

/// Text that grows token by token. A character whose bytes come in several tokens appears when it is whole, and a piece never
/// changes once it was given out.
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    ids: Vec<i64>,
    /// Where the tokens begin whose text gives the next ones their spacing.
    context: usize,
    /// Tokens whose text has been given out.
    read: usize,
}

impl TextStream {
    /// An empty text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), context: 0, read: 0 }
    }

    /// Adds a token; what it, with held back ones before it, adds to the text.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn push(&mut self, token: i64) -> Result<String, TokenizerError> {
        self.ids.push(token);
        let (before, with) = (self.text(self.read)?, self.text(self.ids.len())?);
        // The replacement character at the end may be the first bytes of a character.
        if with.ends_with('\u{fffd}') || with.len() <= before.len() {
            return Ok(String::new());
        }
        self.context = self.read;
        self.read = self.ids.len();
        Ok(added(&before, &with))
    }

    /// What is still held back, at the end of the text.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let (before, with) = (self.text(self.read)?, self.text(self.ids.len())?);
        (self.context, self.read) = (self.read, self.ids.len());
        Ok(added(&before, &with))
    }

    /// The text of the tokens from the context up to the `end`th.
    fn text(&self, end: usize) -> Result<String, TokenizerError> {
        self.tokenizer.decode(&self.ids[self.context..end], self.skip_special_tokens)
    }
}

/// What `with` has behind `before`.
fn added(before: &str, with: &str) -> String {
    with.get(before.len()..).unwrap_or_default().to_owned()
}
