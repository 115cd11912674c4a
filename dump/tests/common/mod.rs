//! A dump of any shape, for the tests of writing and of reading.

use half::bf16;
use proptest::prelude::*;
use tether_dump::{CapturePoint, Dtype, Dump, FinalState, Metadata, RequestId, Rows, TokenHash};

/// The parts of a dump, owned.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) metadata: Metadata,
    pub(crate) token_ids: Vec<i64>,
    pub(crate) hidden_states: Vec<u8>,
    pub(crate) hidden_size: usize,
}

impl Parts {
    pub(crate) fn dump(&self) -> Dump<'_> {
        Dump {
            metadata: &self.metadata,
            token_ids: &self.token_ids,
            hidden_states: &self.hidden_states,
            hidden_size: self.hidden_size,
        }
    }
}

/// `tokens` rows of `planes` planes whose values tell row, plane and channel apart.
pub(crate) fn parts(tokens: usize, planes: usize, hidden_size: usize, dtype: Dtype) -> Parts {
    let token_ids: Vec<i64> = (0..tokens as i64).map(|i| i * 7 + 3).collect();
    let value = |i: usize| (i as f32 * 0.37).sin() * 100.0;
    let hidden_states = (0..tokens * planes * hidden_size)
        .flat_map(|i| match dtype {
            Dtype::Float32 => value(i).to_le_bytes().to_vec(),
            Dtype::BFloat16 => bf16::from_f32(value(i)).to_le_bytes().to_vec(),
            Dtype::Float16 => half::f16::from_f32(value(i)).to_le_bytes().to_vec(),
        })
        .collect();
    let mut points: Vec<_> = (0..planes.saturating_sub(1) as u16).map(CapturePoint::Residual).collect();
    points.push(CapturePoint::FinalNorm);
    let metadata = Metadata {
        request_id: RequestId::new(),
        call_id: Some("call".into()),
        client_rid: Some("the client's \"own\" name \u{7f}\n 名".into()),
        model: "tiny".into(),
        config_hash: "0".repeat(64),
        num_layers: 9,
        points,
        final_state: FinalState::PostNorm,
        rows: Rows::Prompt,
        prompt_tokens: tokens,
        dtype,
        token_hash: TokenHash::of(&token_ids),
        server: "test 0".into(),
        created: tether_dump::timestamp(),
    };
    Parts { metadata, token_ids, hidden_states, hidden_size }
}

/// Small dumps of every dtype.
pub(crate) fn any_parts() -> impl Strategy<Value = Parts> {
    let dtype = prop_oneof![Just(Dtype::Float32), Just(Dtype::BFloat16), Just(Dtype::Float16)];
    (1usize..9, 1usize..6, 1usize..40, dtype)
        .prop_map(|(tokens, planes, hidden, dtype)| parts(tokens, planes, hidden, dtype))
}
