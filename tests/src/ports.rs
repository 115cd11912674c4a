//! Addresses for the binaries to listen on.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range from which Linux takes the source ports of outgoing connections (32768 and up), so that a server
/// that is restarted on its old port never finds a client sitting on it.
const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;

/// A loopback address that nothing listens on now, not given out before by this process.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test binaries that run at the same time start at different places.
    let start = (std::process::id() as usize).wrapping_mul(101) % usize::from(COUNT);
    for _ in 0..COUNT {
        let step = usize::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let offset = u16::try_from((start + step) % usize::from(COUNT)).expect("below COUNT, a u16");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, FIRST + offset));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
    panic!("no free port in {FIRST}..{}", FIRST + COUNT);
}

/// A loopback address at which connections are refused.
pub fn refusing_address() -> SocketAddr {
    free_address()
}
