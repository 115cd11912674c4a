//! Header fields: the proxy's own names, and which may go on.

use http::header::{
    CONNECTION, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue};

/// The ID of the call, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The client's own ID where it was replaced, in both directions.
pub const CLIENT_REQUEST_ID: HeaderName = HeaderName::from_static("x-client-request-id");
/// Where the dump of a single prompt is, in the reply.
pub const HIDDEN_STATES_PATH: HeaderName = HeaderName::from_static("x-hidden-states-path");
/// What is wrong with the dump, in a reply that goes out all the same.
pub const MISMATCH: HeaderName = HeaderName::from_static("x-tether-mismatch");
/// In an upstream's reply, where not every prompt has a dump: `none`, or `dump` or `none` for each prompt.
pub const CAPTURE: HeaderName = HeaderName::from_static("x-tether-capture");
/// Asks another proxy in front of this one not to hold a stream back.
pub const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Fields that are about one connection, whether `Connection` names them or not.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Takes out what is only for this hop: the fields above and those that `Connection` names.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers.get_all(CONNECTION).iter().flat_map(names).collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

fn names(value: &HeaderValue) -> impl Iterator<Item = HeaderName> {
    value
        .as_bytes()
        .split(|byte| *byte == b',')
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_for_this_hop_is_taken_out() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Hop"),
            ("connection", "x-other,, bad name"),
            ("keep-alive", "timeout=7"),
            ("x-hop", "1"),
            ("x-other", "2"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "Basic x"),
            ("authorization", "Bearer x"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("x-custom", "3"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers);
        let mut left: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            [("authorization", "Bearer x"), ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-custom", "3")]
        );
    }
}
