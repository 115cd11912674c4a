//! An upstream that follows a script, a proxy in this process, and a client that sees every byte.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser;
use serde_json::Value;
use tether_dump::{CapturePoint, Dtype, Dump, FinalState, Metadata, RequestId, Rows, TokenHash};
use tether_proxy::app::App;
use tether_proxy::config::Args;
use tether_proxy::server;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Long enough for any machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    within(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Waits for `work`, but not for ever.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.unwrap_or_else(|_| panic!("{what} did not happen in time"))
}

/// One HTTP message as it came over the wire.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    /// The first line.
    pub(crate) start: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Whether it ended as its framing says it must.
    pub(crate) whole: bool,
}

impl Message {
    pub(crate) fn status(&self) -> u16 {
        self.start.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {self:?}")).parse().unwrap()
    }

    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The IDs in its body.
    pub(crate) fn rids(&self) -> Vec<RequestId> {
        let rid = &self.json()["rid"];
        let texts = rid.as_array().cloned().unwrap_or_else(|| vec![rid.clone()]);
        texts.iter().map(|text| text.as_str().unwrap().parse().unwrap()).collect()
    }
}

/// A connection, with what was read from it and not yet used.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::new() }
    }

    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads more. `false` at the end.
    async fn fill(&mut self) -> bool {
        let mut block = vec![0; 64 << 10];
        match self.stream.read(&mut block).await {
            Ok(len) if len > 0 => {
                self.buffer.extend_from_slice(&block[..len]);
                true
            }
            _ => false,
        }
    }

    /// Bytes up to and with `end`.
    pub(crate) async fn take_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, end) {
                return Some(self.buffer.drain(..at + end.len()).collect());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    pub(crate) async fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < len {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.buffer.drain(..len).collect())
    }

    /// Reads to the end of the connection.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.buffer)
    }

    /// Waits until the other side has closed or reset the connection.
    pub(crate) async fn gone(&mut self) {
        self.rest().await;
    }

    /// Reads the head of a message. `None` if the connection ended before one.
    pub(crate) async fn head(&mut self) -> Option<Message> {
        let head = String::from_utf8(self.take_until(b"\r\n\r\n").await?).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let start = lines.next().unwrap().to_owned();
        let headers = lines.map(|line| line.split_once(':').unwrap());
        let headers = headers.map(|(name, value)| (name.to_lowercase(), value.trim().to_owned())).collect();
        Some(Message { start, headers, body: Vec::new(), whole: false })
    }

    /// One chunk of a chunked body; empty at its end. `None` if it was cut.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.take_until(b"\r\n").await?;
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
        let data = self.take(size + 2).await?;
        Some(data[..size].to_vec())
    }

    /// Reads a whole message, as far as it comes.
    pub(crate) async fn message(&mut self) -> Option<Message> {
        let mut message = self.head().await?;
        let is_reply = message.start.starts_with("HTTP/");
        if is_reply && message.status() == 100 {
            message = self.head().await?;
        }
        if message.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk().await {
                if chunk.is_empty() {
                    message.whole = true;
                    break;
                }
                message.body.extend(chunk);
            }
        } else if let Some(len) = message.header("content-length") {
            let len: usize = len.parse().unwrap();
            match self.take(len).await {
                Some(body) => (message.body, message.whole) = (body, true),
                None => message.body = std::mem::take(&mut self.buffer),
            }
        } else {
            message.whole = true;
            if is_reply {
                message.body = self.rest().await;
            }
        }
        Some(message)
    }

    /// Sends a request with a JSON body on this connection, and reads the reply.
    pub(crate) async fn post(&mut self, path: &str, headers: &str, body: &[u8]) -> Message {
        self.send(path, headers, body).await;
        within("a reply", self.message()).await.expect("the connection ended without a reply")
    }

    pub(crate) async fn send(&mut self, path: &str, headers: &str, body: &[u8]) {
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: proxy\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
        self.write([head.as_bytes(), body].concat()).await;
    }

    /// Answers with a body of a known length.
    pub(crate) async fn reply(&mut self, status: &str, headers: &str, body: &[u8]) {
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
        self.write([head.as_bytes(), body].concat()).await;
    }

    /// Answers with the head of a stream of events.
    pub(crate) async fn stream_head(&mut self) {
        self.write(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .await;
    }

    pub(crate) async fn write_chunk(&mut self, data: &[u8]) {
        self.write([format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()).await;
    }

    /// Closes with a reset.
    pub(crate) fn reset(self) {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

type Script =
    Arc<dyn Fn(Message, Wire, usize) -> Pin<Box<dyn Future<Output = Option<Wire>> + Send>> + Send + Sync>;

/// An upstream that follows a script.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<Message>>>,
    /// Connections that it still serves.
    pub(crate) open: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Upstream {
    /// `script` gets each request, the connection, and which request of that connection it is, counted from 0. It gives the
    /// connection back to have it kept alive.
    pub(crate) async fn start<F, R>(script: F) -> Self
    where
        F: Fn(Message, Wire, usize) -> R + Send + Sync + 'static,
        R: Future<Output = Option<Wire>> + Send + 'static,
    {
        let script: Script = Arc::new(move |message, wire, index| Box::pin(script(message, wire, index)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, open) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let (log, count) = (seen.clone(), open.clone());
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (script, log, count) = (script.clone(), log.clone(), count.clone());
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    for index in 0.. {
                        let Some(message) = wire.message().await else { break };
                        log.lock().unwrap().push(message.clone());
                        match script(message, wire, index).await {
                            Some(kept) => wire = kept,
                            None => break,
                        }
                    }
                    count.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, seen, open, accepting }
    }

    /// One that answers every request with `{}`.
    pub(crate) async fn plain() -> Self {
        Self::start(|_, mut wire, _| async move {
            wire.reply("200 OK", "content-type: application/json\r\n", b"{}").await;
            Some(wire)
        })
        .await
    }

    pub(crate) fn requests(&self) -> Vec<Message> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) fn last(&self) -> Message {
        self.requests().pop().expect("no request has come")
    }

    pub(crate) fn stop(&self) {
        self.accepting.abort();
    }
}

/// A proxy in this process.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    pub(crate) app: Arc<App>,
    pub(crate) signals: mpsc::Sender<()>,
    pub(crate) ended: JoinHandle<()>,
}

impl Proxy {
    /// In front of `upstreams`, with more flags.
    pub(crate) async fn start(upstreams: &[&Upstream], flags: &[&str]) -> Self {
        let urls: Vec<_> = upstreams.iter().map(|upstream| format!("http://{}", upstream.address)).collect();
        Self::start_at(&urls, flags).await
    }

    pub(crate) async fn start_at(urls: &[String], flags: &[&str]) -> Self {
        let urls = urls.iter().flat_map(|url| ["--upstream", url]);
        // Scripts count the requests that come, so health is only asked for where a test is about it.
        let asked = flags.contains(&"--health-interval");
        let unasked = ["--health-interval", "0s"].into_iter().filter(|_| !asked);
        let words = ["tether-proxy"].into_iter().chain(urls).chain(unasked).chain(flags.iter().copied());
        let args = Args::try_parse_from(words).unwrap();
        let (app, sweeper) = App::new(args).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (signals, receiver) = mpsc::channel(2);
        let ended = tokio::spawn(server::serve(app.clone(), sweeper, listener, None, receiver));
        Self { address, app, signals, ended }
    }

    pub(crate) async fn connect(&self) -> Wire {
        Wire::connect(self.address).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Message {
        self.connect().await.post(path, "content-type: application/json\r\n", body.as_ref()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Message {
        self.request("GET", path).await
    }

    pub(crate) async fn request(&self, method: &str, path: &str) -> Message {
        let mut wire = self.connect().await;
        wire.write(format!("{method} {path} HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        within("a reply", wire.message()).await.expect("the connection ended without a reply")
    }

    /// The value of one series, with its labels as exported.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let text = self.app.metrics.text().unwrap();
        let line =
            text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub(crate) fn sum(&self, name: &str) -> f64 {
        let text = self.app.metrics.text().unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name) && !line.starts_with('#'));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    /// Waits until nothing is in flight, and checks that every request is accounted for.
    pub(crate) async fn settled(&self) {
        until("the end of all requests", || {
            self.app.metrics.in_flight.get() == 0 && self.app.table.is_empty()
        })
        .await;
        assert_eq!(
            self.sum("tether_proxy_requests_received_total"),
            self.sum("tether_proxy_requests_answered_total")
                + self.sum("tether_proxy_requests_aborted_total")
        );
        assert_eq!(self.sum("tether_proxy_requests_queued"), 0.0);
        assert_eq!(self.sum("tether_proxy_body_memory_bytes"), 0.0);
        assert_eq!(self.sum("tether_proxy_upstream_requests_in_flight"), 0.0);
        assert_eq!(self.sum("tether_proxy_upstream_tokens_in_flight"), 0.0);
    }
}

/// Publishes a dump of `tokens` under `id`, which says that it is of `inside`.
pub(crate) fn publish(dir: &Path, id: RequestId, inside: RequestId, tokens: &[i64]) {
    let metadata = Metadata {
        request_id: inside,
        call_id: None,
        client_rid: None,
        model: "tiny".into(),
        config_hash: "0".repeat(64),
        num_layers: 8,
        points: vec![CapturePoint::Residual(2), CapturePoint::Residual(8)],
        final_state: FinalState::PreNorm,
        rows: Rows::Prompt,
        prompt_tokens: tokens.len(),
        dtype: Dtype::Float32,
        token_hash: TokenHash::of(tokens),
        server: "test".into(),
        created: "2026-12-01T00:00:00Z".into(),
    };
    let states = vec![0; tokens.len() * 2 * 4 * 4];
    let dump = Dump { metadata: &metadata, token_ids: tokens, hidden_states: &states, hidden_size: 4 };
    let made = tempfile::tempdir_in(dir.parent().unwrap()).unwrap();
    let published = tether_dump::publish(made.path(), &dump, false, &|| false).unwrap();
    std::fs::rename(published.path, tether_dump::dump_path(dir, id)).unwrap();
}

/// The dumps in `dir`.
pub(crate) fn dumps(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// The token IDs of each prompt of a request to `/generate`.
pub(crate) fn prompts(request: &Message) -> Vec<Vec<i64>> {
    let ids = &request.json()["input_ids"];
    serde_json::from_value(ids.clone()).unwrap_or_else(|_| vec![serde_json::from_value(ids.clone()).unwrap()])
}
