//! `tokenizer_config.json`.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use serde::Deserialize;

use super::TokenizerError;

/// What a checkpoint says about its tokenizer. All of it may be absent.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct TokenizerConfig {
    add_bos_token: Option<bool>,
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    unk_token: Option<Token>,
    pad_token: Option<Token>,
    /// Tokens that the vocabulary file does not spell, by their IDs.
    added_tokens_decoder: BTreeMap<String, AddedToken>,
    /// A template, or several with names.
    chat_template: Option<Templates>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct AddedToken {
    pub(super) content: String,
    #[serde(default)]
    pub(super) special: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Clone, Debug, Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// The spellings that templates use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of a sequence.
    pub bos: Option<String>,
    /// Its end.
    pub eos: Option<String>,
    /// What no other token spells.
    pub unk: Option<String>,
    /// Padding.
    pub pad: Option<String>,
}

impl Token {
    fn text(&self) -> &str {
        match self {
            Self::Text(content) | Self::Object { content } => content,
        }
    }
}

impl TokenizerConfig {
    /// Reads the file in `dir`; of a checkpoint without one, nothing is said.
    ///
    /// # Errors
    /// [`TokenizerError::Config`].
    pub fn read(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer_config.json");
        let failed = |reason: String| TokenizerError::Config { path: path.clone(), reason };
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// The token that goes in front of every text, if the config asks for one.
    pub(super) fn bos_to_add(&self) -> Option<&str> {
        let token = self.bos_token.as_ref().map(Token::text);
        token.filter(|_| self.add_bos_token == Some(true))
    }

    pub(super) fn added_tokens(&self) -> impl Iterator<Item = (&str, &AddedToken)> {
        self.added_tokens_decoder.iter().map(|(id, token)| (id.as_str(), token))
    }

    /// The spellings of special tokens.
    pub fn special_tokens(&self) -> SpecialTokens {
        let text = |token: &Option<Token>| token.as_ref().map(|token| token.text().to_owned());
        SpecialTokens {
            bos: text(&self.bos_token),
            eos: text(&self.eos_token),
            unk: text(&self.unk_token),
            pad: text(&self.pad_token),
        }
    }

    /// The chat templates by name; a single one is called `default`.
    pub fn chat_templates(&self) -> Vec<(String, String)> {
        match &self.chat_template {
            None => Vec::new(),
            Some(Templates::One(template)) => vec![("default".to_owned(), template.clone())],
            Some(Templates::Named(named)) => {
                named.iter().map(|named| (named.name.clone(), named.template.clone())).collect()
            }
        }
    }
}
