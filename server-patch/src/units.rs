//! Sizes and durations as people write them on a command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `67108864`, `512MB` (powers of 1000) or `64GiB` (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A length of time: `250ms`, `30s`, `5m`, `2h`, `7d`; a bare number is seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// Text that is no size or duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {what}")]
pub struct InvalidUnit {
    text: String,
    what: &'static str,
}

const BYTE_UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];
const TIME_UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// `text` as a whole number times the first unit that it ends with, in the smallest unit.
fn scaled(text: &str, units: &[(&str, u64)], bare: u64) -> Option<u64> {
    let text = text.trim();
    let (number, factor) = units
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, bare));
    let number = number.trim_end();
    number.bytes().all(|b| b.is_ascii_digit()).then_some(())?;
    number.parse::<u64>().ok()?.checked_mul(factor)
}

impl FromStr for ByteSize {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, InvalidUnit> {
        let what = "a size: a whole number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 64GiB";
        scaled(text, &BYTE_UNITS, 1).map(Self).ok_or_else(|| InvalidUnit { text: text.to_owned(), what })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |factor: u64| self.0 >= factor && self.0.is_multiple_of(factor);
        // The largest unit that says it without a fraction, so that the text parses back to the same number.
        match BYTE_UNITS[..4].iter().rev().find(|(_, factor)| exact(*factor)) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl FromStr for Span {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, InvalidUnit> {
        let what = "a duration: a whole number with ms, s, m, h or d, such as 30s";
        let millis = scaled(text, &TIME_UNITS, 1000);
        millis
            .map(|millis| Self(Duration::from_millis(millis)))
            .ok_or_else(|| InvalidUnit { text: text.to_owned(), what })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            millis if millis.is_multiple_of(1000) => write!(f, "{}s", millis / 1000),
            millis => write!(f, "{millis}ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_in_both_families_of_units_and_print_what_parses_back() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("1KB", 1000),
            ("512MB", 512_000_000),
            ("64GiB", 64 << 30),
            ("2 TiB", 2 << 40),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!(size.0, bytes, "{text}");
            assert_eq!(size.to_string().parse(), Ok(size), "{text}");
        }
    }

    #[test]
    fn durations_read_with_and_without_a_unit() {
        for (text, millis) in [
            ("250ms", 250),
            ("30", 30_000),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span.0, Duration::from_millis(millis), "{text}");
            assert_eq!(span.to_string().parse(), Ok(span), "{text}");
        }
    }

    #[test]
    fn what_is_neither_is_refused_with_an_example() {
        for text in ["", "GiB", "-1", "+1", "1.5GiB", "1 apple", "99999999999TiB", "0x10"] {
            let error = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("64GiB"), "{error}");
        }
        assert!("5 weeks".parse::<Span>().unwrap_err().to_string().contains("such as 30s"));
    }
}
