//! XXH3-128 over token IDs: the proof that states belong to the tokens of a request.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::Xxh3Default;

/// XXH3-128, seed 0, over token IDs as little-endian `int64`. Written as 32 lower-case hex digits, most significant
/// first. It guards against mix-ups and rot, not against attackers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenHash(pub u128);

/// Text that is not 32 lower-case hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a hash: expected 32 lower-case hex digits")]
pub struct InvalidHash;

impl TokenHash {
    /// Length of the text form in bytes.
    pub const TEXT_LEN: usize = 32;

    /// The hash of `token_ids`.
    pub fn of(token_ids: &[i64]) -> Self {
        let mut hasher = TokenHasher::default();
        token_ids.iter().for_each(|&id| hasher.push(id));
        hasher.finish()
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for TokenHash {
    type Err = InvalidHash;

    fn from_str(text: &str) -> Result<Self, InvalidHash> {
        let spelled =
            text.len() == Self::TEXT_LEN && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !spelled {
            return Err(InvalidHash);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| InvalidHash)
    }
}

impl Serialize for TokenHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TokenHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Hashes token IDs as they are read, without keeping them. IDs are gathered into blocks, because XXH3 is many times
/// faster on blocks than on eight bytes at a time.
#[derive(Clone)]
pub struct TokenHasher {
    state: Xxh3Default,
    block: [u8; Self::BLOCK],
    filled: usize,
    count: usize,
}

impl fmt::Debug for TokenHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenHasher").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Default for TokenHasher {
    fn default() -> Self {
        Self { state: Xxh3Default::new(), block: [0; Self::BLOCK], filled: 0, count: 0 }
    }
}

impl TokenHasher {
    const BLOCK: usize = 1024;

    /// Adds the next ID.
    pub fn push(&mut self, id: i64) {
        self.block[self.filled..self.filled + 8].copy_from_slice(&id.to_le_bytes());
        self.filled += 8;
        self.count += 1;
        if self.filled == Self::BLOCK {
            self.state.update(&self.block);
            self.filled = 0;
        }
    }

    /// How many IDs were added.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The hash of all IDs added so far.
    pub fn finish(&self) -> TokenHash {
        let mut state = self.state.clone();
        state.update(&self.block[..self.filled]);
        TokenHash(state.digest128())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_128;

    use super::*;

    fn whole(ids: &[i64]) -> u128 {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        xxh3_128(&bytes)
    }

    #[test]
    fn the_empty_hash_is_the_published_constant() {
        // From the XXH3 test vectors: XXH3_128bits of nothing, seed 0.
        assert_eq!(TokenHash::of(&[]).to_string(), "99aa06d3014798d86001c324468d497f");
    }

    #[test]
    fn text_with_capitals_or_another_length_is_refused() {
        let hash = TokenHash::of(&[1, 2, 3]);
        assert_eq!(hash.to_string().parse(), Ok(hash));
        assert!("99AA06D3014798D86001C324468D497F".parse::<TokenHash>().is_err());
        assert!("99aa06d3014798d86001c324468d497".parse::<TokenHash>().is_err());
        assert!("+9aa06d3014798d86001c324468d497f".parse::<TokenHash>().is_err());
    }

    proptest! {
        #[test]
        fn hashing_one_by_one_equals_hashing_the_bytes(ids in prop::collection::vec(any::<i64>(), 0..700)) {
            prop_assert_eq!(TokenHash::of(&ids).0, whole(&ids));
        }
    }
}
