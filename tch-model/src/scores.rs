//! How likely tokens are behind the rows of a sequence, without keeping a row of logits for each.

use tch::{Device, Kind, Tensor};

use crate::ForwardError;

/// What to say of the rows of a sequence: log-probabilities under the model of what may follow them.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// The first row, among those of this pass.
    pub first_row: usize,
    /// The token that follows each row from there on.
    pub targets: &'a [i64],
    /// How many of the most likely tokens to give with each.
    pub top: usize,
    /// Tokens whose log-probability to give behind every row.
    pub token_ids: &'a [i64],
}

/// Natural logarithms of probabilities, by row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Of the target.
    pub targets: Vec<f32>,
    /// The most likely tokens, falling.
    pub top: Vec<Vec<(i64, f32)>>,
    /// Of the tokens asked for, in their order.
    pub token_ids: Vec<Vec<f32>>,
}

/// Logits that are in memory at a time: 64 MiB of them.
const LOGITS: i64 = 16 << 20;

impl Scoring<'_> {
    pub(crate) fn check(&self, sequence: usize, tokens: usize, vocab_size: i64) -> Result<(), ForwardError> {
        let (first_row, targets) = (self.first_row, self.targets.len());
        if first_row.checked_add(targets).is_none_or(|end| end > tokens) {
            return Err(ForwardError::Scoring { sequence, first_row, targets, tokens });
        }
        let all = self.targets.iter().chain(self.token_ids);
        match all.copied().enumerate().find(|(_, token)| !(0..vocab_size).contains(token)) {
            Some((position, token)) => Err(ForwardError::Token { sequence, position, token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Over the sequence's rows of the residual stream, `[rows, hidden]`, a block of them at a time; `head` gives logits.
    pub(crate) fn run(&self, rows: &Tensor, head: impl Fn(&Tensor) -> Tensor) -> Scores {
        let mut scores = Scores::default();
        let (mut done, all) = (0, self.targets.len());
        let mut block = 1;
        while done < all {
            let count = block.min(all - done);
            let logits = head(&rows.narrow(0, (self.first_row + done) as i64, count as i64));
            let vocab = logits.size()[1];
            self.block(&logits.log_softmax(-1, Kind::Float), done, &mut scores);
            done += count;
            block = (LOGITS / vocab).max(1) as usize;
        }
        scores
    }

    /// Of `[rows, vocab]` log-probabilities, the first of which is that of target `done`.
    fn block(&self, log_probabilities: &Tensor, done: usize, scores: &mut Scores) {
        let rows = log_probabilities.size()[0];
        let device = log_probabilities.device();
        let numbers = |of: &Tensor| -> Vec<f32> {
            let flat = of.to_device(Device::Cpu).reshape([-1]);
            Vec::try_from(&flat).expect("a row of float32 on the CPU")
        };
        let targets = Tensor::from_slice(&self.targets[done..done + rows as usize]).to_device(device);
        scores.targets.extend(numbers(&log_probabilities.gather(1, &targets.unsqueeze(1), false)));
        if self.top > 0 {
            let top = (self.top as i64).min(log_probabilities.size()[1]);
            let (values, tokens) = log_probabilities.topk(top, -1, true, true);
            let tokens: Vec<i64> = Vec::try_from(&tokens.to_device(Device::Cpu).reshape([-1]))
                .expect("a row of int64 on the CPU");
            let pairs: Vec<(i64, f32)> = tokens.into_iter().zip(numbers(&values)).collect();
            scores.top.extend(pairs.chunks(top as usize).map(<[_]>::to_vec));
        }
        if !self.token_ids.is_empty() {
            let of = log_probabilities.index_select(1, &Tensor::from_slice(self.token_ids).to_device(device));
            scores.token_ids.extend(numbers(&of).chunks(self.token_ids.len()).map(<[_]>::to_vec));
        }
    }
}
