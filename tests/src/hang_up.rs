//! A client that hangs up, and knows whether it had been answered.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::Reply;

/// The way a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// Closes the connection.
    Close,
    /// Says that it will send nothing more, and reads what still comes.
    HalfClose,
    /// Closes the connection with half of the body sent.
    MidBody,
}

/// How a call ended that the client meant to leave.
#[derive(Clone, Debug)]
pub enum HangUp {
    /// The client was gone before a whole reply came.
    Left,
    /// The reply was faster.
    Answered(Reply),
}

/// POSTs the JSON `body`, waits for `patience`, and leaves unless the reply is there.
///
/// # Panics
/// If the server cannot be reached.
pub async fn post_then_leave(
    address: SocketAddr,
    path: &str,
    body: &str,
    patience: Duration,
    departure: Departure,
) -> HangUp {
    let mut stream = TcpStream::connect(address).await.expect("the server listens");
    stream.set_nodelay(true).expect("a TCP socket has the option");
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let sent = if departure == Departure::MidBody { &body[..body.len() / 2] } else { body };
    let request = [head.as_bytes(), sent.as_bytes()].concat();
    stream.write_all(&request).await.expect("a request fits the socket's buffers, or is read");
    tokio::time::sleep(patience).await;

    let mut reply = Vec::new();
    match departure {
        Departure::MidBody => return HangUp::Left,
        // Whoever closes with a reply on the way cannot know what the other side believes. So look first.
        Departure::Close => match stream.try_read_buf(&mut reply) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return HangUp::Left,
            Ok(_) => {}
            Err(error) => panic!("{path}: {error}"),
        },
        Departure::HalfClose => stream.shutdown().await.expect("an open connection can be half closed"),
    }
    // A server that drops the request may reset the connection; what came before that counts.
    let _ = stream.read_to_end(&mut reply).await;
    parse_whole_reply(&reply).map_or(HangUp::Left, HangUp::Answered)
}

/// The reply in `bytes`, unless it is cut short.
fn parse_whole_reply(bytes: &[u8]) -> Option<Reply> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let body = &bytes[end + 4..];
    let mut lines = head.split("\r\n");
    let status: StatusCode = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers: HeaderMap = lines
        .map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.parse::<HeaderName>().ok()?, value.trim().parse::<HeaderValue>().ok()?))
        })
        .collect::<Option<_>>()?;
    let body = match headers.get("content-length") {
        Some(length) => {
            let length: usize = length.to_str().ok()?.parse().ok()?;
            (body.len() == length).then(|| body.to_vec())?
        }
        None => dechunk(body)?,
    };
    Some(Reply { status, headers, body: Bytes::from(body) })
}

/// The content of a chunked body, unless it is cut short.
fn dechunk(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    loop {
        let line = body.windows(2).position(|window| window == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&body[..line]).ok()?.trim(), 16).ok()?;
        body = &body[line + 2..];
        if size == 0 {
            return Some(content);
        }
        content.extend_from_slice(body.get(..size)?);
        body = body.get(size + 2..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_whole_or_none() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-a: b\r\n\r\nhello";
        let reply = parse_whole_reply(whole).unwrap();
        assert_eq!(
            (reply.status.as_u16(), reply.header("x-a"), &reply.body[..]),
            (200, Some("b"), &b"hello"[..])
        );
        assert!((0..whole.len()).all(|cut| parse_whole_reply(&whole[..cut]).is_none()));
    }

    #[test]
    fn a_chunked_reply_is_whole_or_none() {
        let whole = b"HTTP/1.1 502 Bad Gateway\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n";
        let reply = parse_whole_reply(whole).unwrap();
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (502, &b"abc0123456789"[..]));
        // The last two bytes only close the message; the content is complete without them.
        assert!((0..whole.len() - 2).all(|cut| parse_whole_reply(&whole[..cut]).is_none()));
    }
}
