//! Who may ask: SGLang's two keys.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A key as its digest: it is compared in constant time whatever its length, and cannot be printed.
#[derive(Clone)]
pub struct Key([u8; 32]);

/// The keys that are set.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    /// `--api-key`: for all that is not the administrator's.
    pub api: Option<Key>,
    /// `--admin-api-key`: for what concerns the requests of others.
    pub admin: Option<Key>,
}

/// Why a key cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It could not be sent in a header.
    #[error("a key is one or more visible ASCII characters")]
    NotVisible,
    /// Its file cannot be read.
    #[error("{path} cannot be read: {reason}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        reason: String,
    },
}

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self::of(text.as_bytes())),
            false => Err(KeyError::NotVisible),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(hidden)")
    }
}

impl Key {
    fn of(text: &[u8]) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// The first line of a file.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let text = std::fs::read_to_string(path).map_err(|error| KeyError::File {
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
        text.lines().next().unwrap_or_default().trim().parse()
    }

    fn opens(&self, given: Option<&[u8]>) -> bool {
        given.is_some_and(|given| bool::from(Self::of(given).0.ct_eq(&self.0)))
    }
}

impl Keys {
    /// Whether a request may be answered: as in SGLang, probes and metrics need no key, and where there is an administrator's
    /// key, what is the administrator's needs that one and nothing else takes it.
    pub fn admit(&self, method: &Method, path: &str, headers: &HeaderMap) -> bool {
        let open = ["/health", "/ready", "/metrics"].iter().any(|prefix| path.starts_with(prefix));
        if open || method == Method::OPTIONS {
            return true;
        }
        let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        let is_admins = matches!(path, "/abort_request" | "/flush_cache");
        match (&self.api, &self.admin) {
            (_, Some(admin)) if is_admins => admin.opens(given),
            (Some(api), _) => api.opens(given),
            (None, _) => true,
        }
    }
}

/// What stands behind `Bearer`, in any case.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(keys: &Keys, path: &str, header: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(AUTHORIZATION, header.parse().unwrap());
        }
        keys.admit(&Method::POST, path, &headers)
    }

    #[test]
    fn keys_open_what_sglangs_open() {
        let (api, admin): (Key, Key) = ("user".parse().unwrap(), "root".parse().unwrap());
        let none = Keys::default();
        let user = Keys { api: Some(api.clone()), admin: None };
        let both = Keys { api: Some(api), admin: Some(admin.clone()) };
        let root = Keys { api: None, admin: Some(admin) };
        // Keys, path, and whether it opens to nobody, the user and the administrator.
        for (keys, path, expected) in [
            (&none, "/generate", [true, true, true]),
            (&none, "/abort_request", [true, true, true]),
            (&user, "/generate", [false, true, false]),
            (&user, "/abort_request", [false, true, false]),
            (&user, "/", [false, true, false]),
            (&both, "/generate", [false, true, false]),
            (&both, "/flush_cache", [false, false, true]),
            (&root, "/generate", [true, true, true]),
            (&root, "/abort_request", [false, false, true]),
            (&both, "/health_generate", [true, true, true]),
            (&both, "/metrics", [true, true, true]),
        ] {
            let found =
                [None, Some("Bearer user"), Some("bearer root")].map(|header| admits(keys, path, header));
            assert_eq!(found, expected, "{path} with {keys:?}");
        }
        for header in ["user", "Basic user", "Bearer", "Bearer usera", "Bearer use"] {
            assert!(!admits(&user, "/generate", Some(header)), "{header}");
        }
    }

    #[test]
    fn a_key_is_not_printed_and_comes_from_a_file_too() {
        let key: Key = "s3cret".parse().unwrap();
        assert!(!format!("{key:?}").contains("s3cret"));
        assert_eq!("".parse::<Key>().unwrap_err(), KeyError::NotVisible);
        assert_eq!("two words".parse::<Key>().unwrap_err(), KeyError::NotVisible);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        assert!(Key::read(&path).unwrap_err().to_string().contains("cannot be read"));
        std::fs::write(&path, "s3cret\n").unwrap();
        assert!(Key::read(&path).unwrap().opens(Some(b"s3cret")));
    }
}
