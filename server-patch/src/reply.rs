//! What a prompt's result looks like in a reply of `/generate`, key by key as SGLang has it.

use std::time::Instant;

use serde_json::{Map, Value, json};

use crate::engine::{Done, DoneLogprobs, Finish};
use crate::error::ApiError;
use crate::plan::Plan;
use crate::request::LogprobRequest;
use crate::sampling::TokenLogprob;
use crate::sink::CaptureReply;
use crate::tokenizer::{Tokenizer, first_stop};

/// What there is of one prompt's result: all of it, or so far.
pub(crate) struct Part<'a> {
    /// The generated tokens.
    pub(crate) output_ids: &'a [i64],
    /// Why there are no more, if there are none.
    pub(crate) finish: Option<&'a Finish>,
    /// The dump.
    pub(crate) capture: Option<&'a CaptureReply>,
    /// The log-probabilities.
    pub(crate) logprobs: Option<&'a DoneLogprobs>,
    /// The text, where it is known already.
    pub(crate) text: Option<String>,
    /// The first of the tokens whose log-probabilities are given.
    pub(crate) logprobs_from: usize,
    /// Whether a prompt that the reply repeats is in it.
    pub(crate) with_prompt: bool,
}

impl<'a> Part<'a> {
    /// All of it.
    pub(crate) fn of(done: &'a Done) -> Self {
        Self {
            output_ids: &done.output_ids,
            finish: Some(&done.finish),
            capture: done.capture.as_ref(),
            logprobs: done.logprobs.as_ref(),
            text: None,
            logprobs_from: 0,
            with_prompt: true,
        }
    }
}

/// The element of one prompt.
///
/// # Errors
/// [`ApiError::StepFailed`] when its tokens have no text.
pub(crate) fn element(
    plan: &Plan,
    done: &Part<'_>,
    started: Instant,
    tokenizer: Option<&Tokenizer>,
) -> Result<Value, ApiError> {
    let count = done.output_ids.len();
    let mut meta = json!({
        "id": plan.identity.rid,
        "finish_reason": done.finish.map_or(Value::Null, |finish| finish_reason(finish, count)),
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": count,
        "cached_tokens": 0,
        "cached_tokens_details": null,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "dp_rank": null,
        "e2e_latency": started.elapsed().as_secs_f64(),
        "weight_version": "default",
    });
    if done.finish.is_some() {
        meta["weight_versions"] = json!([{"version": "default", "start": 0, "end": count}]);
    }
    if let Some(capture) = done.capture {
        meta["capture"] = json!(capture);
    }
    if let (Some(wanted), Some(found), Value::Object(meta)) = (&plan.logprobs, done.logprobs, &mut meta) {
        add_logprobs(plan, done, wanted, found, tokenizer, meta)?;
    }
    let mut element = json!({"output_ids": done.output_ids, "meta_info": meta});
    if let Some(tokenizer) = tokenizer {
        element["text"] = match (&done.text, done.finish) {
            (Some(text), _) => json!(text),
            (None, Some(finish)) => json!(text(plan, done.output_ids, finish, tokenizer)?),
            (None, None) => json!(decode(tokenizer, done.output_ids, plan.skip_special_tokens)?),
        };
    }
    if let Some(prompt) = plan.prompt_token_ids.as_ref().filter(|_| plan.returns_prompt && done.with_prompt) {
        element["prompt_token_ids"] = json!(prompt);
    }
    Ok(element)
}

fn finish_reason(finish: &Finish, count: usize) -> Value {
    match finish {
        Finish::Length => json!({"type": "length", "length": count}),
        Finish::Stop(token) => json!({"type": "stop", "matched": token}),
        Finish::StopText(text) => json!({"type": "stop", "matched": text}),
        Finish::Aborted => {
            json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null})
        }
    }
}

/// The text ends before what ended it, unless the request says otherwise.
fn text(plan: &Plan, output_ids: &[i64], finish: &Finish, tokenizer: &Tokenizer) -> Result<String, ApiError> {
    let shown = match finish {
        Finish::Stop(_) if !plan.no_stop_trim => &output_ids[..output_ids.len() - 1],
        _ => output_ids,
    };
    let mut text = decode(tokenizer, shown, plan.skip_special_tokens)?;
    if matches!(finish, Finish::StopText(_)) && !plan.no_stop_trim {
        // The string that was found first, which may not be the one that the last token completed first.
        let end = first_stop(&text, &plan.stop).map_or(text.len(), |(at, _)| at);
        text.truncate(end);
    }
    Ok(text)
}

fn decode(tokenizer: &Tokenizer, ids: &[i64], skip_special_tokens: bool) -> Result<String, ApiError> {
    tokenizer.decode(ids, skip_special_tokens).map_err(|error| ApiError::StepFailed(error.to_string()))
}

/// Log-probabilities are triples of value, token and its text or null.
fn add_logprobs(
    plan: &Plan,
    done: &Part<'_>,
    wanted: &LogprobRequest,
    found: &DoneLogprobs,
    tokenizer: Option<&Tokenizer>,
    meta: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let tokenizer = tokenizer.filter(|_| wanted.text);
    let triple = |logprob: Option<f32>, token: i64| -> Result<Value, ApiError> {
        let text = tokenizer.map(|tokenizer| decode(tokenizer, &[token], false)).transpose()?;
        Ok(json!([logprob, token, text]))
    };
    let pairs = |tokens: &mut dyn Iterator<Item = (i64, f32)>| -> Result<Value, ApiError> {
        tokens.map(|(token, logprob)| triple(Some(logprob), token)).collect()
    };
    let top = |of: &TokenLogprob| pairs(&mut of.top.iter().copied());
    let asked = wanted.token_ids.as_deref().unwrap_or_default();
    let of_asked = |of: &TokenLogprob| pairs(&mut asked.iter().copied().zip(of.token_ids.iter().copied()));

    // As in SGLang, the first position that is asked about has no value: nothing that was asked about is before it.
    let prompt: &[i64] = match (wanted.prompt_from, &plan.prompt_token_ids) {
        (Some(from), Some(prompt)) => prompt.get(from..).unwrap_or_default(),
        _ => &[],
    };
    let mut input = prompt.iter().take(1).map(|&token| triple(None, token)).collect::<Result<Vec<_>, _>>()?;
    for (token, of) in prompt.iter().skip(1).zip(&found.prompt) {
        input.push(triple(Some(of.logprob), *token)?);
    }
    let (output_ids, outputs) =
        (&done.output_ids[done.logprobs_from..], &found.output[done.logprobs_from.min(found.output.len())..]);
    let output = output_ids.iter().zip(outputs).map(|(token, of)| triple(Some(of.logprob), *token));
    let output: Vec<Value> = output.collect::<Result<_, _>>()?;
    meta.insert("output_token_logprobs_length".to_owned(), json!(done.logprobs_from + output.len()));
    // Those of a prompt are known at the end; until then nothing is said of them, rather than too little.
    let known = done.finish.is_some() || wanted.prompt_from.is_none();
    if known {
        meta.insert("input_token_logprobs".to_owned(), Value::Array(input));
    }
    meta.insert("output_token_logprobs".to_owned(), Value::Array(output));
    let first = || prompt.iter().take(1).map(|_| Ok(Value::Null));
    let mut lists = |key: &str, of: &dyn Fn(&TokenLogprob) -> Result<Value, ApiError>| {
        let input = first().chain(found.prompt.iter().map(of)).collect::<Result<_, ApiError>>()?;
        let output = outputs.iter().map(of).collect::<Result<_, ApiError>>()?;
        if known {
            meta.insert(format!("input_{key}"), Value::Array(input));
        }
        meta.insert(format!("output_{key}"), Value::Array(output));
        Ok::<(), ApiError>(())
    };
    if wanted.top > 0 {
        lists("top_logprobs", &top)?;
    }
    if wanted.token_ids.is_some() {
        lists("token_ids_logprobs", &of_asked)?;
    }
    Ok(())
}
