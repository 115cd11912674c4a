//! A model for tests: its states tell which sequence, row and plane they belong to, and it can be told to misbehave.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use tether_model::Scores;

use super::{States, StepError, StepModel, StepOutput, StepSequence};

/// A token that makes the step of any sequence that holds it fail.
pub(crate) const FAILS: i64 = 90;
/// A token that makes it panic.
pub(crate) const PANICS: i64 = 91;
/// A token whose hidden state is NaN.
pub(crate) const NAN: i64 = 92;
/// A token after which the logits are no numbers.
pub(crate) const NO_LOGITS: i64 = 93;
/// A token that the embedding takes for another one.
pub(crate) const MISREAD: i64 = 94;
/// What comes after token 50, and ends a text.
pub(crate) const EOS: i64 = 51;
/// One above the largest token.
pub(crate) const VOCAB: i64 = 100;
/// Width of a row.
pub(crate) const HIDDEN: usize = 4;
/// Layers.
pub(crate) const LAYERS: i64 = 8;

/// The model. After a sequence that ends with token `t` it predicts `t + 1`; the value of every channel of row `i`, plane
/// `p` is `token * 1000 + i + p / 10`, in float32.
#[derive(Clone, Default)]
pub(crate) struct FakeModel {
    pub(crate) gate: Arc<Gate>,
    pub(crate) steps: Arc<Mutex<Vec<Vec<usize>>>>,
}

/// Holds steps up while closed.
#[derive(Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
    /// Steps that pass before it closes by itself; 0 for never.
    closes_after: AtomicUsize,
    opened: Condvar,
    at_gate: AtomicUsize,
}

impl Gate {
    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }

    /// Lets so many more steps pass, then closes.
    pub(crate) fn close_after(&self, steps: usize) {
        self.closes_after.store(self.arrived() + steps, Ordering::SeqCst);
    }

    pub(crate) fn open(&self) {
        self.closes_after.store(0, Ordering::SeqCst);
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    /// How many steps have come to the gate.
    pub(crate) fn arrived(&self) -> usize {
        self.at_gate.load(Ordering::SeqCst)
    }

    fn pass(&self) {
        let last = self.closes_after.load(Ordering::SeqCst);
        if last > 0 && self.at_gate.load(Ordering::SeqCst) >= last {
            self.close();
        }
        self.at_gate.fetch_add(1, Ordering::SeqCst);
        let closed = self.closed.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
    }
}

/// The value in every channel of a row.
pub(crate) fn value(token: i64, row: usize, plane: usize) -> f32 {
    token as f32 * 1000.0 + row as f32 + plane as f32 / 10.0
}

/// Bytes of a cached token.
pub(crate) const KV_BYTES: u64 = 8;

impl StepModel for FakeModel {
    /// The tokens.
    type Cache = Vec<i64>;

    fn new_cache(&self, tokens: usize) -> Vec<i64> {
        Vec::with_capacity(tokens)
    }

    fn cache_bytes_per_token(&self) -> u64 {
        KV_BYTES
    }

    fn step(&self, sequences: &mut [StepSequence<'_, Vec<i64>>]) -> Result<Vec<StepOutput>, StepError> {
        self.steps.lock().unwrap().push(sequences.iter().map(|sequence| sequence.token_ids.len()).collect());
        self.gate.pass();
        let has = |token| sequences.iter().any(|sequence| sequence.token_ids.contains(&token));
        if has(FAILS) {
            return Err(StepError("out of memory, as asked".to_owned()));
        }
        assert!(!has(PANICS), "panicked, as asked");
        let outputs = sequences.iter_mut().map(|sequence| {
            let past = sequence.cache.as_ref().map_or(0, |cache| cache.len());
            let states = sequence.capture.map(|capture| {
                let planes = capture.spec.planes().len();
                let rows = sequence.token_ids.iter().enumerate().skip(capture.first_row);
                let values = rows.flat_map(|(row, &token)| {
                    (0..planes * HIDDEN).map(move |at| match token {
                        NAN => f32::NAN,
                        _ => value(token, past + row, at / HIDDEN),
                    })
                });
                States::new(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
            });
            if let Some(cache) = &mut sequence.cache {
                cache.extend(sequence.token_ids);
            }
            let last = sequence.token_ids[sequence.token_ids.len() - 1];
            let read = |&token: &i64| if token == MISREAD { token + 1 } else { token };
            // One logit of 30, all others 0: the token is certain; what was scored is told by the token and the row it follows.
            let logits = || match last {
                NO_LOGITS => vec![f32::NAN; VOCAB as usize],
                _ => (0..VOCAB).map(|token| if token == (last + 1) % VOCAB { 30.0 } else { 0.0 }).collect(),
            };
            let scored = |row: usize, token: i64| -((past + row) as f32) - token as f32 / 100.0;
            let scores = sequence.scoring.map(|scoring| Scores {
                targets: (scoring.first_row..)
                    .zip(scoring.targets)
                    .map(|(row, token)| scored(row, *token))
                    .collect(),
                ..Scores::default()
            });
            StepOutput {
                token_ids: sequence.token_ids.iter().map(read).collect(),
                states,
                logits: sequence.logits.then(logits),
                scores,
            }
        });
        Ok(outputs.collect())
    }
}
