use std::path::Path;

use super::testing::{EOS, FAILS, Gate, HIDDEN, MISREAD, NAN, NO_LOGITS, PANICS, value};
use super::*;
use crate::budget::Budget;
use crate::identity::Identity;
use crate::plan::{CaptureMode, Originals};
use crate::request::GenerateRequest;
use crate::testing::{Fixture, eventually, files, planner};
use tether_dump::{DumpFile, FinalState, RequestId, TokenHash, dump_path};

/// Where an answer comes.
struct Answer(Pending);

impl Answer {
    /// Waits for it, as a client would.
    fn blocking_recv(mut self) -> Result<Result<Done, ApiError>, std::convert::Infallible> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        Ok(runtime.block_on(self.0.finished()))
    }
}

/// Jobs for an engine that dumps into `dir`.
struct Jobs {
    dir: tempfile::TempDir,
    budget: Arc<Budget>,
    metrics: Metrics,
}

impl Jobs {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::unregistered();
        let budget = Budget::new(dir.path(), 1 << 30, None, &metrics).unwrap();
        Self { dir, budget, metrics }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A job from a request body without rid, its ID if it is captured, its ticket, and where its answer comes.
    fn job(&self, body: &str) -> (Job, RequestId, Arc<Ticket>, Answer) {
        let request = GenerateRequest::parse(body.as_bytes(), 100).unwrap();
        let plan = planner(CaptureMode::All).plan(request, None, &Originals::default()).unwrap().remove(0);
        let (pending, reply, capture_reply) = Pending::new(plan.capture.is_some(), false);
        let ticket = Ticket::new();
        let Identity { id, .. } = plan.identity;
        let capture = plan.capture.zip(capture_reply).map(|(capture, reply)| JobCapture {
            spec: capture.spec,
            metadata: capture.metadata,
            reservation: self.budget.try_reserve(capture.max_bytes).expect("there is room"),
            bytes: capture.max_bytes,
            reply,
        });
        let job = Job {
            ticket: Arc::clone(&ticket),
            token_ids: plan.token_ids,
            prompt_tokens: plan.prompt_tokens,
            max_new_tokens: plan.max_new_tokens,
            flexible: plan.flexible,
            stop_ids: plan.stop_ids,
            ends: plan.ends,
            stop_text: None,
            sampling: plan.sampling,
            sample: 0,
            logprobs: None,
            events: None,
            capture,
            reply,
            names: Vec::new(),
            queued: Instant::now(),
        };
        (job, id, ticket, Answer(pending))
    }

    fn run(&self, engine: &Engine, body: &str) -> (Result<Done, ApiError>, RequestId) {
        let (job, id, _, answer) = self.job(body);
        engine.submit(vec![job]).unwrap();
        (answer.blocking_recv().expect("every job is answered"), id)
    }
}

fn body(ids: &[i64], new_tokens: usize, rest: &str) -> String {
    format!(
        r#"{{"input_ids":{ids:?},"sampling_params":{{"max_new_tokens":{new_tokens},"temperature":0}}{rest}}}"#
    )
}

/// Checks that the dump of `id` holds `tokens`, row by row and plane by plane.
fn assert_dump(dir: &Path, id: RequestId, prompt: &[i64], tokens: &[i64], planes: usize) {
    let dump = DumpFile::open(&dump_path(dir, id)).unwrap();
    dump.verify().unwrap();
    let head = dump.head();
    assert_eq!(head.metadata.request_id, id);
    assert_eq!(head.token_ids, tokens);
    assert_eq!(head.metadata.token_hash, TokenHash::of(prompt));
    assert_eq!(head.metadata.prompt_tokens, prompt.len());
    let expected: Vec<u8> = tokens
        .iter()
        .enumerate()
        .flat_map(|(row, &token)| (0..planes * HIDDEN).map(move |at| value(token, row, at / HIDDEN)))
        .flat_map(f32::to_le_bytes)
        .collect();
    assert!(dump.hidden_states() == expected, "every value is that of its token, row and plane");
}

#[test]
fn a_prompt_only_job_has_a_dump_and_no_tokens() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (done, id) = jobs.run(&engine, &body(&[1, 2, 3], 0, ""));
    let done = done.unwrap();
    assert_eq!((done.output_ids, done.finish), (vec![], Finish::Length));
    let capture = done.capture.unwrap();
    assert_eq!(capture.path, dump_path(jobs.path(), id));
    assert_eq!((capture.num_tokens, capture.final_state), (3, FinalState::PreNorm));
    assert_eq!(capture.points.iter().map(ToString::to_string).collect::<Vec<_>>(), ["R2", "R4", "R5", "R8"]);
    assert_dump(jobs.path(), id, &[1, 2, 3], &[1, 2, 3], 4);
}

#[test]
fn generated_tokens_follow_each_other_and_the_dump_covers_what_was_asked() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (done, id) = jobs.run(&engine, &body(&[1, 2, 3], 4, ""));
    assert_eq!(done.unwrap().output_ids, [4, 5, 6, 7]);
    assert_dump(jobs.path(), id, &[1, 2, 3], &[1, 2, 3], 4);

    let (done, id) = jobs.run(&engine, &body(&[1, 2, 3], 4, r#","capture":{"rows":"all"}"#));
    assert_eq!(done.unwrap().capture.unwrap().num_tokens, 6);
    assert_dump(jobs.path(), id, &[1, 2, 3], &[1, 2, 3, 4, 5, 6], 4);

    let (done, id) =
        jobs.run(&engine, &body(&[48], 9, r#","capture":{"rows":"all","points":[1],"final":"none"}"#));
    let done = done.unwrap();
    assert_eq!((done.output_ids, done.finish), (vec![49, 50, EOS], Finish::Stop(EOS)));
    assert_dump(jobs.path(), id, &[48], &[48, 49, 50], 1);
}

#[test]
fn a_capture_changes_no_token() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (with, id) = jobs.run(&engine, &body(&[7, 3], 5, ""));
    let (without, other) = jobs.run(&engine, &body(&[7, 3], 5, r#","capture":false"#));
    let without = without.unwrap();
    assert_eq!(with.unwrap().output_ids, without.output_ids);
    assert_eq!(without.capture, None);
    assert_eq!(files(jobs.path()), [format!("{id}.safetensors")], "and {other} has none");
}

#[test]
fn what_waits_is_packed_into_one_step_within_the_token_budget() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    gate.close();
    let (first, _, _, first_answer) = jobs.job(&body(&[1], 0, ""));
    engine.submit(vec![first]).unwrap();
    eventually("the first step has begun", || gate.arrived() == 1);
    // 15 + 15 fit into 40, the third does not, and a fourth of 50 runs alone.
    let prompts = [&[2; 15][..], &[3; 15], &[4; 15], &[5; 50]];
    let answers: Vec<_> = prompts
        .map(|ids| {
            let (job, id, _, answer) = jobs.job(&body(ids, 0, ""));
            engine.submit(vec![job]).unwrap();
            (ids, id, answer)
        })
        .into_iter()
        .collect();
    assert_eq!(jobs.metrics.queue_depth.get(), 4);
    gate.open();
    first_answer.blocking_recv().unwrap().unwrap();
    for (ids, id, answer) in answers {
        answer.blocking_recv().unwrap().unwrap();
        assert_dump(jobs.path(), id, ids, ids, 4);
    }
    assert_eq!(*fixture.model.steps.lock().unwrap(), [vec![1], vec![15, 15], vec![15], vec![50]]);
}

#[test]
fn continued_texts_and_new_prompts_share_steps_and_neither_waits_for_the_other() {
    let (jobs, fixture) = (Jobs::new(), Fixture { max_batch_tokens: 10, ..Fixture::default() });
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    gate.close();
    let (long, _, _, long_answer) = jobs.job(&body(&[1; 8], 6, ""));
    engine.submit(vec![long]).unwrap();
    eventually("the first step has begun", || gate.arrived() == 1);
    let short: Vec<Answer> = (0..3)
        .map(|_| {
            let (job, _, _, answer) = jobs.job(&body(&[2; 9], 0, ""));
            engine.submit(vec![job]).unwrap();
            answer
        })
        .collect();
    gate.open();
    assert_eq!(long_answer.blocking_recv().unwrap().unwrap().output_ids, [2, 3, 4, 5, 6, 7]);
    short.into_iter().for_each(|answer| drop(answer.blocking_recv().unwrap().unwrap()));
    let steps = fixture.model.steps.lock().unwrap().clone();
    assert_eq!(steps, [vec![8], vec![1, 9], vec![1, 9], vec![1, 9], vec![1], vec![1]]);
    assert_eq!(jobs.metrics.kv_reserved_bytes.get(), 0);
}

#[test]
fn a_prompt_beyond_the_budget_runs_in_parts_where_others_are_continued_and_its_dump_is_whole() {
    let (jobs, fixture) = (Jobs::new(), Fixture { max_batch_tokens: 10, ..Fixture::default() });
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    gate.close();
    let (first, _, _, first_answer) = jobs.job(&body(&[1; 3], 6, ""));
    engine.submit(vec![first]).unwrap();
    eventually("the first step has begun", || gate.arrived() == 1);
    let prompt: Vec<i64> = (10..35).collect();
    let (long, id, _, long_answer) = jobs.job(&body(&prompt, 3, r#","capture":{"rows":"all"}"#));
    let (behind, _, _, behind_answer) = jobs.job(&body(&[5; 7], 0, ""));
    engine.submit(vec![long, behind]).unwrap();
    gate.open();
    assert_eq!(first_answer.blocking_recv().unwrap().unwrap().output_ids.len(), 6);
    assert_eq!(long_answer.blocking_recv().unwrap().unwrap().output_ids, [35, 36, 37]);
    behind_answer.blocking_recv().unwrap().unwrap();
    let tokens: Vec<i64> = (10..37).collect();
    assert_dump(jobs.path(), id, &prompt, &tokens, 4);
    let steps = fixture.model.steps.lock().unwrap().clone();
    // The one behind has to wait for a step with room for all of it: it is run once, without a cache.
    assert_eq!(steps[..4], [vec![3], vec![1, 10], vec![1, 10], vec![1, 5]]);
    assert!(steps[4..].iter().any(|step| step.contains(&7)), "{steps:?}");
}

#[test]
fn texts_start_only_while_their_caches_fit_and_one_that_never_will_is_refused() {
    let kv_budget = 20 * testing::KV_BYTES;
    let (jobs, fixture) = (Jobs::new(), Fixture { kv_budget, ..Fixture::default() });
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (error, _) = jobs.run(&engine, &body(&[1; 10], 12, ""));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("168 bytes") && error.contains("--kv-budget is 160"), "{error}");
    // One that asks for as many tokens as there is room for gets them: 20 in the cache, and one more.
    let all = r#"{"input_ids":[7,7,7,7,7,7,7,7,7,7],"sampling_params":{"max_new_tokens":null,"temperature":0,"ignore_eos":true}}"#;
    assert_eq!(jobs.run(&engine, all).0.unwrap().output_ids.len(), 11);
    // As many tokens without being continued need no cache.
    jobs.run(&engine, &body(&[1; 30], 1, "")).0.unwrap();
    gate.close();
    let before = gate.arrived();
    let answers: Vec<Answer> = [[1; 8], [2; 8]]
        .map(|ids| {
            let (job, _, _, answer) = jobs.job(&body(&ids, 5, ""));
            engine.submit(vec![job]).unwrap();
            answer
        })
        .into();
    gate.open();
    answers.into_iter().for_each(|answer| drop(answer.blocking_recv().unwrap().unwrap()));
    let steps = fixture.model.steps.lock().unwrap()[before..].to_vec();
    assert!(steps.iter().all(|step| step.len() == 1), "12 and 12 tokens do not fit into 20: {steps:?}");
}

#[test]
fn tokens_come_as_they_are_made_with_the_log_probabilities_that_were_asked_for() {
    let (jobs, fixture) = (Jobs::new(), Fixture { max_batch_tokens: 4, ..Fixture::default() });
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (mut job, _, _, answer) = jobs.job(&body(&[3, 4, 5], 4, r#","capture":false"#));
    let (events, mut received) = mpsc::unbounded_channel();
    job.events = Some(events);
    job.logprobs = Some(Logprobs { prompt_from: Some(0), top: 2, token_ids: vec![9] });
    engine.submit(vec![job]).unwrap();
    let done = answer.blocking_recv().unwrap().unwrap();
    let logprobs = done.logprobs.unwrap();
    let events: Vec<TokenEvent> = std::iter::from_fn(|| received.blocking_recv()).collect();
    assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [6, 7, 8, 9]);
    assert_eq!(done.output_ids, [6, 7, 8, 9]);
    // Token 4 behind row 0, token 5 behind row 1.
    let prompt: Vec<f32> = logprobs.prompt.iter().map(|token| token.logprob).collect();
    assert_eq!(prompt, [-0.04, -1.05]);
    let own = |event: &TokenEvent| event.logprob.clone().unwrap();
    assert_eq!(logprobs.output, events.iter().map(own).collect::<Vec<_>>());
    for (logprob, token) in logprobs.output.iter().zip(6..) {
        assert!(logprob.logprob.abs() < 1e-5, "it is certain");
        assert_eq!(logprob.top[0].0, token);
        assert_eq!(logprob.token_ids.len(), 1);
    }
}

#[test]
fn a_string_ends_the_text_with_the_token_that_completes_it() {
    struct After(usize);
    impl StopText for After {
        fn push(&mut self, token: i64) -> Option<String> {
            self.0 -= 1;
            (self.0 == 0).then(|| format!("<{token}>"))
        }
    }
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (mut job, id, _, answer) = jobs.job(&body(&[1, 2], 20, r#","capture":{"rows":"all"}"#));
    job.stop_text = Some(Box::new(After(3)));
    engine.submit(vec![job]).unwrap();
    let done = answer.blocking_recv().unwrap().unwrap();
    assert_eq!((done.output_ids, done.finish), (vec![3, 4, 5], Finish::StopText("<5>".to_owned())));
    assert_dump(jobs.path(), id, &[1, 2], &[1, 2, 3, 4], 4);
}

#[test]
fn a_failed_step_fails_its_own_requests_and_no_other() {
    for bad in [FAILS, PANICS] {
        let (jobs, fixture) = (Jobs::new(), Fixture::default());
        let engine = fixture.engine(jobs.path(), &jobs.metrics);
        let (error, _) = jobs.run(&engine, &body(&[1, bad], 1, ""));
        let error = error.unwrap_err();
        assert!(matches!(&error, ApiError::StepFailed(text) if text.contains("as asked")), "{error:?}");
        let (done, id) = jobs.run(&engine, &body(&[1, 2], 1, ""));
        assert_eq!(done.unwrap().output_ids, [3]);
        assert_eq!(files(jobs.path()), [format!("{id}.safetensors")]);
        assert_eq!(jobs.metrics.steps.with_label_values(&["failed"]).get(), 1);
    }
}

#[test]
fn states_that_are_no_numbers_fail_their_request_and_no_other_of_the_step() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (bad, _, _, bad_answer) = jobs.job(&body(&[1, NAN], 0, ""));
    let (good, id, _, good_answer) = jobs.job(&body(&[1, 2], 0, ""));
    engine.submit(vec![bad, good]).unwrap();
    let error = bad_answer.blocking_recv().unwrap().unwrap_err();
    assert!(matches!(&error, ApiError::NotFinite(text) if text.contains("token 1, R2")), "{error:?}");
    good_answer.blocking_recv().unwrap().unwrap();
    assert_eq!(files(jobs.path()), [format!("{id}.safetensors")]);
    assert_eq!(jobs.metrics.dumps.with_label_values(&["not_finite"]).get(), 1);
    let (error, _) = jobs.run(&engine, &body(&[NO_LOGITS], 1, ""));
    assert!(matches!(error.unwrap_err(), ApiError::NotFinite(_)));
}

#[test]
fn states_of_other_tokens_than_the_requests_are_never_published() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (error, _) = jobs.run(&engine, &body(&[1, MISREAD], 0, ""));
    assert!(matches!(error.unwrap_err(), ApiError::StepFailed(_)));
    assert!(files(jobs.path()).is_empty());
    assert_eq!(jobs.metrics.token_mismatches.get(), 1);
}

/// Closes the gate and fills the engine with one job that waits at it.
fn hold(jobs: &Jobs, engine: &Engine, gate: &Gate, body: &str) -> (RequestId, Arc<Ticket>, Answer) {
    gate.close();
    let before = gate.arrived();
    let (job, id, ticket, answer) = jobs.job(body);
    engine.submit(vec![job]).unwrap();
    eventually("the step has begun", || gate.arrived() == before + 1);
    (id, ticket, answer)
}

#[test]
fn a_withdrawn_job_leaves_nothing_wherever_it_was() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    // One is in its step, one waits; then both clients go.
    let (_, in_step, in_step_answer) = hold(&jobs, &engine, &gate, &body(&[1], 0, ""));
    let (waiting, _, ticket, waiting_answer) = jobs.job(&body(&[2], 0, ""));
    engine.submit(vec![waiting]).unwrap();
    for (ticket, answer) in [(in_step, in_step_answer), (ticket, waiting_answer)] {
        ticket.withdraw(Withdrawn::Gone);
        drop(answer);
    }
    gate.open();
    let (done, id) = jobs.run(&engine, &body(&[3], 0, ""));
    done.unwrap();
    drop(engine);
    assert_eq!(files(jobs.path()), [format!("{id}.safetensors")]);
    assert_eq!(fixture.model.steps.lock().unwrap().len(), 2, "the one that waited was never run");
    assert_eq!(jobs.metrics.dump_reserved_bytes.get(), 0);
}

#[test]
fn an_aborted_job_is_answered_with_what_it_had_and_has_no_dump() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (_, ticket, answer) = hold(&jobs, &engine, &gate, &body(&[1], 20, ""));
    ticket.withdraw(Withdrawn::Aborted);
    gate.open();
    let done = answer.blocking_recv().unwrap().unwrap();
    assert_eq!((done.finish, done.output_ids, done.capture), (Finish::Aborted, vec![2], None));
    let (running, reserved) = (jobs.metrics.running.clone(), jobs.metrics.kv_reserved_bytes.clone());
    eventually("the series say so", || running.get() == 0 && reserved.get() == 0);
    let (_, ticket, answer) = hold(&jobs, &engine, &gate, &body(&[1], 0, ""));
    ticket.withdraw(Withdrawn::Aborted);
    gate.open();
    assert_eq!(answer.blocking_recv().unwrap().unwrap().finish, Finish::Aborted);
    drop(engine);
    assert!(files(jobs.path()).is_empty());
}

#[test]
fn the_dump_of_a_prompt_is_there_while_its_text_goes_on_and_stays_if_that_is_aborted() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (job, id, ticket, mut answer) = jobs.job(&body(&[1, 2], 20, ""));
    let (events, mut received) = mpsc::unbounded_channel();
    let job = Job { events: Some(events), ..job };
    gate.close_after(2);
    engine.submit(vec![job]).unwrap();
    received.blocking_recv().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let capture = runtime.block_on(answer.0.captured()).unwrap().cloned().unwrap();
    assert_dump(jobs.path(), id, &[1, 2], &[1, 2], 4);
    eventually("the text goes on", || gate.arrived() == 3);
    ticket.withdraw(Withdrawn::Aborted);
    gate.open();
    let done = answer.blocking_recv().unwrap().unwrap();
    assert_eq!((done.finish, done.capture), (Finish::Aborted, Some(capture)));
    assert_eq!(done.output_ids, [3, 4, 5]);
    drop(engine);
    assert_eq!(files(jobs.path()).len(), 1);
}

#[test]
fn jobs_that_need_no_memory_pass_one_that_waits_for_it_and_no_other_does() {
    let kv_budget = 20 * testing::KV_BYTES;
    let (jobs, fixture) = (Jobs::new(), Fixture { kv_budget, ..Fixture::default() });
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (_, _, running) = hold(&jobs, &engine, &gate, &body(&[1; 8], 8, ""));
    // The second has to wait for the first's cache. The third would fit beside the first, but came later.
    let order = [(&[2; 8][..], 5), (&[3; 2], 2), (&[4; 3], 0), (&[5; 4], 1)];
    let answers = order.map(|(ids, new)| {
        let (job, _, _, answer) = jobs.job(&body(ids, new, ""));
        engine.submit(vec![job]).unwrap();
        answer
    });
    gate.open();
    running.blocking_recv().unwrap().unwrap();
    answers.into_iter().for_each(|answer| drop(answer.blocking_recv().unwrap().unwrap()));
    let steps = fixture.model.steps.lock().unwrap().clone();
    assert_eq!(steps[..2], [vec![8], vec![1, 3, 4]]);
    let (second, third) = (8, 2);
    let begins = |tokens| steps.iter().skip(1).position(|step| step.contains(&tokens)).unwrap();
    assert!(begins(second) <= begins(third), "{steps:?}");
    assert!(steps[1..8].iter().all(|step| !step.contains(&second)), "{steps:?}");
}

#[test]
fn states_that_jobs_hold_from_step_to_step_stay_within_their_budget() {
    let (jobs, fixture) = (Jobs::new(), Fixture { buffer_bytes: 20_000, ..Fixture::default() });
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let gate = Arc::clone(&fixture.model.gate);
    // Each reserves some 5 kB of which its rows are a part; all come at once, and one that needs more than the budget.
    let (_, _, first) = hold(&jobs, &engine, &gate, &body(&[1], 0, ""));
    let all = r#","capture":{"rows":"all"}"#;
    let answers: Vec<(RequestId, Vec<i64>, Answer)> = (2..12)
        .map(|token| {
            let ids = vec![token; 30];
            let (job, id, _, answer) = jobs.job(&body(&ids, 6, all));
            assert!(job.capture.as_ref().unwrap().bytes > 2000);
            engine.submit(vec![job]).unwrap();
            (id, ids, answer)
        })
        .collect();
    let bytes = |rows: u64| rows * 4 * HIDDEN as u64 * 4;
    gate.open();
    first.blocking_recv().unwrap().unwrap();
    for (id, ids, answer) in answers {
        let done = answer.blocking_recv().unwrap().unwrap();
        let tokens: Vec<i64> = ids.iter().chain(&done.output_ids[..5]).copied().collect();
        assert_dump(jobs.path(), id, &ids, &tokens, 4);
    }
    let most = fixture.model.steps.lock().unwrap().iter().map(Vec::len).max().unwrap();
    assert!((2..10).contains(&most), "{most} at once would hold {} bytes", bytes(35 * most as u64));
}

#[test]
fn a_full_queue_refuses_and_withdrawn_jobs_make_room() {
    let (jobs, fixture) = (Jobs::new(), Fixture { max_queued: 2, ..Fixture::default() });
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (_, _, held) = hold(&jobs, &engine, &gate, &body(&[1], 0, ""));
    let (a, _, ticket, _answer) = jobs.job(&body(&[2], 0, ""));
    let (b, ..) = jobs.job(&body(&[3], 0, ""));
    let (c, ..) = jobs.job(&body(&[4], 0, ""));
    engine.submit(vec![a, b]).unwrap();
    assert_eq!(engine.submit(vec![c]), Err(ApiError::QueueFull));
    ticket.withdraw(Withdrawn::Gone);
    let (d, _, _, answer) = jobs.job(&body(&[5], 0, ""));
    engine.submit(vec![d]).unwrap();
    gate.open();
    held.blocking_recv().unwrap().unwrap();
    answer.blocking_recv().unwrap().unwrap();
}

#[test]
fn closing_answers_what_waits_and_ends_the_thread_after_its_step() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let gate = Arc::clone(&fixture.model.gate);
    let engine = fixture.engine(jobs.path(), &jobs.metrics);
    let (id, _, in_step) = hold(&jobs, &engine, &gate, &body(&[1], 0, ""));
    let (waiting, _, _, waiting_answer) = jobs.job(&body(&[2], 0, ""));
    engine.submit(vec![waiting]).unwrap();
    engine.close();
    assert_eq!(waiting_answer.blocking_recv().unwrap(), Err(ApiError::EngineStopped));
    let (late, ..) = jobs.job(&body(&[3], 0, ""));
    assert_eq!(engine.submit(vec![late]), Err(ApiError::EngineStopped));
    gate.open();
    drop(engine);
    in_step.blocking_recv().unwrap().unwrap();
    assert_eq!(files(jobs.path()), [format!("{id}.safetensors")], "a result that was there is kept");
}

#[test]
fn a_model_that_does_not_load_ends_the_thread_with_its_reason() {
    let (jobs, fixture) = (Jobs::new(), Fixture::default());
    let (told, reason) = std::sync::mpsc::channel();
    let options =
        EngineOptions { max_batch_tokens: 1, max_queued: 1, max_running: 1, kv_budget: 1, states_budget: 1 };
    let sink = fixture.sink(jobs.path(), &jobs.metrics);
    let load = || Err::<testing::FakeModel, _>("no weights");
    let engine = Engine::start(options, sink, jobs.metrics.clone(), load, move |result| {
        told.send(result.map(drop)).unwrap();
    });
    assert_eq!(reason.recv().unwrap(), Err("no weights"));
    eventually("the queue is closed", || {
        let (job, ..) = jobs.job(&body(&[1], 0, ""));
        engine.submit(vec![job]) == Err(ApiError::EngineStopped)
    });
}
