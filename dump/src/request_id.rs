//! The name of one request, from the proxy to the file on disk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// One client request, named by the proxy and carried to the dump. A version 7 UUID, so file names sort by the
/// millisecond of arrival. One ID has one spelling, because the text becomes a file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(Uuid);

/// Text that is not a [`RequestId`] in its one spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a request ID: expected a version 7 UUID in lower-case hyphenated form")]
pub struct InvalidRequestId;

impl RequestId {
    /// Length of the text form in bytes.
    pub const TEXT_LEN: usize = 36;

    /// A fresh ID. IDs made by one process in the same millisecond still sort in the order they were made.
    #[allow(clippy::new_without_default, reason = "a default that differs at each call would surprise")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The ID as a UUID.
    pub fn as_uuid(self) -> Uuid {
        self.0
    }
}

impl FromStr for RequestId {
    type Err = InvalidRequestId;

    fn from_str(text: &str) -> Result<Self, InvalidRequestId> {
        let id = Uuid::try_parse(text).map_err(|_| InvalidRequestId)?;
        let mut spelling = Uuid::encode_buffer();
        // The variant is checked too: the layout of the bits is only defined for RFC 9562 UUIDs.
        let canonical = id.get_version_num() == 7
            && id.get_variant() == uuid::Variant::RFC4122
            && id.hyphenated().encode_lower(&mut spelling) == text;
        canonical.then_some(Self(id)).ok_or(InvalidRequestId)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.hyphenated().encode_lower(&mut Uuid::encode_buffer()))
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_fresh_id_reads_back_from_its_own_text() {
        let id = RequestId::new();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.to_string().len(), RequestId::TEXT_LEN);
    }

    #[test]
    fn ids_sort_in_the_order_they_were_made() {
        let ids: Vec<_> = (0..1000).map(|_| RequestId::new().to_string()).collect();
        assert!(ids.is_sorted());
    }

    #[test]
    fn only_the_canonical_spelling_of_a_version_7_uuid_is_accepted() {
        let good = "01890a5d-ac96-774b-bcce-b302099a8057";
        assert!(good.parse::<RequestId>().is_ok());
        let simple = good.replace('-', "");
        for bad in [
            "01890A5D-AC96-774B-BCCE-B302099A8057",
            &simple,
            "{01890a5d-ac96-774b-bcce-b302099a8057}",
            "urn:uuid:01890a5d-ac96-774b-bcce-b302099a8057",
            " 01890a5d-ac96-774b-bcce-b302099a8057",
            "01890a5d-ac96-474b-bcce-b302099a8057",
            "01890a5d-ac96-774b-ccce-b302099a8057",
            "../../etc/passwd",
            "",
        ] {
            assert_eq!(bad.parse::<RequestId>(), Err(InvalidRequestId), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_other_text_parses(text in "\\PC{0,50}") {
            if let Ok(id) = text.parse::<RequestId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }
}
