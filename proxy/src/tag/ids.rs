//! Reads token IDs, hashing them as they pass.

use tether_dump::{TokenHash, TokenHasher};

use super::InvalidBody;
use super::cursor::Cursor;

/// The token IDs of one prompt, as much as the gate needs of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// How many.
    pub count: usize,
    /// Their hash.
    pub hash: TokenHash,
}

/// Goes past the array that begins here. `None` if something other than whole numbers is in it, which is for the
/// upstream to refuse.
pub(super) fn row(cursor: &mut Cursor<'_>) -> Result<Option<Tokens>, InvalidBody> {
    let start = cursor.at;
    cursor.expect(b'[', "`[`")?;
    let mut hasher = TokenHasher::default();
    cursor.skip_whitespace();
    if cursor.peek() == Some(b']') {
        cursor.at += 1;
        return Ok(Some(Tokens { count: 0, hash: hasher.finish() }));
    }
    loop {
        plain_run(cursor, &mut hasher);
        cursor.skip_whitespace();
        let Some(id) = number(cursor) else { break };
        hasher.push(id);
        cursor.skip_whitespace();
        match cursor.peek() {
            Some(b',') => cursor.at += 1,
            Some(b']') => {
                cursor.at += 1;
                return Ok(Some(Tokens { count: hasher.count(), hash: hasher.finish() }));
            }
            _ => break,
        }
    }
    cursor.at = start;
    cursor.value()?;
    Ok(None)
}

/// Reads numbers as nearly all writers write them: up to 6 digits, then a comma, then nothing or one space. Eight bytes
/// are looked at at once, and no branch depends on how many digits there are. Stops before anything else.
#[inline]
fn plain_run(cursor: &mut Cursor<'_>, hasher: &mut TokenHasher) {
    let mut at = cursor.at;
    while let Some(word) = cursor.bytes.get(at..).and_then(|ahead| ahead.first_chunk::<8>()) {
        let word = u64::from_le_bytes(*word);
        let digits = word ^ 0x3030_3030_3030_3030;
        // The first byte above 9 gets its top bit; a carry only reaches the bytes after it.
        let others = (digits.wrapping_add(0x7676_7676_7676_7676) | digits) & 0x8080_8080_8080_8080;
        let bits = others.trailing_zeros() & !7;
        if !(8..=48).contains(&bits) {
            break;
        }
        let after = word >> bits;
        if after as u8 != b',' {
            break;
        }
        hasher.push(eight_digits(digits << (64 - bits)));
        at += (bits / 8) as usize + 1 + usize::from(after as u16 == u16::from_le_bytes(*b", "));
    }
    cursor.at = at;
}

/// The whole number that begins here.
fn number(cursor: &mut Cursor<'_>) -> Option<i64> {
    let ahead = &cursor.bytes[cursor.at..];
    let negative = ahead.first() == Some(&b'-');
    let first = usize::from(negative);
    let (mut len, mut value) = (first, 0i64);
    while let Some(digit @ b'0'..=b'9') = ahead.get(len) {
        let digit = i64::from(digit - b'0');
        value = value.checked_mul(10)?.checked_add(if negative { -digit } else { digit })?;
        len += 1;
    }
    if len == first {
        return None;
    }
    cursor.at += len;
    plain(cursor).then_some(value)
}

/// Whether the number that ends here has no fraction and no exponent.
fn plain(cursor: &Cursor<'_>) -> bool {
    matches!(cursor.peek(), Some(b',' | b']' | b' ' | b'\n' | b'\r' | b'\t'))
}

/// Eight decimal digits, the first in the lowest byte, each as its value.
fn eight_digits(digits: u64) -> i64 {
    const MASK: u64 = 0x0000_00ff_0000_00ff;
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let high = (pairs & MASK).wrapping_mul(100 + (1_000_000 << 32));
    let low = ((pairs >> 16) & MASK).wrapping_mul(1 + (10_000 << 32));
    (high.wrapping_add(low) >> 32) as i64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> (Result<Option<Tokens>, InvalidBody>, usize) {
        let mut cursor = Cursor::new(text.as_bytes(), 0);
        (row(&mut cursor), cursor.at)
    }

    #[test]
    fn arrays_of_anything_else_are_passed_over() {
        for text in [
            "[1.0]",
            "[1e3]",
            "[1,true]",
            "[\"1\"]",
            "[[1]]",
            "[1,,2]",
            "[1,]",
            "[99999999999999999999]",
            "[1 2]",
        ] {
            let padded = format!("{text},        ");
            assert_eq!(read(&padded), (Ok(None), text.len()), "{text}");
        }
    }

    #[test]
    fn an_array_cut_short_is_an_error() {
        for text in ["[", "[1", "[1,", "[1, 2 ", "[12345678", "[-"] {
            assert_eq!(read(text).0, Err(InvalidBody::CutShort), "{text}");
        }
    }

    proptest! {
        #[test]
        fn ids_of_any_width_and_spacing_hash_as_their_values(
            ids in prop::collection::vec(prop_oneof![0..10i64, 0..200_000i64, any::<i64>(), -5..5i64], 0..50),
            gaps in prop::collection::vec("[ \n\t\r]{0,3}", 100..101),
            tail in "[ ]{0,9}",
        ) {
            let mut text = String::from("[");
            for (index, id) in ids.iter().enumerate() {
                let comma = if index == 0 { "" } else { "," };
                text += &format!("{comma}{}{id}{}", gaps[2 * index], gaps[2 * index + 1]);
            }
            text += "]";
            let len = text.len();
            let expected = Tokens { count: ids.len(), hash: TokenHash::of(&ids) };
            prop_assert_eq!(read(&(text + &tail)), (Ok(Some(expected)), len));
        }
    }
}
