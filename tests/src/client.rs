//! A small HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::{Client as HyperClient, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tether_dump::RequestId;

/// No single call of a test takes this long; one that does is stuck.
const CALL_DEADLINE: Duration = Duration::from_secs(300);

/// Sends requests to one address over kept-alive connections. Make one per test: connections belong to the runtime
/// that opened them.
#[derive(Clone)]
pub struct Client {
    address: SocketAddr,
    inner: HyperClient<HttpConnector, Full<Bytes>>,
}

/// A whole reply.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, to its end.
    pub body: Bytes,
}

impl Client {
    /// A client of the server at `address`.
    pub fn new(address: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { address, inner: HyperClient::builder(TokioExecutor::new()).build(connector) }
    }

    /// The server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// GET `path`.
    pub async fn get(&self, path: &str) -> Reply {
        self.send(self.request(Method::GET, path).body(Full::default()).expect("a plain request")).await
    }

    /// POST `body` as JSON to `path`.
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, &body.to_string()).await
    }

    /// POST to `/generate`.
    pub async fn generate(&self, body: &Value) -> Reply {
        self.post("/generate", body).await
    }

    /// POST `body`, which need not be valid JSON, to `path` with a JSON content type.
    pub async fn post_text(&self, path: &str, body: &str) -> Reply {
        let request = self.request(Method::POST, path).header(header::CONTENT_TYPE, "application/json");
        self.send(request.body(Full::from(body.to_owned())).expect("a plain request")).await
    }

    /// The start of a request to this client's server.
    pub fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(format!("http://{}{path}", self.address))
    }

    /// Sends `request`.
    ///
    /// # Panics
    /// If no whole reply comes back.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Reply {
        let what = format!("{} {}", request.method(), request.uri());
        self.try_send(request).await.unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    /// Sends `request`.
    ///
    /// # Errors
    /// If no whole reply comes back.
    pub async fn try_send(&self, request: Request<Full<Bytes>>) -> Result<Reply, String> {
        let call = async {
            let reply = self.inner.request(request).await.map_err(|error| format!("no reply: {error:?}"))?;
            let (head, body) = reply.into_parts();
            let body = body.collect().await.map_err(|error| format!("the reply broke off: {error:?}"))?;
            Ok(Reply { status: head.status, headers: head.headers, body: body.to_bytes() })
        };
        tokio::time::timeout(CALL_DEADLINE, call)
            .await
            .map_err(|_| format!("no reply in {CALL_DEADLINE:?}"))?
    }
}

impl Reply {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {} {}", self.status, self.text()))
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("the headers of our servers are ASCII"))
    }

    /// The same reply, once its status was checked.
    ///
    /// # Panics
    /// If the status is not `status`; shows the body.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        self
    }

    /// The answers: the body itself for a single prompt, its elements for a batch.
    #[track_caller]
    pub fn answers(&self) -> Vec<Value> {
        match self.json() {
            Value::Array(answers) => answers,
            answer => vec![answer],
        }
    }

    /// The request ID of each answer, `meta_info.id`.
    ///
    /// # Panics
    /// If one is not a request ID.
    #[track_caller]
    pub fn ids(&self) -> Vec<RequestId> {
        let id = |answer: &Value| answer["meta_info"]["id"].as_str().and_then(|id| id.parse().ok());
        self.answers()
            .iter()
            .map(|answer| id(answer).unwrap_or_else(|| panic!("no request ID in {answer}")))
            .collect()
    }

    /// The request ID of the only answer.
    #[track_caller]
    pub fn id(&self) -> RequestId {
        let ids = self.ids();
        assert_eq!(ids.len(), 1, "one answer");
        ids[0]
    }

    /// The generated tokens of the only answer.
    #[track_caller]
    pub fn output_ids(&self) -> Vec<i64> {
        let body = self.json();
        let ids = body["output_ids"].as_array().unwrap_or_else(|| panic!("no output_ids in {body}"));
        ids.iter().map(|id| id.as_i64().expect("an integer")).collect()
    }

    /// The words in which an error was put, from any of the shapes SGLang uses: `{"error":{"message"}}`, `{"error"}`,
    /// `{"message"}`, `{"detail"}`.
    ///
    /// # Panics
    /// If the body is none of them.
    #[track_caller]
    pub fn error_text(&self) -> String {
        let body = self.json();
        let texts = [&body["error"]["message"], &body["error"], &body["message"], &body["detail"]];
        let text = texts.into_iter().find_map(Value::as_str);
        text.unwrap_or_else(|| panic!("no error text in {body}")).to_owned()
    }
}
