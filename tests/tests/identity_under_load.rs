//! The main promise: under load, with clients that leave and a server that is killed, whoever is answered has a dump, and
//! every dump is that of someone who was answered.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use rand::RngExt;
use rand::seq::SliceRandom;
use serde_json::{Value, json};
use tether_dump::{RequestId, TokenHash};
use tether_tests::{
    Checkpoint, Client, DEADLINE, Departure, HangUp, Prompts, Reply, Scrape, Server, Stack,
    assert_same_states, eventually, post_then_leave,
};

const CLIENTS: usize = 64;
const REQUESTS: usize = 2_000;
const SOLO_SAMPLE: usize = 100;

/// What one request of the load is.
#[derive(Clone, Debug)]
enum Kind {
    /// One prompt.
    Single,
    /// A list of prompts.
    Batch,
    /// A prompt given as text.
    Text,
    /// A warm-up: a generation that wants no dump.
    OptedOut,
    /// One prompt whose client leaves.
    Leaving(Duration, Departure),
    /// Prompts of which somebody aborts one by the client's name for it, after a while.
    Aborted(Duration, String),
}

impl Kind {
    /// Whether it is a list of prompts.
    fn is_list(&self, job: &Job) -> bool {
        matches!(self, Self::Batch) || matches!(self, Self::Aborted(..)) && job.prompts.len() > 1
    }
}

#[derive(Clone, Debug)]
struct Job {
    kind: Kind,
    body: Value,
    prompts: Vec<Vec<i64>>,
}

/// Draws one request of the load.
fn job(prompts: &mut Prompts, number: usize) -> Job {
    let chance = prompts.rng().random_range(0..100);
    let kind = match chance {
        0..12 => Kind::Batch,
        12..17 => Kind::Text,
        17..23 => Kind::OptedOut,
        23..33 => {
            let departures =
                [Departure::Close, Departure::HalfClose, Departure::HalfClose, Departure::MidBody];
            let departure = departures[prompts.rng().random_range(0..4)];
            let patience = Duration::from_micros(prompts.rng().random_range(0..400_000));
            Kind::Leaving(patience, departure)
        }
        33..43 => {
            let patience = Duration::from_micros(prompts.rng().random_range(0..300_000));
            Kind::Aborted(patience, format!("abort-{number}"))
        }
        _ => Kind::Single,
    };
    let new_tokens = [0, 0, 1, 1, 3][prompts.rng().random_range(0..5)];
    let mut body = json!({"sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}});
    let mut drawn = vec![prompts.mixed()];
    match &kind {
        Kind::Batch => {
            let more = prompts.rng().random_range(0..5);
            drawn.extend((0..more).map(|_| prompts.mixed()));
            body["input_ids"] = json!(drawn);
        }
        Kind::Aborted(_, name) => {
            // Half of them alone, half as a row of a batch. Long texts, so that there is something to abort.
            let rows = [1, 1, 2, 4][prompts.rng().random_range(0..4)];
            drawn.extend((1..rows).map(|_| prompts.mixed()));
            let names =
                (0..rows).map(|row| if row == rows - 1 { name.clone() } else { format!("{name}-{row}") });
            (body["input_ids"], body["rid"]) = match rows {
                1 => (json!(drawn[0]), json!(name)),
                _ => (json!(drawn), json!(names.collect::<Vec<_>>())),
            };
            body["sampling_params"]["max_new_tokens"] = json!([0, 8, 40][prompts.rng().random_range(0..3)]);
        }
        Kind::Text => {
            let text = format!("Request {number}: {}", "ä".repeat(number % 50));
            drawn = vec![text.bytes().map(|byte| i64::from(byte) + 2).collect()];
            body["text"] = json!(text);
        }
        _ => body["input_ids"] = json!(drawn[0]),
    }
    // The extremes are there whatever the dice say, and some names that clients give, one of them twice.
    match number {
        10 => (drawn, body["input_ids"]) = (vec![vec![9]], json!([9])),
        11 => {
            drawn = vec![prompts.of_length(600)];
            body["input_ids"] = json!(drawn[0]);
        }
        _ => {}
    }
    let kind = if number == 10 || number == 11 { Kind::Single } else { kind };
    if matches!(number, 10 | 11) {
        body.as_object_mut().expect("an object").remove("text");
    }
    if matches!(kind, Kind::OptedOut) {
        body["capture"] = json!(false);
    }
    if number.is_multiple_of(5) && !matches!(kind, Kind::Batch | Kind::Aborted(..)) {
        body["rid"] = json!(format!("client-{}", number / 10));
    }
    Job { kind, body, prompts: drawn }
}

/// What the clients saw.
#[derive(Default)]
struct Seen {
    /// Prompts of requests answered 200 that wanted a dump, by request ID.
    answered: Mutex<BTreeMap<RequestId, Vec<i64>>>,
    /// Requests answered 200, with or without a dump.
    calls: AtomicUsize,
    left: AtomicUsize,
    /// Prompts that ended by an abort, without a dump and with one; calls of which a part has a dump.
    aborted: [AtomicUsize; 3],
    /// Replies that were no 200.
    errors: Mutex<Vec<String>>,
}

impl Seen {
    fn record(&self, job: &Job, reply: &Reply) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let ids = reply.ids();
        assert_eq!(ids.len(), job.prompts.len());
        if matches!(job.kind, Kind::OptedOut) {
            assert_eq!(reply.header("x-hidden-states-path"), None);
            return;
        }
        let mut with_dump = 0;
        for ((answer, id), prompt) in reply.answers().iter().zip(ids).zip(&job.prompts) {
            let capture = &answer["meta_info"]["capture"];
            if answer["meta_info"]["finish_reason"]["type"] == "abort" {
                assert!(matches!(job.kind, Kind::Aborted(..)), "aborted by nobody: {answer}");
                self.aborted[usize::from(!capture.is_null())].fetch_add(1, Ordering::Relaxed);
                // Aborted before its states were written, it has none; it must not appear later either.
                if capture.is_null() {
                    continue;
                }
            }
            with_dump += 1;
            assert_eq!(capture["token_hash"], TokenHash::of(prompt).to_string());
            // It is there now, not later.
            let path = capture["path"].as_str().expect("each answer says where its dump is");
            let head = tether_dump::Head::read(path.as_ref()).expect("a whole dump under its name");
            assert_eq!((head.metadata.request_id, &head.token_ids), (id, prompt));
            let before = self.answered.lock().expect("no panic holds it").insert(id, prompt.clone());
            assert_eq!(before, None, "two requests were given the ID {id}");
        }
        if with_dump > 0 && with_dump < job.prompts.len() {
            self.aborted[2].fetch_add(1, Ordering::Relaxed);
        }
        if with_dump == 1 && !job.kind.is_list(job) {
            let path = reply.header("x-hidden-states-path").expect("the proxy says where the dump is");
            assert!(path.ends_with(&format!("{}.safetensors", reply.id())), "{path}");
        }
    }
}

/// When errors are no surprise.
#[derive(Default)]
struct Outage {
    begun: AtomicBool,
    over: AtomicBool,
}

/// One client: takes jobs until none is left. A job that the server's death ended is sent again, as a new request.
async fn work(client: Client, jobs: Arc<Mutex<Vec<Job>>>, seen: Arc<Seen>, outage: Arc<Outage>) {
    loop {
        let Some(job) = jobs.lock().expect("no panic holds it").pop() else { return };
        loop {
            // Asked before: what was sent in the outage may be answered after it.
            let sent_after = outage.over.load(Ordering::SeqCst);
            let reply = match job.kind {
                Kind::Leaving(patience, departure) => {
                    let body = job.body.to_string();
                    match post_then_leave(client.address(), "/generate", &body, patience, departure).await {
                        HangUp::Answered(reply) => reply,
                        HangUp::Left => {
                            seen.left.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                    }
                }
                Kind::Aborted(patience, ref name) => {
                    let abort = async {
                        tokio::time::sleep(patience).await;
                        client.post("/abort_request", &json!({"rid": name})).await
                    };
                    let (reply, abort) = tokio::join!(client.generate(&job.body), abort);
                    // In the outage there may be nobody to tell.
                    assert!(abort.status == 200 || abort.status.as_u16() >= 500, "{}", abort.text());
                    reply
                }
                _ => client.generate(&job.body).await,
            };
            if reply.status == 200 {
                seen.record(&job, &reply);
                break;
            }
            let error = format!("{}: {}", reply.status, reply.text());
            let expected = outage.begun.load(Ordering::SeqCst) && !sent_after;
            assert!(expected, "an error while the server was well: {error}");
            assert!(matches!(reply.status.as_u16(), 502..=504), "{error}");
            seen.errors.lock().expect("no panic holds it").push(error);
            healthy(&client).await;
        }
    }
}

async fn healthy(client: &Client) {
    eventually("the server is healthy again", || async {
        (client.get("/health").await.status == 200).then_some(())
    })
    .await;
}

/// Asks for the server's health, through the proxy and directly, as orchestrators do, until told to stop.
async fn probe(through: Client, direct: Client, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::SeqCst) {
        let _ = through.get("/health").await;
        for path in ["/health", "/get_model_info"] {
            let request =
                direct.request(Method::GET, path).body(Default::default()).expect("a plain request");
            // The server may be dead just now.
            let _ = direct.try_send(request).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_is_answered_has_a_dump_and_every_dump_is_of_someone_answered() {
    let rounds = if std::env::var_os("TETHER_CAMPAIGN").is_some() { 10 } else { 1 };
    for seed in 0..rounds {
        load(0x1d + seed).await;
    }
}

/// One load, drawn from `seed`, and everything that must hold afterwards.
async fn load(seed: u64) {
    let checkpoint = Checkpoint::float32();
    let stack = Stack::start(Server::of(&checkpoint)).await;
    let mut prompts = Prompts::new(seed);
    let jobs: Vec<_> = (0..REQUESTS).map(|number| job(&mut prompts, number)).collect();
    let wanted = jobs.iter().filter(|job| !matches!(job.kind, Kind::Leaving(..))).count();
    let jobs = Arc::new(Mutex::new(jobs));
    let (seen, outage, stop) =
        (Arc::new(Seen::default()), Arc::new(Outage::default()), Arc::new(AtomicBool::new(false)));

    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| tokio::spawn(work(stack.client(), jobs.clone(), seen.clone(), outage.clone())))
        .collect();
    let prober = tokio::spawn(probe(stack.client(), stack.direct(), stop.clone()));

    // The server dies in the middle, with requests in every stage, and comes back.
    let remaining = || jobs.lock().expect("no panic holds it").len();
    let started = std::time::Instant::now();
    while remaining() > REQUESTS / 2 {
        assert!(!clients.iter().any(tokio::task::JoinHandle::is_finished), "a client has ended early");
        assert!(
            started.elapsed() < 5 * DEADLINE,
            "half of the requests are not done after {:?}",
            started.elapsed()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    outage.begun.store(true, Ordering::SeqCst);
    stack.server.kill();
    stack.server.start_again().await;
    healthy(&stack.client()).await;
    outage.over.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.expect("a client saw something wrong");
    }
    let last_reply = tokio::time::Instant::now();
    stop.store(true, Ordering::SeqCst);
    prober.await.expect("probes do not fail");
    let answered = std::mem::take(&mut *seen.answered.lock().expect("no panic holds it"));
    let (calls, left) = (seen.calls.load(Ordering::Relaxed), seen.left.load(Ordering::Relaxed));
    let errors = seen.errors.lock().expect("no panic holds it").len();
    let [aborted, late, parts] = seen.aborted.each_ref().map(|count| count.load(Ordering::Relaxed));
    eprintln!(
        "{calls} calls answered with {} dumps, {left} left, {errors} cut by the server's death; aborted: {aborted} \
         prompts without a dump, {late} with one, {parts} lists in part",
        answered.len()
    );
    assert!(aborted > 0 && parts > 0, "no abort met a prompt before its dump, or none of a list");
    assert!(calls >= wanted && left > 50, "{calls} of {wanted} answered, {left} left");
    assert!(errors > 0, "the server's death was noticed by nobody: it came too late");

    // 10 seconds after the last reply the directory holds the dumps of those who were answered, and nothing else.
    tokio::time::sleep_until(last_reply + Duration::from_secs(10)).await;
    let dumps = stack.dumps();
    let (there, expected) = (dumps.ids(), answered.keys().copied().collect());
    let orphans: Vec<_> = there.difference(&expected).collect();
    let lost: Vec<_> = expected.difference(&there).collect();
    assert!(orphans.is_empty() && lost.is_empty(), "orphans {orphans:?}, lost {lost:?}");
    assert_eq!(dumps.strangers(), Vec::<String>::new());
    for (id, prompt) in &answered {
        assert_eq!(&dumps.read(*id).token_ids, prompt);
    }

    // The books balance.
    let scrape = Scrape::of(&stack.client()).await;
    let sum = |name: &str| scrape.sum(&format!("tether_proxy_{name}"), &[]);
    assert_eq!(sum("mismatches_total"), 0.0);
    assert_eq!(
        sum("requests_received_total"),
        sum("requests_answered_total") + sum("requests_aborted_total") + sum("requests_in_flight")
    );
    // The scrape itself may be counted.
    assert!(sum("requests_in_flight") <= 1.0, "{} are still in flight", sum("requests_in_flight"));
    assert!(sum("requests_aborted_total") > 0.0);
    let server = Scrape::of(&stack.direct()).await;
    for gauge in ["requests_in_flight", "queue_depth", "running", "write_queue_bytes", "dump_reserved_bytes"]
    {
        assert_eq!(server.sum(&format!("tether_server_{gauge}"), &[]), 0.0, "{gauge}");
    }
    assert_eq!(server.sum("tether_server_token_mismatches_total", &[]), 0.0);

    // The states are those that each prompt has alone, on a server that never saw a crowd.
    let mut sample: Vec<_> = answered.keys().copied().collect();
    sample.shuffle(prompts.rng());
    let fresh = Server::of(&checkpoint).start().await;
    let client = fresh.client();
    for id in &sample[..SOLO_SAMPLE] {
        let rid = RequestId::new();
        let body = json!({"rid": rid, "input_ids": answered[id], "sampling_params": {"max_new_tokens": 0, "temperature": 0}});
        client.generate(&body).await.expect(200);
        assert_same_states(&dumps.read(*id), &fresh.dumps().read(rid));
    }
}
