//! Text to token IDs and back, as the checkpoint's own tokenizer does it.

mod config;
mod stop;
mod stream;
mod tiktoken;

use std::path::{Path, PathBuf};

pub use config::{SpecialTokens, TokenizerConfig};
pub use stop::StopStrings;
pub(crate) use stop::first_stop;
pub use stream::TextStream;
use tiktoken::Tiktoken;

/// A checkpoint's tokenizer: `tokenizer.json`, or Kimi's `tiktoken.model`, with what `tokenizer_config.json` says.
pub struct Tokenizer {
    kind: Kind,
    /// The token that `add_bos_token` puts in front.
    bos: Option<u32>,
    /// The token that ends a text, by `tokenizer_config.json`.
    eos: Option<u32>,
}

enum Kind {
    HuggingFace(Box<tokenizers::Tokenizer>),
    Tiktoken(Box<Tiktoken>),
}

/// Why a checkpoint's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The tokenizer itself.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file beside it.
    #[error("{} cannot be read: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A prompt.
    #[error("the text could not be tokenised: {0}")]
    Text(String),
}

impl Tokenizer {
    /// Reads the tokenizer in `dir`; `None` if there is none, and then only token IDs can be served.
    ///
    /// # Errors
    /// When there is one that cannot be read.
    pub fn read(dir: &Path) -> Result<Option<Self>, TokenizerError> {
        let config = TokenizerConfig::read(dir)?;
        let path = dir.join("tokenizer.json");
        let kind = if path.exists() {
            let inner = tokenizers::Tokenizer::from_file(&path)
                .map_err(|error| TokenizerError::Unusable { path, reason: error.to_string() })?;
            Kind::HuggingFace(Box::new(inner))
        } else {
            let path = dir.join("tiktoken.model");
            if !path.exists() {
                return Ok(None);
            }
            Kind::Tiktoken(Box::new(Tiktoken::read(&path, &config)?))
        };
        let mut tokenizer = Self { kind, bos: None, eos: None };
        // One that the vocabulary does not have can end nothing.
        tokenizer.eos = config.special_tokens().eos.and_then(|token| tokenizer.token_to_id(&token));
        if let Some(token) = config.bos_to_add() {
            let id = tokenizer.token_to_id(token).ok_or_else(|| TokenizerError::Config {
                path: dir.join("tokenizer_config.json"),
                reason: format!("its bos_token `{token}` is not in the vocabulary"),
            })?;
            tokenizer.bos = Some(id);
        }
        Ok(Some(tokenizer))
    }

    /// The token that the tokenizer's config says ends a text.
    pub fn eos(&self) -> Option<i64> {
        self.eos.map(i64::from)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::HuggingFace(inner) => inner.token_to_id(token),
            Kind::Tiktoken(inner) => inner.special(token),
        }
    }

    /// The token IDs of `text`, with one beginning-of-sequence token where the model uses it, also if the text already
    /// begins with its spelling, as a rendered chat template does. Spellings of special tokens in the text become those
    /// tokens, as in SGLang.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let mut ids = self.pieces(text, true)?;
        match self.bos {
            // Tokenizers of the Llama class put it there on account of the config, not of tokenizer.json.
            Some(bos) if ids.first() != Some(&bos) => ids.insert(0, bos),
            // Two equal tokens at the start: one is the text's own if the bare text begins with it, too.
            _ if ids.len() > 1 && ids[0] == ids[1] => {
                let bare = self.pieces(text, false)?;
                if bare == ids[1..] {
                    ids = bare;
                }
            }
            _ => {}
        }
        Ok(ids.into_iter().map(i64::from).collect())
    }

    /// The token IDs of `text` and nothing else: of a rendered chat template, which has all special tokens in it.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn encode_bare(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        Ok(self.pieces(text, false)?.into_iter().map(i64::from).collect())
    }

    fn pieces(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::HuggingFace(inner) => {
                let encoding = inner.encode_fast(text, special);
                let encoding = encoding.map_err(|error| TokenizerError::Text(error.to_string()))?;
                Ok(encoding.get_ids().to_vec())
            }
            Kind::Tiktoken(inner) => Ok(inner.encode(text)),
        }
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn decode(&self, ids: &[i64], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        // An ID beyond the tokenizer's range (a padded vocabulary has some) has no text.
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        match &self.kind {
            Kind::HuggingFace(inner) => inner
                .decode(&ids, skip_special_tokens)
                .map_err(|error| TokenizerError::Text(error.to_string())),
            Kind::Tiktoken(inner) => Ok(inner.decode(&ids, skip_special_tokens)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A word-level tokenizer; `template` puts `<s>` in front as its post-processor.
    fn tokenizer(template: bool, config: Option<&str>) -> Tokenizer {
        let dir = tempfile::tempdir().unwrap();
        let post = if template {
            r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":"<s>","ids":[0],"tokens":["<s>"]}}}"#
        } else {
            "null"
        };
        let json = format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":0,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,"pre_tokenizer":{{"type":"Whitespace"}},"post_processor":{post},"decoder":null,"model":{{"type":"WordLevel","vocab":{{"<s>":0,"a":1,"b":2}},"unk_token":"a"}}}}"#
        );
        fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        if let Some(config) = config {
            fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        }
        Tokenizer::read(dir.path()).unwrap().unwrap()
    }

    #[test]
    fn a_text_that_begins_with_bos_gets_no_second_one() {
        for tokenizer in [
            tokenizer(true, None),
            tokenizer(false, Some(r#"{"add_bos_token":true,"bos_token":{"content":"<s>"}}"#)),
            tokenizer(true, Some(r#"{"add_bos_token":true,"bos_token":"<s>"}"#)),
        ] {
            assert_eq!(tokenizer.encode("a b").unwrap(), [0, 1, 2]);
            assert_eq!(tokenizer.encode("<s>a b").unwrap(), [0, 1, 2]);
            assert_eq!(tokenizer.encode("a a").unwrap(), [0, 1, 1]);
        }
    }

    #[test]
    fn a_model_without_bos_gets_none() {
        let tokenizer = tokenizer(false, Some(r#"{"add_bos_token":false,"bos_token":"<s>"}"#));
        assert_eq!(tokenizer.encode("a a b").unwrap(), [1, 1, 2]);
    }

    #[test]
    fn special_tokens_are_left_out_of_the_text_on_request() {
        let tokenizer = tokenizer(false, None);
        assert_eq!(tokenizer.decode(&[0, 1, 99], true).unwrap(), "a");
        assert_eq!(tokenizer.decode(&[0, 1], false).unwrap(), "<s> a");
    }

    #[test]
    fn a_checkpoint_without_a_tokenizer_is_no_error_and_a_broken_one_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Tokenizer::read(dir.path()).unwrap().is_none());
        fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
        let error = Tokenizer::read(dir.path()).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
