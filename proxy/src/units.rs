//! Sizes and durations as they are written on a command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `512MB`, `1GiB`, `65536`. `kB`, `MB`, `GB` are powers of 1000; `KiB`, `MiB`, `GiB` of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A length of time: `5s`, `250ms`, `10m`, `1h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

/// Text that is not a size or not a length of time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct InvalidUnit {
    text: String,
    expected: &'static str,
}

const SIZES: &[(&str, u64)] = &[
    ("B", 1),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

impl FromStr for ByteSize {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, InvalidUnit> {
        let invalid = || InvalidUnit {
            text: text.to_owned(),
            expected: "a size; expected a whole number and a unit, such as `512MB`, `1GiB` or `65536`",
        };
        let (number, unit) = split(text);
        let scale = if unit.is_empty() {
            1
        } else {
            SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(invalid)?.1
        };
        let number: u64 = number.parse().map_err(|_| invalid())?;
        number.checked_mul(scale).map(Self).ok_or_else(invalid)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The unit that leaves the shortest number.
        let exact = SIZES.iter().filter(|(_, scale)| self.0 != 0 && self.0.is_multiple_of(*scale));
        let (unit, scale) = exact.min_by_key(|(_, scale)| self.0 / scale).copied().unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / scale)
    }
}

impl FromStr for Period {
    type Err = InvalidUnit;

    fn from_str(text: &str) -> Result<Self, InvalidUnit> {
        let invalid = || InvalidUnit {
            text: text.to_owned(),
            expected: "a length of time; expected a whole number and a unit, such as `250ms`, `5s`, `10m` or `1h`",
        };
        let (number, unit) = split(text);
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let millis = match unit {
            "ms" => Some(number),
            "s" => number.checked_mul(1_000),
            "m" => number.checked_mul(60_000),
            "h" => number.checked_mul(3_600_000),
            _ => None,
        };
        // A year bounds what the timers are asked to hold.
        let millis = millis.filter(|millis| *millis <= 365 * 24 * 3_600_000).ok_or_else(invalid)?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            millis if millis % 1_000 != 0 => write!(f, "{millis}ms"),
            millis if millis % 3_600_000 == 0 && millis != 0 => write!(f, "{}h", millis / 3_600_000),
            millis if millis % 60_000 == 0 && millis != 0 => write!(f, "{}m", millis / 60_000),
            millis => write!(f, "{}s", millis / 1_000),
        }
    }
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_a_unit() {
        for (text, bytes) in
            [("0", 0), ("65536", 65_536), ("512MB", 512_000_000), ("1GiB", 1 << 30), ("2 kb", 2_000)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!(ByteSize(1 << 30).to_string(), "1GiB");
        assert_eq!(ByteSize(512_000_000).to_string(), "512MB");
    }

    #[test]
    fn periods_need_a_unit() {
        assert_eq!("250ms".parse(), Ok(Period(Duration::from_millis(250))));
        assert_eq!("1h".parse(), Ok(Period(Duration::from_secs(3600))));
        assert_eq!(Period(Duration::from_secs(300)).to_string(), "5m");
        for bad in ["5", "s", "-1s", "1.5s", "99999999999999999999h", "10 days"] {
            let error = bad.parse::<Period>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`250ms`"), "{error}");
        }
    }

    #[test]
    fn a_bad_size_is_answered_with_what_would_be_accepted() {
        for bad in ["", "MB", "1.5GB", "-1", "1XB", "99999999999TiB"] {
            let error = bad.parse::<ByteSize>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{bad}`")) && error.contains("`512MB`"), "{error}");
        }
    }
}
