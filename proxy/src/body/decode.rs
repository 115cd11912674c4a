//! Undoes the compression of a request body, never to more than a limit.

use std::io::{self, Read};

use bytes::Bytes;
use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;

use super::{ReadError, Reserved};

/// The widest window of zstd that is accepted, 8 MiB, as RFC 9659 sets it for HTTP.
const ZSTD_WINDOW_LOG: u32 = 23;

/// How a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950, or bare RFC 1951, as some clients send it.
    Deflate,
    /// RFC 8878.
    Zstd,
}

/// Why a body could not be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// A coding that is not known, or several of them.
    #[error("the content encoding `{0}` is not supported; `gzip`, `deflate`, `zstd` and none are")]
    Unsupported(String),
    /// The bytes are not what the header says.
    #[error("the body is not {encoding:?}, as its content encoding says")]
    Corrupt {
        /// What the header says.
        encoding: Encoding,
        /// What the decoder says.
        source: io::Error,
    },
    /// It grows beyond a limit.
    #[error(transparent)]
    Limit(#[from] ReadError),
}

/// The encoding that the headers name, if any.
///
/// # Errors
/// [`DecodeError::Unsupported`].
pub fn encodings(headers: &HeaderMap) -> Result<Option<Encoding>, DecodeError> {
    let mut found = None;
    for value in headers.get_all(CONTENT_ENCODING) {
        let text = String::from_utf8_lossy(value.as_bytes());
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let encoding = match name.to_ascii_lowercase().as_str() {
                "identity" => continue,
                "gzip" | "x-gzip" => Encoding::Gzip,
                "deflate" => Encoding::Deflate,
                "zstd" => Encoding::Zstd,
                _ => return Err(DecodeError::Unsupported(name.to_owned())),
            };
            if found.replace(encoding).is_some() {
                return Err(DecodeError::Unsupported(text.into_owned()));
            }
        }
    }
    Ok(found)
}

/// Decodes `body`. It blocks for as long as that takes: up to a second for some hundred megabytes.
///
/// # Errors
/// [`DecodeError::Corrupt`], or [`DecodeError::Limit`] as soon as more than `limit` bytes come out.
pub fn decode(
    encoding: Encoding,
    body: &[u8],
    limit: u64,
    memory: &mut Reserved,
) -> Result<Bytes, DecodeError> {
    let corrupt = |source| DecodeError::Corrupt { encoding, source };
    // What remains of the body shows whether all of it was understood: a bare deflate stream has no other mark.
    let mut left = body;
    let mut decoder: Box<dyn Read + '_> = match encoding {
        Encoding::Gzip => Box::new(MultiGzDecoder::new(&mut left)),
        Encoding::Deflate if is_zlib(body) => Box::new(ZlibDecoder::new(&mut left)),
        Encoding::Deflate => Box::new(DeflateDecoder::new(&mut left)),
        Encoding::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(&mut left).map_err(corrupt)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(corrupt)?;
            Box::new(decoder)
        }
    };
    let mut whole = Vec::new();
    let mut block = vec![0; 64 << 10];
    loop {
        match decoder.read(&mut block) {
            Ok(0) => break,
            Ok(len) if (whole.len() + len) as u64 > limit => return Err(ReadError::TooLong { limit }.into()),
            Ok(len) => {
                memory.grow(len as u64)?;
                whole.extend_from_slice(&block[..len]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(corrupt(error)),
        }
    }
    drop(decoder);
    if !left.is_empty() {
        return Err(corrupt(io::Error::other(format!("{} bytes follow its end", left.len()))));
    }
    Ok(whole.into())
}

/// Whether the first two bytes are a zlib header.
fn is_zlib(body: &[u8]) -> bool {
    matches!(body, [cmf, flg, ..] if cmf & 0x0f == 8 && (u16::from(*cmf) << 8 | u16::from(*flg)) % 31 == 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use prometheus::IntGauge;

    use super::*;
    use crate::body::Budget;

    fn run(encoding: Encoding, body: &[u8], limit: u64) -> Result<Bytes, DecodeError> {
        let budget = Budget::new(1 << 30, IntGauge::new("used", "used").unwrap());
        decode(encoding, body, limit, &mut budget.nothing())
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn every_encoding_gives_the_text_back() {
        let text = b"{\"input_ids\": [1, 2, 3]}";
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(text).unwrap();
        let mut bare = DeflateEncoder::new(Vec::new(), Compression::default());
        bare.write_all(text).unwrap();
        for (encoding, body) in [
            (Encoding::Gzip, gzip(text)),
            (Encoding::Deflate, zlib.finish().unwrap()),
            (Encoding::Deflate, bare.finish().unwrap()),
            (Encoding::Zstd, zstd::encode_all(&text[..], 3).unwrap()),
        ] {
            assert_eq!(run(encoding, &body, 100).unwrap(), &text[..], "{encoding:?}");
            assert!(matches!(
                run(encoding, &body, 10),
                Err(DecodeError::Limit(ReadError::TooLong { limit: 10 }))
            ));
            assert!(matches!(run(encoding, &body[..body.len() - 4], 100), Err(DecodeError::Corrupt { .. })));
        }
    }

    #[test]
    fn a_bomb_is_stopped_at_the_limit() {
        let bomb = gzip(&vec![0; 50 << 20]);
        assert!(bomb.len() < 100_000);
        assert!(matches!(run(Encoding::Gzip, &bomb, 1 << 20), Err(DecodeError::Limit(_))));
    }

    #[test]
    fn a_lying_header_is_told() {
        for encoding in [Encoding::Gzip, Encoding::Deflate, Encoding::Zstd] {
            let result = run(encoding, b"{\"text\":\"x\"}", 1 << 20);
            assert!(matches!(result, Err(DecodeError::Corrupt { .. })), "{encoding:?}: {result:?}");
        }
    }

    #[test]
    fn unknown_and_stacked_encodings_are_refused_by_name() {
        let headers = |text: &str| HeaderMap::from_iter([(CONTENT_ENCODING, text.parse().unwrap())]);
        assert_eq!(encodings(&headers("GZIP")).unwrap(), Some(Encoding::Gzip));
        assert_eq!(encodings(&headers("identity")).unwrap(), None);
        assert_eq!(encodings(&HeaderMap::new()).unwrap(), None);
        assert!(encodings(&headers("br")).unwrap_err().to_string().contains("`br`"));
        assert!(encodings(&headers("gzip, zstd")).unwrap_err().to_string().contains("`gzip, zstd`"));
    }
}
