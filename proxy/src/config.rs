//! What the proxy can be told: flags, variables `TETHER_PROXY_…`, or a file.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use clap::{Parser, ValueEnum};
use http::uri::{Authority, PathAndQuery, Uri};

use crate::units::{ByteSize, Period};
use crate::upstream::Limits;

/// Gives every request of an LLM server an ID, and lets a reply through only once the hidden states it produced are on
/// disk under that ID and belong to it.
///
/// Every flag may also stand as TETHER_PROXY_<FLAG> in the environment, or as a key in the file given with --config.
#[derive(Clone, Debug, Parser)]
#[command(name = "tether-proxy", version)]
pub struct Args {
    /// Read settings from this TOML file; flags and variables win over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Address where clients connect. Port 0 takes a free one, which the start-up line names.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,

    /// Server to forward to, as http://host:port, optionally with `,dump-dir=DIR`. May be given several times.
    #[arg(long, value_name = "URL[,dump-dir=DIR]", required = true)]
    pub upstream: Vec<UpstreamSpec>,

    /// Which upstream gets a request: the one with the fewest prompt tokens in flight, or each in turn.
    #[arg(long, value_name = "POLICY", default_value = "least-tokens")]
    pub balance: Balance,

    /// How long a connection to an upstream may take to open.
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub connect_timeout: Period,

    /// How often each upstream is asked for its health; 0s for never. Up to a tenth is added by chance.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub health_interval: Period,

    /// What to ask an upstream for. A 2xx status passes.
    #[arg(long, value_name = "PATH", default_value = "/health", value_parser = health_path)]
    pub health_path: PathAndQuery,

    /// How long the answer may take.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub health_timeout: Period,

    /// Failed health checks in a row after which an upstream gets no requests.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub health_failures: u32,

    /// Passed health checks in a row after which it gets requests again.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub health_passes: u32,

    /// Requests in a row that an upstream fails (no connection, no reply, a 5xx other than 503) before others are kept
    /// away from it; 0 for never.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub breaker_failures: u32,

    /// How long they are kept away. Then one request is let through on trial.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub breaker_open: Period,

    /// Directory where upstreams without one of their own publish their dumps, as mounted here. Without it replies are
    /// not checked.
    #[arg(long, value_name = "DIR")]
    pub dump_dir: Option<PathBuf>,

    /// Serve /metrics on this address instead; /metrics on the main one is then forwarded like any other path.
    #[arg(long, value_name = "ADDR")]
    pub metrics_addr: Option<SocketAddr>,

    /// Do not serve the status page at /tether/, nor what it shows at /tether/status.
    #[arg(long)]
    pub no_page: bool,

    /// What to do with IDs that clients chose: `replace` them all, or `trust` those that are version 7 UUIDs.
    #[arg(long, value_name = "POLICY", default_value = "replace")]
    pub client_ids: ClientIds,

    /// What the upstreams are: `tether` servers, or stock `sglang`. SGLang skips what its prefix cache already holds, and the
    /// hidden states of those tokens would be missing: each prompt gets a `cache_salt` of its own, in place of the
    /// client's. As SGLang drops the IDs of requests for several samples, `n` above 1 is then answered with 400.
    #[arg(long, value_name = "KIND", default_value = "tether")]
    pub upstream_kind: UpstreamKind,

    /// Leave `cache_salt` as the client wrote it, for an SGLang server whose prefix cache is off.
    #[arg(long)]
    pub no_fresh_prefix: bool,

    /// What to do when a dump is missing or is not the request's: `fail` the reply with 502, or `warn` in a header.
    #[arg(long, value_name = "ACTION", default_value = "fail")]
    pub on_mismatch: OnMismatch,

    /// How long to wait for the dump of a reply that is there.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub dump_wait: Period,

    /// Longest request body, also after decompression. A longer one is answered with 413.
    #[arg(long, value_name = "SIZE", default_value = "512MB")]
    pub max_body: ByteSize,

    /// Memory for the request bodies of all requests together. What does not fit is answered with 503.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub body_memory: ByteSize,

    /// Most generations that run at once, from when they are read to the end of their reply; 0 for any number. More wait in
    /// a queue. Other paths are not limited.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = concurrency)]
    pub max_concurrent: usize,

    /// Most generations that wait for their turn. One more is answered with 429.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub queue: usize,

    /// How long one may wait. Then the answer is 503.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub queue_timeout: Period,

    /// How long an upstream may stay silent, before and during a reply. Then the answer is 504, or the stream is cut.
    #[arg(long, value_name = "TIME", default_value = "1h")]
    pub upstream_timeout: Period,

    /// How long a client may take to send the head of a request, or stay silent within its body. Then the answer is 408.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub client_timeout: Period,

    /// After SIGTERM, how long requests may take to end before they are cut.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub drain_timeout: Period,

    /// After SIGTERM, how long to keep accepting while /tether/ready and /health already say 503.
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub settle: Period,

    /// What to log: error, warn, info, debug or trace. At debug each answered request has a line.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: tracing::Level,

    /// Log as JSON, one object a line.
    #[arg(long)]
    pub log_json: bool,
}

/// One `--upstream`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSpec {
    /// Host and port.
    pub authority: Authority,
    /// Where this upstream publishes its dumps.
    pub dump_dir: Option<PathBuf>,
}

/// What happens to IDs that clients chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClientIds {
    /// Every request gets a fresh ID.
    Replace,
    /// A canonical version 7 UUID is kept, all else is replaced.
    Trust,
}

/// What the servers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UpstreamKind {
    /// This project's own server, which computes every prompt whole.
    Tether,
    /// SGLang, with a prefix cache.
    Sglang,
}

/// Which upstream gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Balance {
    /// The one with the fewest prompt tokens in flight.
    LeastTokens,
    /// Each in turn.
    RoundRobin,
}

/// What happens to a reply whose dump is missing or wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnMismatch {
    /// 502 in its place.
    Fail,
    /// The reply with the header `x-tether-mismatch`.
    Warn,
}

/// Text that is not an `--upstream`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an upstream: {reason}; expected `http://host:port` or `http://host:port,dump-dir=DIR`"
)]
pub struct InvalidUpstream {
    text: String,
    reason: String,
}

/// Settings that are each fine but do not work together or on this machine.
#[derive(Debug, thiserror::Error)]
pub enum InvalidConfig {
    /// Two `--upstream` name the same server.
    #[error("--upstream http://{authority} is given twice")]
    RepeatedUpstream {
        /// Host and port.
        authority: Authority,
    },
    /// The directory is absent and cannot be made, or is no directory.
    #[error("cannot use the dump directory {}", path.display())]
    DumpDir {
        /// The directory.
        path: PathBuf,
        /// What the file system answered.
        source: std::io::Error,
    },
    /// There is no salt to leave out.
    #[error("--no-fresh-prefix needs --upstream-kind sglang: towards other servers nothing is injected")]
    NoSalt,
    /// No body of the allowed length fits in the memory for bodies.
    #[error("--max-body {max_body} is more than --body-memory {body_memory}")]
    BodyMemory {
        /// Longest body.
        max_body: ByteSize,
        /// All bodies.
        body_memory: ByteSize,
    },
}

impl FromStr for UpstreamSpec {
    type Err = InvalidUpstream;

    fn from_str(text: &str) -> Result<Self, InvalidUpstream> {
        let invalid = |reason: String| InvalidUpstream { text: text.to_owned(), reason };
        let mut fields = text.split(',');
        let url = fields.next().unwrap_or_default();
        let uri: Uri = url.parse().map_err(|error| invalid(format!("{error}")))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(other) => return Err(invalid(format!("the scheme `{other}` is not supported"))),
            None => return Err(invalid("the scheme is missing".into())),
        }
        if uri.path() != "/" || uri.query().is_some() {
            return Err(invalid(format!("paths are forwarded as they are, but `{}` was given", uri.path())));
        }
        let authority = uri.authority().cloned().ok_or_else(|| invalid("the host is missing".into()))?;
        if authority.as_str().contains('@') {
            return Err(invalid("user names and passwords are not supported".into()));
        }
        let mut dump_dir = None;
        for field in fields {
            match field.split_once('=') {
                Some(("dump-dir", dir)) if !dir.is_empty() && dump_dir.is_none() => {
                    dump_dir = Some(PathBuf::from(dir));
                }
                _ => return Err(invalid(format!("`{field}` is not an option, or is empty or repeated"))),
            }
        }
        Ok(Self { authority, dump_dir })
    }
}

impl fmt::Display for UpstreamSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.authority)
    }
}

impl UpstreamSpec {
    /// Host and port to connect to, 80 where the URL names none.
    pub fn address(&self) -> String {
        let host = self.authority.host();
        format!("{host}:{}", self.authority.port_u16().unwrap_or(80))
    }
}

impl Args {
    /// Checks what no flag alone can tell, and makes the dump directories absolute and present: a path goes into replies,
    /// and clients do not share our working directory.
    ///
    /// # Errors
    /// See [`InvalidConfig`].
    pub fn resolve(mut self) -> Result<Self, InvalidConfig> {
        if self.max_body > self.body_memory {
            return Err(InvalidConfig::BodyMemory { max_body: self.max_body, body_memory: self.body_memory });
        }
        if self.no_fresh_prefix && self.upstream_kind != UpstreamKind::Sglang {
            return Err(InvalidConfig::NoSalt);
        }
        for (index, spec) in self.upstream.iter().enumerate() {
            if self.upstream[..index].iter().any(|other| other.authority == spec.authority) {
                return Err(InvalidConfig::RepeatedUpstream { authority: spec.authority.clone() });
            }
        }
        let default = self.dump_dir.take();
        for spec in &mut self.upstream {
            if let Some(dir) = spec.dump_dir.take().or_else(|| default.clone()) {
                spec.dump_dir = Some(usable(&dir)?);
            }
        }
        self.dump_dir = default;
        Ok(self)
    }

    /// When an upstream is taken out and brought back.
    pub fn limits(&self) -> Limits {
        Limits {
            failures: self.breaker_failures,
            open: self.breaker_open.0,
            failed_checks: self.health_failures,
            passed_checks: self.health_passes,
        }
    }
}

fn health_path(text: &str) -> Result<PathAndQuery, String> {
    let path = text.parse().ok().filter(|_| text.starts_with('/'));
    path.ok_or_else(|| format!("`{text}` is not a path; expected one such as `/health`"))
}

/// A number that a semaphore can hold.
fn concurrency(text: &str) -> Result<usize, String> {
    let most = tokio::sync::Semaphore::MAX_PERMITS;
    let number = text.parse().ok().filter(|number| *number <= most);
    number.ok_or_else(|| format!("expected a whole number from 0 to {most}"))
}

/// `dir` as an absolute path, made if it is not there: the server that fills it may start after us.
fn usable(dir: &Path) -> Result<PathBuf, InvalidConfig> {
    let unusable = |source| InvalidConfig::DumpDir { path: dir.to_owned(), source };
    let absolute = std::path::absolute(dir).map_err(unusable)?;
    std::fs::create_dir_all(&absolute).map_err(unusable)?;
    std::fs::read_dir(&absolute).map_err(unusable)?;
    Ok(absolute)
}

/// Every dump directory once, for what serves files of all upstreams.
pub fn dump_dirs(args: &Args) -> Vec<Arc<Path>> {
    let mut dirs: Vec<Arc<Path>> = Vec::new();
    for dir in args.upstream.iter().filter_map(|spec| spec.dump_dir.as_deref()) {
        if !dirs.iter().any(|known| &**known == dir) {
            dirs.push(dir.into());
        }
    }
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["tether-proxy"].iter().chain(words))
    }

    #[test]
    fn an_upstream_may_name_its_dump_directory() {
        let spec: UpstreamSpec = "http://127.0.0.1:30000,dump-dir=/dumps/a".parse().unwrap();
        assert_eq!(spec.address(), "127.0.0.1:30000");
        assert_eq!(spec.dump_dir.as_deref(), Some(Path::new("/dumps/a")));
        assert_eq!("http://gpu1".parse::<UpstreamSpec>().unwrap().address(), "gpu1:80");
        assert_eq!("http://[::1]:5/".parse::<UpstreamSpec>().unwrap().address(), "[::1]:5");
    }

    #[test]
    fn a_bad_upstream_is_named_with_what_would_be_accepted() {
        for (bad, why) in [
            ("127.0.0.1:30000", "scheme"),
            ("https://host", "`https`"),
            ("http://host/v1", "`/v1`"),
            ("http://user:secret@host", "passwords"),
            ("http://host,dumps=/x", "`dumps=/x`"),
            ("http://host,dump-dir=", "`dump-dir=`"),
            ("", "upstream"),
        ] {
            let error = bad.parse::<UpstreamSpec>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("expected `http://host:port`"), "{bad}: {error}");
        }
    }

    #[test]
    fn the_default_directory_goes_to_upstreams_without_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let (all, own) = (dir.path().join("all"), dir.path().join("own"));
        let second = format!("http://b:1,dump-dir={}", own.display());
        let args =
            parse(&["--upstream", "http://a:1", "--upstream", &second, "--dump-dir", all.to_str().unwrap()])
                .unwrap();
        let args = args.resolve().unwrap();
        assert_eq!(args.upstream[0].dump_dir.as_deref(), Some(&*all));
        assert_eq!(args.upstream[1].dump_dir.as_deref(), Some(&*own));
        assert!(all.is_dir() && own.is_dir());
        assert_eq!(dump_dirs(&args).len(), 2);
    }

    #[test]
    fn a_health_path_begins_with_a_slash() {
        let error = parse(&["--upstream", "http://a:1", "--health-path", "health"]).unwrap_err().to_string();
        assert!(error.contains("expected one such as `/health`"), "{error}");
        let args = parse(&["--upstream", "http://a:1", "--health-path", "/v1/models?x=1"]).unwrap();
        assert_eq!(args.health_path.as_str(), "/v1/models?x=1");
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        assert!(parse(&[]).unwrap_err().to_string().contains("--upstream"));
        let twice = parse(&["--upstream", "http://a:1", "--upstream", "http://a:1/"]).unwrap();
        assert_eq!(twice.resolve().unwrap_err().to_string(), "--upstream http://a:1 is given twice");
        let small = parse(&["--upstream", "http://a:1", "--body-memory", "1MB"]).unwrap();
        assert_eq!(
            small.resolve().unwrap_err().to_string(),
            "--max-body 512MB is more than --body-memory 1MB"
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        let no_dir =
            parse(&["--upstream", "http://a:1", "--dump-dir", file.path().to_str().unwrap()]).unwrap();
        assert!(no_dir.resolve().unwrap_err().to_string().contains(file.path().to_str().unwrap()));
    }
}
