//! A running `tether-server`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use crate::binaries::binary;
use crate::checkpoint::Checkpoint;
use crate::client::Client;
use crate::dumps::DumpDir;
use crate::fault::Fault;
use crate::ports::free_address;
use crate::process::Process;
use crate::scratch::scratch;
use crate::wait::eventually;

/// How a server is to be started.
pub struct ServerBuilder {
    model: PathBuf,
    folder: TempDir,
    address: SocketAddr,
    flags: Vec<String>,
    fault: Option<Fault>,
}

/// A server that can be killed and started anew at the same address, on the same dump directory.
pub struct Server {
    recipe: ServerBuilder,
    process: Mutex<Arc<Process>>,
}

impl ServerBuilder {
    /// A flag without a value.
    pub fn switch(mut self, name: &str) -> Self {
        self.flags.push(name.to_owned());
        self
    }

    /// A flag with a value.
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.flags.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// With a disk that can be made to misbehave: see [`Server::fault`].
    pub fn with_faulty_disk(mut self) -> Self {
        self.fault = Some(Fault::new(&self.dump_dir()));
        self
    }

    /// Starts it and waits until it is healthy.
    ///
    /// # Panics
    /// If it ends, or does not become healthy.
    pub async fn start(self) -> Server {
        let server = self.spawn();
        server.healthy().await;
        server
    }

    /// Starts it without waiting.
    pub fn spawn(self) -> Server {
        let process = Mutex::new(Arc::new(self.launch()));
        Server { recipe: self, process }
    }

    /// Starts it where it is expected to refuse, and returns how it ended: exit code and what it printed.
    pub async fn refused(self) -> (Option<i32>, String) {
        let process = self.launch();
        let status = process.wait().await;
        (status.code(), process.log())
    }

    fn dump_dir(&self) -> PathBuf {
        self.folder.path().join("dumps")
    }

    fn launch(&self) -> Process {
        let mut command = Command::new(binary("tether-server"));
        command.arg("--model").arg(&self.model).arg("--dump-dir").arg(self.dump_dir());
        command.arg("--listen").arg(self.address.to_string()).args(&self.flags);
        if let Some(fault) = &self.fault {
            fault.apply_to(&mut command);
        }
        Process::spawn("tether-server", command, &self.folder.path().join("server.log"))
    }
}

impl Server {
    /// A server of `checkpoint` with an empty dump directory of its own, on one compute thread: the machine's cores are
    /// shared with the proxy, the clients and the other tests.
    pub fn of(checkpoint: &Checkpoint) -> ServerBuilder {
        Self::of_model(checkpoint.path())
    }

    /// A server of the checkpoint in `model`.
    pub fn of_model(model: &Path) -> ServerBuilder {
        let folder = scratch();
        std::fs::create_dir(folder.path().join("dumps")).expect("the folder was just made");
        let builder = ServerBuilder {
            model: model.to_owned(),
            folder,
            address: free_address(),
            flags: Vec::new(),
            fault: None,
        };
        builder.flag("--threads", "1")
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.recipe.address
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(self.address())
    }

    /// Its dumps.
    pub fn dumps(&self) -> DumpDir {
        DumpDir::new(self.recipe.dump_dir())
    }

    /// The process, as of now.
    pub fn process(&self) -> Arc<Process> {
        self.slot().clone()
    }

    /// Its disk.
    ///
    /// # Panics
    /// If it was not started [`with_faulty_disk`](ServerBuilder::with_faulty_disk).
    pub fn fault(&self) -> &Fault {
        self.recipe.fault.as_ref().expect("the server was started with a faulty disk")
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Starts it anew after it has ended, and waits until it is healthy.
    pub async fn start_again(&self) {
        assert!(self.process().exited().is_some(), "the server still runs");
        *self.slot() = Arc::new(self.recipe.launch());
        self.healthy().await;
    }

    /// Waits until `/health` answers 200.
    ///
    /// # Panics
    /// If it ends instead, or nothing happens.
    pub async fn healthy(&self) {
        let (process, client) = (self.process(), self.client());
        eventually("the server is healthy", || async {
            if let Some(status) = process.exited() {
                panic!("the server ended with {status} instead of becoming healthy:\n{}", process.log_tail());
            }
            let request = client
                .request(http::Method::GET, "/health")
                .body(Default::default())
                .expect("a plain request");
            client.try_send(request).await.ok().filter(|reply| reply.status == 200)
        })
        .await;
    }

    fn slot(&self) -> MutexGuard<'_, Arc<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
