use tether_dump::RequestId;
use tether_model::CaptureSpec;
use tokio::sync::oneshot::{self, Receiver};

use super::*;
use crate::budget::Budget;
use crate::engine::Withdrawn;
use crate::engine::testing::{HIDDEN, LAYERS};
use crate::testing::{Fixture, files};

const ROWS: usize = 3;

struct Setup {
    dir: tempfile::TempDir,
    budget: Arc<Budget>,
    metrics: Metrics,
}

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::unregistered();
        let budget = Budget::new(dir.path(), 1 << 20, None, &metrics).unwrap();
        Self { dir, budget, metrics }
    }

    fn write(&self, id: RequestId) -> (Write, Arc<Ticket>, Receiver<Result<Written, ApiError>>) {
        let spec = Arc::new(CaptureSpec::new(&[1], FinalState::None, LAYERS).unwrap());
        let metadata = Metadata {
            request_id: id,
            call_id: None,
            client_rid: None,
            model: "m".to_owned(),
            config_hash: String::new(),
            num_layers: 8,
            points: spec.planes().to_vec(),
            final_state: FinalState::None,
            rows: Rows::Prompt,
            prompt_tokens: ROWS,
            dtype: Dtype::Float32,
            token_hash: TokenHash::of(&[]),
            server: String::new(),
            created: String::new(),
        };
        let reservation = self.budget.try_reserve(1000).expect("there is room");
        let ticket = Ticket::new();
        assert!(ticket.start());
        let (reply, answer) = oneshot::channel();
        let write = Write {
            capture: JobCapture { spec, metadata, reservation, bytes: 1000, reply },
            token_ids: vec![5; ROWS],
            states: vec![States::new(vec![0u8; ROWS * HIDDEN * 4])],
            ticket: Arc::clone(&ticket),
            names: Vec::new(),
        };
        (write, ticket, answer)
    }

    fn outcome(&self, outcome: DumpOutcome) -> u64 {
        self.metrics.dumps.with_label_values(&[outcome.as_str()]).get()
    }
}

#[test]
fn the_dump_is_there_under_its_name_when_the_answer_is() {
    let setup = Setup::new();
    let sink = Fixture::default().sink(setup.dir.path(), &setup.metrics);
    for _ in 0..200 {
        let id = RequestId::new();
        let (write, _, answer) = setup.write(id);
        sink.submit(write);
        let capture = answer.blocking_recv().unwrap().unwrap().capture;
        let dump = tether_dump::DumpFile::open(&capture.path).unwrap();
        dump.verify().unwrap();
        assert_eq!(dump.head().metadata.request_id, id);
        assert_eq!(dump.head().metadata.token_hash, capture.token_hash);
        assert_eq!(capture.token_hash, TokenHash::of(&[5; ROWS]));
    }
    drop(sink);
    assert_eq!(setup.outcome(DumpOutcome::Published), 200);
    assert_eq!(setup.metrics.dump_reserved_bytes.get(), 0);
    assert_eq!(setup.metrics.write_queue_bytes.get(), 0);
}

#[test]
fn a_disk_that_refuses_fails_the_request_and_leaves_nothing_and_the_next_one_works() {
    let setup = Setup::new();
    let dumps = setup.dir.path().join("dumps");
    let sink = Fixture::default().sink(&dumps, &setup.metrics);
    let (write, _, answer) = setup.write(RequestId::new());
    sink.submit(write);
    let error = answer.blocking_recv().unwrap().unwrap_err();
    assert!(matches!(&error, ApiError::WriteFailed(text) if text.contains("dumps")), "{error}");
    std::fs::create_dir(&dumps).unwrap();
    let (write, _, answer) = setup.write(RequestId::new());
    sink.submit(write);
    answer.blocking_recv().unwrap().unwrap();
    drop(sink);
    assert_eq!(files(&dumps).len(), 1);
    assert_eq!(setup.outcome(DumpOutcome::Failed), 1);
    assert_eq!(setup.metrics.dump_reserved_bytes.get(), 0);
}

#[test]
fn a_dump_that_is_there_is_never_written_over() {
    let setup = Setup::new();
    let sink = Fixture::default().sink(setup.dir.path(), &setup.metrics);
    let id = RequestId::new();
    let (write, _, answer) = setup.write(id);
    sink.submit(write);
    answer.blocking_recv().unwrap().unwrap();
    let (write, _, answer) = setup.write(id);
    sink.submit(write);
    assert_eq!(answer.blocking_recv().unwrap().map(drop), Err(ApiError::AlreadyPublished { id }));
    assert_eq!(files(setup.dir.path()).len(), 1);
}

#[test]
fn a_client_that_is_gone_leaves_no_dump() {
    let setup = Setup::new();
    let sink = Fixture::default().sink(setup.dir.path(), &setup.metrics);
    for round in 0..100 {
        let (write, ticket, answer) = setup.write(RequestId::new());
        // Before, or at some moment while, it is written.
        if round % 2 == 0 {
            sink.submit(write);
        } else {
            ticket.withdraw(Withdrawn::Gone);
            sink.submit(write);
        }
        let mut answer = answer;
        answer.close();
        // What the handler's guard does with an answer that came just before.
        if let Ok(Ok(Written { capture, .. })) = answer.try_recv() {
            remove(&capture.path);
        }
    }
    drop(sink);
    assert!(files(setup.dir.path()).is_empty());
    assert_eq!(setup.metrics.dump_reserved_bytes.get(), 0);
}

#[test]
fn a_write_larger_than_the_buffer_goes_through_and_the_buffer_holds_no_more_than_one() {
    let setup = Setup::new();
    let fixture = Fixture { buffer_bytes: 1, ..Fixture::default() };
    let sink = fixture.sink(setup.dir.path(), &setup.metrics);
    let one = i64::try_from(ROWS * HIDDEN * 4).unwrap();
    let answers: Vec<_> = (0..50)
        .map(|_| {
            let (write, _, answer) = setup.write(RequestId::new());
            sink.submit(write);
            assert!(setup.metrics.write_queue_bytes.get() <= one, "the engine waits instead");
            answer
        })
        .collect();
    for answer in answers {
        answer.blocking_recv().unwrap().unwrap();
    }
    assert!(setup.metrics.write_stall_seconds.get() > 0.0);
}

#[test]
fn rows_of_several_passes_are_joined_in_order() {
    let setup = Setup::new();
    let sink = Fixture::default().sink(setup.dir.path(), &setup.metrics);
    let (mut write, _, answer) = setup.write(RequestId::new());
    let row = |value: f32| vec![value; HIDDEN].into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    write.states = vec![States::new([row(0.0), row(1.0)].concat()), States::new(row(2.0))];
    sink.submit(write);
    let capture = answer.blocking_recv().unwrap().unwrap().capture;
    let dump = tether_dump::DumpFile::open(&capture.path).unwrap();
    assert_eq!(dump.hidden_states(), [row(0.0), row(1.0), row(2.0)].concat());
}

#[test]
fn passes_that_do_not_add_up_to_the_tokens_are_refused() {
    let setup = Setup::new();
    let sink = Fixture::default().sink(setup.dir.path(), &setup.metrics);
    let (mut write, _, answer) = setup.write(RequestId::new());
    write.token_ids.push(6);
    sink.submit(write);
    assert!(matches!(answer.blocking_recv().unwrap(), Err(ApiError::WriteFailed(_))));
    assert!(files(setup.dir.path()).is_empty());
}
