//! Kimi's vocabulary: ranks of byte strings in tiktoken's format, and special tokens behind them.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tiktoken_rs::CoreBPE;

use super::{TokenizerConfig, TokenizerError};

/// How text is split before pairs are merged, as in the model's `tokenization_kimi.py`: runs of Han characters are pieces of
/// their own, and words of other scripts never contain any.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);
/// So many IDs behind the ranks are special, whether the config names them or not.
const RESERVED: u32 = 256 + 2;
/// Characters that are encoded at a time, and the longest run of spaces or of others in them: merging takes quadratic time.
const LONGEST_TEXT: usize = 400_000;
const LONGEST_RUN: usize = 25_000;

/// A tiktoken vocabulary.
pub(super) struct Tiktoken {
    bpe: CoreBPE,
    /// Spellings of the IDs behind the ranks.
    special: BTreeMap<u32, String>,
    /// Those that are left out of texts on request.
    hidden: HashSet<u32>,
}

impl Tiktoken {
    /// Reads `tiktoken.model`: a base64 byte string and its rank a line.
    pub(super) fn read(path: &Path, config: &TokenizerConfig) -> Result<Self, TokenizerError> {
        let unusable = |reason: String| TokenizerError::Unusable { path: path.to_owned(), reason };
        let text = fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
        let mut ranks = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let parsed = line.split_once(' ').and_then(|(bytes, rank)| {
                Some((STANDARD.decode(bytes).ok()?, rank.trim().parse::<u32>().ok()?))
            });
            let expected = || format!("line {}: a base64 string and its rank are expected", number + 1);
            ranks.push(parsed.ok_or_else(|| unusable(expected()))?);
        }
        let count = u32::try_from(ranks.len()).map_err(|error| unusable(error.to_string()))?;
        let mut seen: Vec<u32> = ranks.iter().map(|(_, rank)| *rank).collect();
        seen.sort_unstable();
        if !seen.iter().copied().eq(0..count) {
            return Err(unusable(format!("its {count} ranks are not 0 to {}", count.saturating_sub(1))));
        }
        let mut named = BTreeMap::new();
        for (id, token) in config.added_tokens() {
            let id: u32 =
                id.parse().map_err(|_| unusable(format!("`{id}` in added_tokens_decoder is no ID")))?;
            named.insert(id, token);
        }
        if let Some(id) = named.keys().find(|id| !(count..count + RESERVED).contains(id)) {
            let last = count + RESERVED - 1;
            return Err(unusable(format!(
                "added_tokens_decoder names ID {id}; {count} to {last} are expected"
            )));
        }
        let spelling = |id| match named.get(&id) {
            Some(token) => token.content.clone(),
            None => format!("<|reserved_token_{id}|>"),
        };
        let special: BTreeMap<u32, String> = (count..count + RESERVED).map(|id| (id, spelling(id))).collect();
        let hidden = named.iter().filter(|(_, token)| token.special).map(|(id, _)| *id);
        let hidden = hidden.chain((count..count + RESERVED).filter(|id| !named.contains_key(id))).collect();
        let encoder = ranks.into_iter().collect();
        let by_spelling = special.iter().map(|(id, text)| (text.clone(), *id)).collect();
        let bpe = CoreBPE::new(encoder, by_spelling, PATTERN).map_err(|error| unusable(error.to_string()))?;
        Ok(Self { bpe, special, hidden })
    }

    /// The ID of a special token.
    pub(super) fn special(&self, token: &str) -> Option<u32> {
        self.special.iter().find(|(_, text)| *text == token).map(|(id, _)| *id)
    }

    /// The IDs of a text. Spellings of special tokens become those tokens.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        runs(text).flat_map(|part| self.bpe.encode_with_special_tokens(part)).collect()
    }

    /// The text of IDs; those that do not exist have none, and bytes that are no text become the replacement character.
    pub(super) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            if skip_special_tokens && self.hidden.contains(id) {
                continue;
            }
            bytes.extend(self.bpe.decode_bytes(&[*id]).unwrap_or_default());
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The text in parts of [`LONGEST_TEXT`] characters at most in which neither spaces nor other characters follow each other
/// more than [`LONGEST_RUN`] times. The model's own tokenizer cuts there too, so that the pieces are the same.
fn runs(text: &str) -> impl Iterator<Item = &str> {
    let mut cuts = Vec::new();
    let (mut in_text, mut in_run, mut was_space) = (0, 0, None);
    for (at, character) in text.char_indices() {
        let is_space = character.is_whitespace();
        if in_text == LONGEST_TEXT {
            cuts.push(at);
            (in_text, in_run, was_space) = (0, 0, None);
        }
        in_text += 1;
        match was_space == Some(is_space) {
            true if in_run == LONGEST_RUN => {
                cuts.push(at);
                in_run = 1;
            }
            true => in_run += 1,
            false => (in_run, was_space) = (1, Some(is_space)),
        }
    }
    let starts = std::iter::once(0).chain(cuts.clone());
    starts.zip(cuts.into_iter().chain([text.len()])).map(|(start, end)| &text[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_and_long_texts_are_cut_where_the_models_own_tokenizer_cuts() {
        let lengths = |text: &str| runs(text).map(|part| part.chars().count()).collect::<Vec<_>>();
        assert_eq!(lengths(""), [0]);
        assert_eq!(lengths("ab c"), [4]);
        assert_eq!(lengths(&"x".repeat(60_000)), [25_000, 25_000, 10_000]);
        assert_eq!(lengths(&format!("{} {}", "字".repeat(25_000), "x".repeat(3))), [25_004]);
        let words = "word ".repeat(100_000);
        assert_eq!(lengths(&words), [400_000, 100_000]);
        assert_eq!(runs(&words).collect::<String>(), words);
    }
}
