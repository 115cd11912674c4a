//! One child process: its log, its signals, and its end.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};

use crate::wait::eventually;

/// Lines of a log that a failed test shows.
const TAIL_LINES: usize = 60;

/// A running binary under test. Dropping it kills it and prints the end of its log, which the test runner shows for a
/// failed test only.
pub struct Process {
    name: String,
    log: PathBuf,
    pid: u32,
    child: Mutex<Child>,
}

/// What [`Process::signal`] can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Please end: SIGTERM.
    Terminate,
    /// Ends at once, without a chance to clean up: SIGKILL.
    Kill,
}

impl Process {
    /// Starts `command`; what it prints is appended to the file `log`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Self {
        let open = || File::options().create(true).append(true).open(log).expect("the log's folder was made");
        command.stdin(Stdio::null()).stdout(open()).stderr(open());
        // The caller's own settings must not reach the binaries under test.
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy();
            let ours = ["TETHER_SERVER_", "TETHER_PROXY_", "TETHER_EXTRACT_"];
            if ours.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(&variable);
            }
        }
        let child = spawn_tied_to_this_process(command);
        let child = child.unwrap_or_else(|error| panic!("cannot start `{name}`: {error}"));
        Self { name: name.to_owned(), log: log.to_owned(), pid: child.id(), child: Mutex::new(child) }
    }

    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it has.
    pub fn exited(&self) -> Option<ExitStatus> {
        self.child().try_wait().expect("our own child can be waited for")
    }

    /// Sends `signal`, unless it has ended already.
    pub fn signal(&self, signal: Signal) {
        let mut child = self.child();
        // Reaping under the lock: a PID that was waited for may belong to someone else by now.
        if child.try_wait().expect("our own child can be waited for").is_some() {
            return;
        }
        match signal {
            Signal::Kill => child.kill().expect("a child that is not reaped can be killed"),
            Signal::Terminate => terminate(child.id()),
        }
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it has not ended within the deadline.
    pub async fn wait(&self) -> ExitStatus {
        eventually(&format!("`{}` ends", self.name), || async { self.exited() }).await
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&self) {
        let mut child = self.child();
        // Already reaped is as good as killed.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// All it has printed so far.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The last lines it has printed.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    /// Resident memory in bytes, from `/proc`; `None` once it has ended.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.status_field("VmRSS:").map(|kib| kib * 1024)
    }

    /// Largest resident memory so far in bytes; `None` once it has ended.
    pub fn peak_resident_bytes(&self) -> Option<u64> {
        self.status_field("VmHWM:").map(|kib| kib * 1024)
    }

    /// Number of threads; `None` once it has ended.
    pub fn threads(&self) -> Option<u64> {
        self.status_field("Threads:")
    }

    fn status_field(&self, field: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.split_whitespace().next()?.parse().ok()
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        eprintln!(
            "---- end of the log of `{}` ({}) ----\n{}",
            self.name,
            self.log.display(),
            self.log_tail()
        );
    }
}

fn terminate(pid: u32) {
    let pid = libc::pid_t::try_from(pid).expect("Linux keeps PIDs below 2^22");
    // SAFETY: kill(2) touches no memory of ours; the caller holds the un-reaped child, so the PID is its.
    let result = unsafe { libc::kill(pid, libc::SIGTERM) };
    assert_eq!(result, 0, "kill({pid}, SIGTERM): {}", std::io::Error::last_os_error());
}

/// Spawns from a thread that lives as long as this process, with the parent-death signal set. Servers shared by the
/// tests of a file sit in statics, which are never dropped, and a test run may itself be killed: either way the kernel
/// ends the children. It watches the spawning *thread*, hence the one that never ends.
fn spawn_tied_to_this_process(command: Command) -> std::io::Result<Child> {
    type Order = (Command, mpsc::Sender<std::io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        let work = move || {
            for (mut command, reply) in inbox {
                die_with_parent(&mut command);
                // The one who ordered is waiting, unless its test was torn down; the child is then killed on exit.
                let _ = reply.send(command.spawn());
            }
        };
        std::thread::Builder::new().name("spawner".to_owned()).spawn(work).expect("a thread can be started");
        orders
    });
    let (reply, answer) = mpsc::channel();
    spawner.send((command, reply)).expect("the spawner never ends");
    answer.recv().expect("the spawner answers every order")
}

fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let parent = std::process::id();
    let arm = move || {
        // SAFETY: plain system calls, as is required between fork and exec.
        let (armed, now) = unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::getppid()) };
        // The parent may have died before the signal was armed.
        if armed != 0 || u32::try_from(now) != Ok(parent) {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: `arm` neither allocates nor takes a lock.
    unsafe { command.pre_exec(arm) };
}
