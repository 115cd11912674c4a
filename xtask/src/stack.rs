//! The binaries, started as a user would start them and stopped however we end.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{http, process, workspace};

/// How often a condition that we wait for is looked at.
const POLL: Duration = Duration::from_millis(20);
/// How long a service may take to load its model.
const START: Duration = Duration::from_secs(300);
/// How long a service may take to finish after it was asked to stop, before it is killed.
const STOP: Duration = Duration::from_secs(20);
/// How many lines of a log are shown after a failure.
const TAIL: usize = 15;

/// Set once the user, or whoever started us, asks us to stop. Waiting ends with an error then, and the error's way up
/// stops what was started.
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over the signals that end a program.
    pub(crate) fn listen() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
        {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("listening for signals")?;
        }
        Ok(Self(flag))
    }

    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// A server and a proxy in front of it, over one dump directory.
pub(crate) struct Stack {
    // Stopped in this order: the proxy first, so that it never meets a server that is gone.
    proxy: Service,
    server: Service,
    interrupt: Interrupt,
}

/// Where a [`Stack`] keeps its things.
pub(crate) struct Places {
    /// The checkpoint.
    pub(crate) model: PathBuf,
    /// Where dumps are published. Emptied at the start.
    pub(crate) dumps: PathBuf,
    /// Where the logs go.
    pub(crate) logs: PathBuf,
}

impl Stack {
    /// Starts both on free ports and waits until they answer.
    pub(crate) fn start(places: &Places, interrupt: &Interrupt) -> Result<Self> {
        fresh_dir(&places.dumps)?;
        let (server_at, proxy_at) = free_addresses()?;
        let mut command = binary("tether-server")?;
        command.arg("--model").arg(&places.model);
        command.args(["--listen", &server_at.to_string()]).arg("--dump-dir").arg(&places.dumps);
        let server = Service::start("tether-server", command, server_at, &places.logs)?;

        let mut command = binary("tether-proxy")?;
        command.args(["--listen", &proxy_at.to_string(), "--upstream", &format!("http://{server_at}")]);
        command.arg("--dump-dir").arg(&places.dumps);
        let proxy = Service::start("tether-proxy", command, proxy_at, &places.logs)?;

        let mut stack = Self { proxy, server, interrupt: interrupt.clone() };
        stack.server.wait_for("/health", interrupt)?;
        stack.proxy.wait_for("/tether/ready", interrupt)?;
        Ok(stack)
    }

    /// The proxy's address as a URL.
    pub(crate) fn proxy_url(&self) -> String {
        format!("http://{}", self.proxy.address)
    }

    /// The commands that started the two, as one can type them.
    pub(crate) fn command_lines(&self) -> [&str; 2] {
        [&self.server.line, &self.proxy.line]
    }

    /// The proxy's metrics, as it exports them.
    pub(crate) fn proxy_metrics(&self) -> Result<Metrics> {
        self.proxy.metrics()
    }

    /// The server's metrics, as it exports them.
    pub(crate) fn server_metrics(&self) -> Result<Metrics> {
        self.server.metrics()
    }

    /// Runs a command to its end while the two are up, with our input and output, and returns how long it took.
    pub(crate) fn run(&mut self, command: &mut Command) -> Result<Duration> {
        let line = process::show(command);
        let started = Instant::now();
        let mut running = Running::spawn(command)?;
        let status = loop {
            if let Some(status) = running.poll()? {
                break status;
            }
            self.interrupt.check()?;
            self.server.check()?;
            self.proxy.check()?;
            thread::sleep(POLL);
        };
        if !status.success() {
            bail!("`{line}` failed: {status}\n{}{}", self.server.tail(), self.proxy.tail());
        }
        Ok(started.elapsed())
    }

    /// Asks both to stop and waits for them; an error if one did not end well.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.proxy.stop()?;
        self.server.stop()
    }
}

/// One of our binaries. The user's own settings for it stay out: what is shown is all there is.
pub(crate) fn binary(name: &str) -> Result<Command> {
    let path = workspace::bin_dir()?.join(name);
    if !path.is_file() {
        bail!("{} is not there; run `cargo build --release`", path.display());
    }
    let mut command = process::command(path);
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if ["TETHER_SERVER_", "TETHER_PROXY_", "TETHER_EXTRACT_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(&variable);
        }
    }
    Ok(command)
}

/// Makes `dir` an empty folder.
pub(crate) fn fresh_dir(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))
}

/// Two addresses nobody listens on. Somebody could take one before we do; then the start fails and says so.
fn free_addresses() -> Result<(SocketAddr, SocketAddr)> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a free port");
    // Both are held at once, or they could be the same.
    let (one, two) = (bind()?, bind()?);
    Ok((one.local_addr()?, two.local_addr()?))
}

/// A program that listens on an address until it is stopped.
struct Service {
    name: &'static str,
    address: SocketAddr,
    line: String,
    log: PathBuf,
    running: Running,
}

impl Service {
    fn start(name: &'static str, mut command: Command, address: SocketAddr, logs: &Path) -> Result<Self> {
        fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        let log = logs.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let line = process::show(&command);
        command.stdin(std::process::Stdio::null());
        command.stdout(file.try_clone().context("sharing the log")?).stderr(file);
        let running = Running::spawn(&mut command)?;
        Ok(Self { name, address, line, log, running })
    }

    /// Waits until `path` is answered with 200.
    fn wait_for(&mut self, path: &str, interrupt: &Interrupt) -> Result<()> {
        let deadline = Instant::now() + START;
        loop {
            let answer = match http::get(self.address, path) {
                Ok(reply) if reply.status == 200 => return Ok(()),
                Ok(reply) => format!("answered {}", reply.status),
                Err(error) => format!("{error:#}"),
            };
            self.check()?;
            interrupt.check()?;
            if Instant::now() > deadline {
                bail!("{} was not ready after {} s: {answer}\n{}", self.name, START.as_secs(), self.tail());
            }
            thread::sleep(POLL);
        }
    }

    /// An error if it has ended although nobody asked it to.
    fn check(&mut self) -> Result<()> {
        match self.running.poll()? {
            Some(status) => bail!("{} ended by itself: {status}\n{}", self.name, self.tail()),
            None => Ok(()),
        }
    }

    fn metrics(&self) -> Result<Metrics> {
        let reply =
            http::get(self.address, "/metrics").with_context(|| format!("{}'s metrics", self.name))?;
        if reply.status != 200 {
            bail!("{}'s metrics: answered {}", self.name, reply.status);
        }
        Ok(Metrics(reply.body))
    }

    fn stop(&mut self) -> Result<()> {
        self.check()?;
        self.running.ask_to_stop();
        let deadline = Instant::now() + STOP;
        loop {
            match self.running.poll()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("{} did not stop cleanly: {status}\n{}", self.name, self.tail()),
                None if Instant::now() > deadline => {
                    bail!(
                        "{} was still running {} s after SIGTERM\n{}",
                        self.name,
                        STOP.as_secs(),
                        self.tail()
                    )
                }
                None => thread::sleep(POLL),
            }
        }
    }

    /// The end of the log, for an error message.
    fn tail(&self) -> String {
        let shown = workspace::relative(&self.log).display();
        let mut text = format!("--- end of {shown}\n");
        match File::open(&self.log) {
            Ok(file) => {
                let mut lines = VecDeque::new();
                for line in BufReader::new(file).split(b'\n').map_while(Result::ok) {
                    if lines.len() == TAIL {
                        lines.pop_front();
                    }
                    lines.push_back(String::from_utf8_lossy(&line).into_owned());
                }
                for line in lines {
                    let _ = writeln!(text, "{line}");
                }
            }
            Err(error) => {
                let _ = writeln!(text, "(cannot be read: {error})");
            }
        }
        text
    }
}

/// A child that does not outlive its owner, not even one that is killed. In a process group of its own, so that Ctrl-C reaches only us, and we stop
/// the children in the order that loses nothing.
struct Running {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Running {
    fn spawn(command: &mut Command) -> Result<Self> {
        let line = process::show(command);
        die_with_this_process(command);
        let child =
            command.process_group(0).spawn().with_context(|| format!("`{line}` could not be started"))?;
        Ok(Self { child, ended: None })
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().context("waiting for a child")?;
        }
        Ok(self.ended)
    }

    fn ask_to_stop(&self) {
        // Not reaped yet, or `ended` would be set, so the number is still the child's. A failure means that it ended
        // just now, which the caller sees by polling.
        if self.ended.is_none() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
    }
}

/// Has the kernel end the child when the thread that starts it does. The demo's is the main one.
fn die_with_this_process(command: &mut Command) {
    let parent = rustix::process::getpid();
    let arm = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // We may have died before the signal was armed.
        if rustix::process::getppid() == Some(parent) {
            Ok(())
        } else {
            Err(std::io::ErrorKind::NotFound.into())
        }
    };
    // SAFETY: between fork and exec `arm` makes two system calls; it neither takes a lock nor allocates.
    unsafe { command.pre_exec(arm) };
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ask_to_stop();
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = self.poll() {
            if Instant::now() > deadline {
                // Nothing is left to do about a child that cannot even be killed.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// Metrics in Prometheus' text format.
pub(crate) struct Metrics(String);

impl Metrics {
    /// The sum over all series called `name` that have every label of `labels`; an error when there is none, because
    /// a misspelt name must not read as zero.
    pub(crate) fn sum(&self, name: &str, labels: &[&str]) -> Result<u64> {
        let mut found = None;
        for line in self.0.lines() {
            let Some(rest) = line.strip_prefix(name).filter(|rest| rest.starts_with(['{', ' '])) else {
                continue;
            };
            let (series, value) = rest.rsplit_once(' ').unwrap_or_default();
            if labels.iter().all(|label| series.contains(label)) {
                let value: f64 = value.parse().with_context(|| format!("metric `{line}`"))?;
                found = Some(found.unwrap_or(0.0) + value);
            }
        }
        let sum = found.with_context(|| format!("there is no metric {name} with {labels:?}"))?;
        Ok(sum as u64)
    }
}

#[cfg(test)]
mod tests;
