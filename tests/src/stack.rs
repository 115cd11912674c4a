//! The usual set-up: one server, and a proxy before it.

use crate::client::Client;
use crate::dumps::DumpDir;
use crate::proxy::Proxy;
use crate::server::{Server, ServerBuilder};

/// A server and its proxy.
pub struct Stack {
    /// The proxy. Before the server, so that it is stopped first.
    pub proxy: Proxy,
    /// The server.
    pub server: Server,
}

impl Stack {
    /// Starts both.
    pub async fn start(server: ServerBuilder) -> Self {
        let server = server.start().await;
        let proxy = Proxy::start(server.address(), server.dumps().path(), &[]).await;
        Self { proxy, server }
    }

    /// A client of the proxy.
    pub fn client(&self) -> Client {
        self.proxy.client()
    }

    /// A client of the server itself.
    pub fn direct(&self) -> Client {
        self.server.client()
    }

    /// The server's dumps.
    pub fn dumps(&self) -> DumpDir {
        self.server.dumps()
    }
}
