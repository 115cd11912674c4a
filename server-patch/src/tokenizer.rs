//! Text to token IDs and back, as the checkpoint's own tokenizer does it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A checkpoint's `tokenizer.json`, with what `tokenizer_config.json` says about the first token.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The token that `add_bos_token` puts in front.
    bos: Option<u32>,
}

/// Why a checkpoint's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The tokenizer itself.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What the tokenizers library says.
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
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|error| TokenizerError::Unusable { path, reason: error.to_string() })?;
        let bos = configured_bos(dir)?;
        let bos = match bos {
            None => None,
            Some(token) => Some(inner.token_to_id(&token).ok_or_else(|| TokenizerError::Config {
                path: dir.join("tokenizer_config.json"),
                reason: format!("its bos_token `{token}` is not in tokenizer.json"),
            })?),
        };
        Ok(Some(Self { inner, bos }))
    }

    /// The token IDs of `text`, with one beginning-of-sequence token where the model uses it, also if the text already
    /// begins with its spelling, as a rendered chat template does.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let encode = |special| {
            let encoding = self.inner.encode_fast(text, special);
            encoding.map(|e| e.get_ids().to_vec()).map_err(|error| TokenizerError::Text(error.to_string()))
        };
        let mut ids = encode(true)?;
        match self.bos {
            // Tokenizers of the Llama class put it there on account of the config, not of tokenizer.json.
            Some(bos) if ids.first() != Some(&bos) => ids.insert(0, bos),
            // Two equal tokens at the start: one is the text's own if the bare text begins with it, too.
            _ if ids.len() > 1 && ids[0] == ids[1] => {
                let bare = encode(false)?;
                if bare == ids[1..] {
                    ids = bare;
                }
            }
            _ => {}
        }
        Ok(ids.into_iter().map(i64::from).collect())
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// [`TokenizerError::Text`].
    pub fn decode(&self, ids: &[i64], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        // An ID beyond the tokenizer's range (a padded vocabulary has some) has no text.
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.inner.decode(&ids, skip_special_tokens).map_err(|error| TokenizerError::Text(error.to_string()))
    }
}

/// The `bos_token` of a tokenizer whose config says `add_bos_token`.
fn configured_bos(dir: &Path) -> Result<Option<String>, TokenizerError> {
    #[derive(serde::Deserialize)]
    struct Config {
        #[serde(default)]
        add_bos_token: Option<bool>,
        #[serde(default)]
        bos_token: Option<Token>,
    }
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Token {
        Text(String),
        Object { content: String },
    }
    let path = dir.join("tokenizer_config.json");
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(TokenizerError::Config { path, reason: error.to_string() }),
    };
    let config: Config = serde_json::from_slice(&bytes)
        .map_err(|error| TokenizerError::Config { path, reason: error.to_string() })?;
    let token = config.bos_token.map(|token| match token {
        Token::Text(content) | Token::Object { content } => content,
    });
    Ok(token.filter(|_| config.add_bos_token == Some(true)))
}

#[cfg(test)]
mod tests {
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
