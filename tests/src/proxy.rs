//! A running `tether-proxy`.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::binaries::binary;
use crate::client::Client;
use crate::ports::free_address;
use crate::process::Process;
use crate::scratch::scratch;
use crate::wait::eventually;

/// A proxy in front of one upstream.
pub struct Proxy {
    address: SocketAddr,
    process: Process,
    _folder: TempDir,
}

impl Proxy {
    /// Starts one before `upstream`, with its dumps in `dump_dir`, and waits until it answers.
    ///
    /// # Panics
    /// If it ends, or does not answer.
    pub async fn start(upstream: SocketAddr, dump_dir: &Path, flags: &[&str]) -> Self {
        let folder = scratch();
        let address = free_address();
        let mut command = Command::new(binary("tether-proxy"));
        command.arg("--listen").arg(address.to_string());
        command
            .arg("--upstream")
            .arg(format!("http://{upstream}"))
            .arg("--dump-dir")
            .arg(dump_dir)
            .args(flags);
        let process = Process::spawn("tether-proxy", command, &folder.path().join("proxy.log"));
        let proxy = Self { address, process, _folder: folder };
        let client = proxy.client();
        eventually("the proxy answers", || async {
            if let Some(status) = proxy.process.exited() {
                panic!("the proxy ended with {status} instead of listening:\n{}", proxy.process.log_tail());
            }
            let request = client.request(http::Method::GET, "/tether/live").body(Default::default());
            client.try_send(request.expect("a plain request")).await.ok().filter(|reply| reply.status == 200)
        })
        .await;
        proxy
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }
}
