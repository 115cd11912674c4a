//! One GET over loopback: all that is needed to ask a service whether it is up, and for its metrics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

/// What came back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Asks for `path`. HTTP/1.0, so that the body is not chunked and ends with the connection.
pub(crate) fn get(address: SocketAddr, path: &str) -> Result<Reply> {
    let mut stream =
        TcpStream::connect_timeout(&address, TIMEOUT).with_context(|| format!("connecting to {address}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").context("sending the request")?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).context("reading the reply")?;
    parse(&bytes).with_context(|| format!("{address} did not answer {path} in HTTP"))
}

fn parse(bytes: &[u8]) -> Option<Reply> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut words = head.lines().next()?.split(' ');
    words.next().filter(|version| version.starts_with("HTTP/"))?;
    let status = words.next()?.parse().ok()?;
    Some(Reply { status, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_reply_is_taken_apart() {
        let reply = parse(b"HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\nbody\r\n\r\nmore").unwrap();
        assert_eq!(reply, Reply { status: 503, body: "body\r\n\r\nmore".to_owned() });
        for bad in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 abc\r\n\r\n", "SSH-2.0\r\n\r\n"] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn a_path_is_asked_for_and_the_answer_read_to_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nyes").unwrap();
            String::from_utf8(request).unwrap()
        });
        assert_eq!(get(address, "/health").unwrap(), Reply { status: 200, body: "yes".to_owned() });
        assert!(server.join().unwrap().starts_with("GET /health HTTP/1.0\r\n"));
    }
}
