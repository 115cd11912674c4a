//! A proxy and server in one: answers `/generate` with real dumps, or with whatever a test wants to go wrong.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use half::{bf16, f16};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tether_dump::{
    CapturePoint, Dtype, Dump, FinalState, Metadata, RequestId, Rows, TokenHash, dump_path, publish,
};
use tokio::net::TcpListener;

pub(crate) const HIDDEN: usize = 16;
const LAYERS: u32 = 8;

/// What to answer to one request.
pub(crate) enum Answer {
    /// A dump made as told.
    Dump(Box<Make>),
    /// An error.
    Status(u16, &'static str, Option<u64>),
    /// The proxy's answer when the dump is another request's.
    Mismatch,
    /// No answer: the connection is closed.
    HangUp,
}

/// How a dump and the reply about it are made.
pub(crate) struct Make {
    pub(crate) dtype: Dtype,
    pub(crate) model: &'static str,
    pub(crate) points: Vec<CapturePoint>,
    pub(crate) delay: Duration,
    /// Whether the reply's path can be read by the client.
    pub(crate) reachable: bool,
    /// Whether the path stands in the proxy's header, or only in the body.
    pub(crate) header: bool,
    pub(crate) spoil: Spoil,
}

/// What is wrong with a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoil {
    Nothing,
    /// The states, tokens and hash of another prompt of the same length.
    OtherTokens,
    /// The reply gives the path of a dump of another request.
    OtherRequest,
    /// One value is NaN.
    Nan,
    /// One value is finite as float32 and not as bfloat16.
    TooLarge,
    /// A byte is changed after the hash was taken.
    Rot,
}

impl Default for Make {
    fn default() -> Self {
        Self {
            dtype: Dtype::BFloat16,
            model: "tiny",
            points: ["R2", "R4", "R5", "N"].map(|name| name.parse().unwrap()).to_vec(),
            delay: Duration::ZERO,
            reachable: true,
            header: true,
            spoil: Spoil::Nothing,
        }
    }
}

impl From<Make> for Answer {
    fn from(make: Make) -> Self {
        Self::Dump(Box::new(make))
    }
}

impl Answer {
    pub(crate) fn good() -> Self {
        Make::default().into()
    }

    pub(crate) fn spoilt(spoil: Spoil) -> Self {
        Make { spoil, ..Make::default() }.into()
    }
}

/// Answers a prompt on its n-th attempt, from 0.
pub(crate) type Behaviour = dyn Fn(&[i64], usize) -> Answer + Send + Sync;

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<State>,
    _folder: TempDir,
}

pub(crate) struct State {
    pub(crate) dumps: PathBuf,
    /// Attempts by prompt.
    pub(crate) asked: Mutex<HashMap<Vec<i64>, usize>>,
    pub(crate) captures: Mutex<Vec<Value>>,
    pub(crate) down: AtomicBool,
    in_flight: AtomicUsize,
    pub(crate) most_in_flight: AtomicUsize,
    behaviour: Mutex<Arc<Behaviour>>,
}

impl Fake {
    pub(crate) async fn start(behaviour: impl Fn(&[i64], usize) -> Answer + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = Arc::new(State {
            dumps: folder.path().to_owned(),
            asked: Mutex::default(),
            captures: Mutex::default(),
            down: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            behaviour: Mutex::new(Arc::new(behaviour)),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = Arc::clone(&serving);
                let service = service_fn(move |request| Arc::clone(&state).serve(request));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { address, state, _folder: folder }
    }

    pub(crate) fn behave(&self, behaviour: impl Fn(&[i64], usize) -> Answer + Send + Sync + 'static) {
        *self.state.behaviour.lock().unwrap() = Arc::new(behaviour);
    }

    /// Requests for hidden states so far.
    pub(crate) fn requests(&self) -> usize {
        self.state.asked.lock().unwrap().values().sum()
    }

    /// Files in the dump directory.
    pub(crate) fn dumps(&self) -> usize {
        std::fs::read_dir(&self.state.dumps).unwrap().count()
    }
}

/// The service's error: hyper closes the connection without an answer.
#[derive(Debug, thiserror::Error)]
#[error("hanging up as told")]
pub(crate) struct HungUp;

impl State {
    async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, HungUp> {
        if self.down.load(Ordering::SeqCst) {
            return Err(HungUp);
        }
        let path = request.uri().path().to_owned();
        if path == "/tether/ready" {
            return Ok(Response::new(Full::default()));
        }
        if let Some(id) = path.strip_prefix("/tether/dumps/") {
            let Ok(response) = self.dump(request.method(), id);
            return Ok(response);
        }
        assert_eq!((request.method(), path.as_str()), (&Method::POST, "/generate"));
        let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_in_flight.fetch_max(now, Ordering::SeqCst);
        let response = self.generate(request).await;
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        response
    }

    fn dump(&self, method: &Method, id: &str) -> Result<Response<Full<Bytes>>, Infallible> {
        let path = dump_path(&self.dumps, id.parse().unwrap());
        let found = match *method {
            Method::GET => std::fs::read(path).map(Bytes::from),
            Method::DELETE => std::fs::remove_file(path).map(|()| Bytes::new()),
            _ => panic!("{method} of a dump"),
        };
        Ok(match found {
            Ok(bytes) => Response::new(Full::new(bytes)),
            Err(_) => Response::builder().status(404).body(Full::default()).unwrap(),
        })
    }

    async fn generate(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, HungUp> {
        let body = request.into_body().collect().await.map_err(|_| HungUp)?.to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["sampling_params"], json!({"max_new_tokens": 0}));
        self.captures.lock().unwrap().push(body["capture"].clone());
        let tokens: Vec<i64> = serde_json::from_value(body["input_ids"].clone()).unwrap();
        let attempt = {
            let mut asked = self.asked.lock().unwrap();
            let count = asked.entry(tokens.clone()).or_default();
            *count += 1;
            *count - 1
        };
        let behaviour = Arc::clone(&*self.behaviour.lock().unwrap());
        match behaviour(&tokens, attempt) {
            Answer::HangUp => Err(HungUp),
            Answer::Status(status, text, retry_after) => {
                let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
                if let Some(seconds) = retry_after {
                    response = response.header("retry-after", seconds);
                }
                let body = json!({"error": {"message": text}}).to_string();
                Ok(response.body(Full::from(body)).unwrap())
            }
            Answer::Mismatch => {
                let error = json!({"type": "mismatch", "code": 502, "message": "not the request's dump",
                    "reason": "token_hash", "expected": {}, "found": {}});
                let response = Response::builder().status(StatusCode::BAD_GATEWAY);
                Ok(response.body(Full::from(json!({"error": error}).to_string())).unwrap())
            }
            Answer::Dump(make) => {
                tokio::time::sleep(make.delay).await;
                Ok(self.publish(&make, &tokens))
            }
        }
    }

    fn publish(&self, make: &Make, tokens: &[i64]) -> Response<Full<Bytes>> {
        let id = RequestId::new();
        let mut dumped = tokens.to_vec();
        if make.spoil == Spoil::OtherTokens {
            dumped[0] += 1;
        }
        let dump_id = if make.spoil == Spoil::OtherRequest { RequestId::new() } else { id };
        let last = make.points.last() == Some(&CapturePoint::FinalNorm);
        let metadata = Metadata {
            request_id: dump_id,
            call_id: Some(id.to_string()),
            client_rid: None,
            model: make.model.into(),
            config_hash: "c".repeat(64),
            num_layers: LAYERS,
            points: make.points.clone(),
            final_state: if last { FinalState::PostNorm } else { FinalState::None },
            rows: Rows::Prompt,
            prompt_tokens: dumped.len(),
            dtype: make.dtype,
            token_hash: TokenHash::of(&dumped),
            server: "fake".into(),
            created: tether_dump::timestamp(),
        };
        let mut values = states(&dumped, make.points.len());
        if make.spoil == Spoil::TooLarge {
            *values.last_mut().unwrap() = f32::MAX;
        }
        let hidden_states: Vec<u8> = values
            .iter()
            .flat_map(|value| match make.dtype {
                Dtype::Float32 => value.to_le_bytes().to_vec(),
                Dtype::BFloat16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
                Dtype::Float16 => f16::from_f32(*value).to_le_bytes().to_vec(),
            })
            .collect();
        let dump = Dump {
            metadata: &metadata,
            token_ids: &dumped,
            hidden_states: &hidden_states,
            hidden_size: HIDDEN,
        };
        let path = publish(&self.dumps, &dump, false, &|| false).unwrap().path;
        if make.spoil == Spoil::Rot {
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.len() - 3;
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
        if make.spoil == Spoil::Nan {
            // `publish` would refuse it, so the value and the hash over it are changed afterwards.
            let mut bytes = std::fs::read(&path).unwrap();
            let data = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let hash =
                |bytes: &[u8]| format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes[data..])).into_bytes();
            let old = hash(&bytes);
            let nan = bytes.len() - make.dtype.size();
            bytes[nan..].fill(0xff);
            let new = hash(&bytes);
            let at = bytes[..data].windows(old.len()).position(|window| window == old).unwrap();
            bytes[at..at + new.len()].copy_from_slice(&new);
            std::fs::write(&path, bytes).unwrap();
        }
        let shown =
            if make.reachable { path } else { PathBuf::from("/elsewhere").join(format!("{id}.safetensors")) };
        let capture = json!({"path": shown, "num_tokens": tokens.len(), "token_hash": TokenHash::of(tokens).to_string()});
        let body =
            json!({"text": "", "meta_info": {"id": id, "prompt_tokens": tokens.len(), "capture": capture}});
        let mut response = Response::builder().header("x-request-id", id.to_string());
        if make.header {
            response = response.header("x-hidden-states-path", shown.to_str().unwrap());
        }
        response.body(Full::from(body.to_string())).unwrap()
    }
}

/// `[tokens, planes, HIDDEN]`, each value telling its token, position, plane and channel.
pub(crate) fn states(tokens: &[i64], planes: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(tokens.len() * planes * HIDDEN);
    for (position, token) in tokens.iter().enumerate() {
        for plane in 0..planes {
            for channel in 0..HIDDEN {
                values.push(
                    *token as f32 * 1.001 + position as f32 * 0.37 - plane as f32 * 7.3
                        + channel as f32 * 0.0193,
                );
            }
        }
    }
    values
}
