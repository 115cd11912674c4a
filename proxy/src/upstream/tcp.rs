//! What the kernel knows of a connection. The only `unsafe` of this crate.
#![allow(unsafe_code, reason = "no safe wrapper of TCP_INFO gives the acknowledged bytes")]

use std::os::fd::AsRawFd;

use tokio::net::TcpStream;

/// Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`, which only ever grows at its end.
const BYTES_ACKED: usize = 120;

/// Bytes that the peer's kernel has acknowledged over the life of the connection, the opening handshake counted as one.
/// `None` where the kernel does not say.
pub(super) fn bytes_acked(stream: &TcpStream) -> Option<u64> {
    let mut info = [0u8; 256];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the descriptor is open as long as `stream` lives, and the kernel writes at most `len` bytes into `info`,
    // which is that long, and sets `len` to how many it wrote.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    let field =
        info.get(BYTES_ACKED..BYTES_ACKED + 8).filter(|_| result == 0 && len as usize >= BYTES_ACKED + 8)?;
    Some(u64::from_ne_bytes(field.try_into().expect("the range is 8 bytes")))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn acknowledged_bytes_are_those_that_arrived() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut far, _) = listener.accept().await.unwrap();
        near.write_all(&[0; 100]).await.unwrap();
        far.read_exact(&mut [0; 100]).await.unwrap();
        // The acknowledgement travels on its own.
        while bytes_acked(&near).unwrap() < 101 {
            tokio::task::yield_now().await;
        }
        assert_eq!(bytes_acked(&near), Some(101));
    }
}
