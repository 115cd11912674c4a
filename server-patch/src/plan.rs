//! From what a client wrote to what the engine runs: prompts checked against the model, captures against its layers.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Once, OnceLock};
use std::time::Instant;

use prometheus::Histogram;
use tether_dump::{Dtype, DumpLayout, FinalState, Metadata, Rows, TokenHash};
use tether_model::{CapturePoint, CaptureSpec};

use crate::chat::ChatTemplate;
use crate::error::ApiError;
use crate::identity::Identity;
use crate::request::{
    Axis, CaptureField, CaptureOptions, GenerateRequest, LogprobRequest, NewTokens, Prompt, PromptRequest,
};
use crate::sampling::SamplingParams;
use crate::tokenizer::Tokenizer;

/// What the HTTP side knows of the model, from its config alone.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// What it is called in replies and dumps.
    pub name: String,
    /// The checkpoint directory.
    pub path: PathBuf,
    /// SHA-256 of its config.
    pub config_hash: String,
    /// The model class.
    pub architecture: String,
    /// Decoder layers.
    pub num_layers: i64,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Token IDs are below this.
    pub vocab_size: i64,
    /// Positions.
    pub context: usize,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<i64>,
}

/// Who gets a dump without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Requests whose rid is a request ID.
    Tagged,
    /// Every request.
    All,
}

/// What is captured where a request does not say.
#[derive(Clone, Debug)]
pub struct CaptureDefaults {
    /// On the input axis.
    pub points: Vec<i64>,
    /// Form of the last layer's output.
    pub final_state: FinalState,
    /// Both, checked against the model.
    pub spec: Arc<CaptureSpec>,
    /// Who gets it.
    pub mode: CaptureMode,
    /// Form of a dump on disk.
    pub layout: DumpLayout,
}

/// Most log-probabilities of other tokens that one prompt's reply may have: about 200 MB of it.
const MOST_LOGPROBS: usize = 1 << 20;

/// Turns requests into plans.
pub struct Planner {
    /// The model.
    pub model: ModelInfo,
    /// What is captured unless a request says otherwise.
    pub defaults: CaptureDefaults,
    /// For text prompts.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// For conversations.
    pub template: Option<ChatTemplate>,
    /// Number format of the stored states; known once the model is loaded.
    pub dump_dtype: OnceLock<Dtype>,
    /// Name and version of this program, for the dump.
    pub server: String,
    /// Seconds that the tokenizer took for a prompt.
    pub tokenize_seconds: Histogram,
    /// Whether it was said that a dump's last plane may not be the state before the final norm.
    pub warned: Once,
}

/// One prompt, ready to run.
#[derive(Debug)]
pub struct Plan {
    /// Who it is.
    pub identity: Identity,
    /// The prompt, within vocabulary and context.
    pub token_ids: Vec<i64>,
    /// Its length, which stays when the engine has taken the tokens.
    pub prompt_tokens: usize,
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Whether that is only what the context has room for.
    pub flexible: bool,
    /// Tokens that end the text.
    pub stop_ids: Vec<i64>,
    /// Tokens that are kept from coming before `min_new_tokens`.
    pub ends: Vec<i64>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Leave what ended the text in it.
    pub no_stop_trim: bool,
    /// Which sample of its prompt it is, of how many.
    pub sample: (usize, usize),
    /// The name that the samples of its prompt have in common, if there are several.
    pub prompt_rid: Option<String>,
    /// Which log-probabilities the reply has.
    pub logprobs: Option<LogprobRequest>,
    /// The prompt once more, for a reply that repeats it or speaks of its tokens.
    pub prompt_token_ids: Option<Vec<i64>>,
    /// Whether the reply repeats it.
    pub returns_prompt: bool,
    /// How to make text of the output.
    pub skip_special_tokens: bool,
    /// What to keep.
    pub capture: Option<CapturePlan>,
}

/// What to keep of a prompt.
#[derive(Debug)]
pub struct CapturePlan {
    /// The points.
    pub spec: Arc<CaptureSpec>,
    /// The dump's metadata but for token hash and time.
    pub metadata: Metadata,
    /// The most bytes its dump can take.
    pub max_bytes: u64,
}

impl Planner {
    /// Plans every prompt of a call. `call_id` is the call's; `originals` what a proxy says that its client had called each
    /// prompt.
    ///
    /// # Errors
    /// The first prompt that cannot be run fails the call, as in SGLang.
    pub fn plan(
        &self,
        request: GenerateRequest,
        call_id: Option<&str>,
        originals: &Originals,
    ) -> Result<Vec<Plan>, ApiError> {
        let count = request.prompts.len();
        let mut rids = HashSet::new();
        let plans = request.prompts.into_iter().enumerate().map(|(index, prompt)| {
            let row = request.batch.then_some(index);
            let identity = Identity::new(prompt.rid.clone(), originals.of(index, count))?;
            if !rids.insert(identity.rid.clone()) {
                return Err(ApiError::Invalid(format!(
                    "`rid[{index}]` is {}, as another one of the list is",
                    identity.rid
                )));
            }
            self.plan_one(prompt, identity, row, call_id, request.return_prompt_token_ids)
        });
        let plans: Vec<Vec<Plan>> = plans.collect::<Result<_, _>>()?;
        Ok(plans.into_iter().flatten().collect())
    }

    /// The samples of one plan. They answer to `<rid>_0` and on; the first has the dump, which is one a prompt.
    fn samples(plan: Plan, n: usize) -> Result<Vec<Plan>, ApiError> {
        if n == 1 {
            return Ok(vec![plan]);
        }
        if plan.capture.as_ref().is_some_and(|capture| capture.metadata.rows == Rows::All) {
            return Err(ApiError::Invalid(format!(
                "`sampling_params.n` is {n} and `capture.rows` is all: the samples of a prompt go on differently, and it has one dump; n 1 or rows prompt is accepted"
            )));
        }
        let Plan { identity, mut capture, .. } = plan;
        let sample = |index: usize| Plan {
            identity: Identity { rid: format!("{}_{index}", identity.rid), ..identity.clone() },
            capture: capture.take(),
            sample: (index, n),
            prompt_rid: Some(identity.rid.clone()),
            token_ids: plan.token_ids.clone(),
            stop_ids: plan.stop_ids.clone(),
            ends: plan.ends.clone(),
            sampling: plan.sampling.clone(),
            stop: plan.stop.clone(),
            logprobs: plan.logprobs.clone(),
            prompt_token_ids: plan.prompt_token_ids.clone(),
            ..plan
        };
        Ok((0..n).map(sample).collect())
    }

    fn plan_one(
        &self,
        request: PromptRequest,
        identity: Identity,
        row: Option<usize>,
        call_id: Option<&str>,
        return_prompt_token_ids: bool,
    ) -> Result<Vec<Plan>, ApiError> {
        let token_ids = self.token_ids(request.prompt, row)?;
        let max_new_tokens = self.max_new_tokens(request.sampling.max_new_tokens, token_ids.len(), row)?;
        let vocab_size = self.model.vocab_size;
        let biased = request.sampling.params.logit_bias.iter().map(|(token, _)| *token);
        if let Some(token) = biased.into_iter().find(|token| !(0..vocab_size).contains(token)) {
            let last = vocab_size - 1;
            return Err(ApiError::Invalid(format!(
                "`sampling_params.logit_bias` has the token {token}; a token ID from 0 to {last} is expected"
            )));
        }
        if !request.sampling.stop.is_empty() && self.tokenizer.is_none() {
            return Err(ApiError::Invalid(
                "`sampling_params.stop` needs a tokenizer beside the model; `stop_token_ids` is accepted"
                    .into(),
            ));
        }
        let asked = request.logprobs.as_ref().and_then(|logprobs| logprobs.token_ids.as_ref());
        if let Some(token) = asked.into_iter().flatten().find(|token| !(0..vocab_size).contains(*token)) {
            let last = vocab_size - 1;
            return Err(ApiError::Invalid(format!(
                "`token_ids_logprob` has {token}; token IDs from 0 to {last} are expected"
            )));
        }
        if let Some(from) = request.logprobs.as_ref().and_then(|logprobs| logprobs.prompt_from)
            && from > token_ids.len()
        {
            return Err(ApiError::Invalid(format!(
                "`logprob_start_len` is {from}, {} has {} tokens",
                row.map_or_else(|| "the prompt".to_owned(), |row| format!("prompt {row}")),
                token_ids.len()
            )));
        }
        if let Some(logprobs) = &request.logprobs {
            let asked = logprobs.top + logprobs.token_ids.as_ref().map_or(0, Vec::len);
            let from = logprobs.prompt_from.unwrap_or(token_ids.len());
            let positions = token_ids.len() - from + max_new_tokens;
            if positions.saturating_mul(asked) > MOST_LOGPROBS {
                return Err(ApiError::Invalid(format!(
                    "{positions} positions with {asked} log-probabilities each are {}; at most {MOST_LOGPROBS} fit into a reply, by a lower `top_logprobs_num` or a higher `logprob_start_len`",
                    positions.saturating_mul(asked)
                )));
            }
        }
        let repeats_prompt = return_prompt_token_ids
            || request.logprobs.as_ref().is_some_and(|logprobs| logprobs.prompt_from.is_some());
        let prompt_token_ids = repeats_prompt.then(|| token_ids.clone());
        let mut stop_ids = request.sampling.stop_token_ids;
        let ends = stop_ids.iter().chain(&self.model.eos_token_ids).copied().collect();
        if !request.sampling.ignore_eos {
            stop_ids.extend(&self.model.eos_token_ids);
        }
        let capture =
            self.capture(request.capture, &identity, token_ids.len(), max_new_tokens, row, call_id)?;
        let skip_special_tokens = request.sampling.skip_special_tokens;
        let prompt_tokens = token_ids.len();
        let plan = Plan {
            flexible: request.sampling.max_new_tokens == NewTokens::ToContext,
            stop: request.sampling.stop,
            no_stop_trim: request.sampling.no_stop_trim,
            sample: (0, 1),
            prompt_rid: None,
            logprobs: request.logprobs,
            prompt_token_ids,
            returns_prompt: return_prompt_token_ids,
            identity,
            token_ids,
            prompt_tokens,
            max_new_tokens,
            stop_ids,
            ends,
            sampling: request.sampling.params,
            skip_special_tokens,
            capture,
        };
        Self::samples(plan, request.sampling.n)
    }

    fn token_ids(&self, prompt: Prompt, row: Option<usize>) -> Result<Vec<i64>, ApiError> {
        let (field, ids) = match prompt {
            Prompt::Ids(ids) => ("input_ids", ids),
            Prompt::Text(text) => {
                let tokenizer = self.tokenizer.as_ref().ok_or_else(|| {
                    ApiError::Invalid(
                        "`text` needs a tokenizer.json beside the model; `input_ids` is accepted".into(),
                    )
                })?;
                let started = Instant::now();
                let encoded = tokenizer.encode(&text);
                self.tokenize_seconds.observe(started.elapsed().as_secs_f64());
                (
                    "text",
                    encoded.map_err(|error| ApiError::Invalid(format!("{}: {error}", named("text", row))))?,
                )
            }
        };
        if ids.is_empty() {
            return Err(ApiError::Invalid(format!(
                "{} cannot be empty; at least one token is needed",
                named(field, row)
            )));
        }
        let vocab_size = self.model.vocab_size;
        if let Some(index) = ids.iter().position(|id| !(0..vocab_size).contains(id)) {
            let row = row.map(|row| format!("[{row}]")).unwrap_or_default();
            return Err(ApiError::Invalid(format!(
                "`{field}{row}[{index}]` is {}; a token ID from 0 to {} is expected",
                ids[index],
                vocab_size - 1
            )));
        }
        Ok(ids)
    }

    fn max_new_tokens(
        &self,
        wanted: NewTokens,
        prompt: usize,
        row: Option<usize>,
    ) -> Result<usize, ApiError> {
        let context = self.model.context;
        let prompt_name = row.map_or_else(|| "the prompt".to_owned(), |row| format!("prompt {row}"));
        let max_new_tokens = wanted.resolve(prompt, context);
        let too_long = prompt > context || (prompt == context && wanted != NewTokens::Exactly(0));
        if too_long {
            let room = if prompt == context { "; with max_new_tokens 0 it fits" } else { "" };
            return Err(ApiError::Invalid(format!(
                "{prompt_name} has {prompt} tokens; the model's context length is {context}{room}"
            )));
        }
        if prompt.saturating_add(max_new_tokens) > context {
            return Err(ApiError::Invalid(format!(
                "{prompt_name} has {prompt} tokens and max_new_tokens is {max_new_tokens}; the model's context length is {context}"
            )));
        }
        Ok(max_new_tokens)
    }

    fn capture(
        &self,
        field: Option<CaptureField>,
        identity: &Identity,
        prompt_tokens: usize,
        max_new_tokens: usize,
        row: Option<usize>,
        call_id: Option<&str>,
    ) -> Result<Option<CapturePlan>, ApiError> {
        let options = match field {
            Some(CaptureField::Switch(false)) => return Ok(None),
            None if !identity.tagged && self.defaults.mode == CaptureMode::Tagged => return Ok(None),
            None | Some(CaptureField::Switch(true)) => CaptureOptions::default(),
            Some(CaptureField::Options(options)) => options,
        };
        let rows = options.rows.unwrap_or(Rows::Prompt);
        let spec = self.spec(options, row)?;
        let dtype = *self.dump_dtype.get().ok_or(ApiError::Loading)?;
        let metadata = Metadata {
            request_id: identity.id,
            call_id: call_id.map(str::to_owned),
            client_rid: identity.client_rid.clone(),
            model: self.model.name.clone(),
            config_hash: self.model.config_hash.clone(),
            num_layers: u32::try_from(self.model.num_layers).map_err(|_| ApiError::Loading)?,
            points: spec.planes().to_vec(),
            final_state: spec.final_state(),
            rows,
            prompt_tokens,
            dtype,
            token_hash: TokenHash::of(&[]),
            server: self.server.clone(),
            created: tether_dump::timestamp(),
        };
        let most_rows = match rows {
            Rows::Prompt => prompt_tokens,
            Rows::All => prompt_tokens + max_new_tokens.saturating_sub(1),
        };
        let max_bytes = self.defaults.layout.most_bytes(&metadata, most_rows, self.model.hidden_size);
        Ok(Some(CapturePlan { spec, metadata, max_bytes }))
    }

    /// Says once that readers of vLLM's layout would take a dump's last plane for what it is not.
    pub fn warn_of_final(&self, final_state: FinalState) {
        if matches!(final_state, FinalState::Both | FinalState::None) {
            self.warned.call_once(|| {
                tracing::warn!(
                    r#final = %final_state,
                    "readers of vLLM's layout take a dump's last plane for the state before the final norm; with this `final` it is not"
                );
            });
        }
    }

    fn spec(&self, options: CaptureOptions, row: Option<usize>) -> Result<Arc<CaptureSpec>, ApiError> {
        if options.points.is_none() && options.final_state.is_none() {
            return Ok(Arc::clone(&self.defaults.spec));
        }
        let field = row.map_or_else(|| "capture".to_owned(), |row| format!("capture[{row}]"));
        let refuse = |text: String| ApiError::Invalid(format!("`{field}`: {text}"));
        let num_layers = self.model.num_layers;
        let points = match options.points {
            None => self.defaults.points.clone(),
            Some(points) => {
                // On the output axis, point i is what leaves layer i and enters layer i + 1.
                let (axis, shift) = match options.axis {
                    Axis::Input => ("input", 0),
                    Axis::Output => ("output", 1),
                };
                let last = num_layers - shift;
                if let Some(point) = points.iter().find(|point| !(0..=last).contains(*point)) {
                    return Err(refuse(format!(
                        "point {point} does not exist; a model of {num_layers} layers has 0 to {last} on the {axis} axis"
                    )));
                }
                points.into_iter().map(|point| point + shift).collect()
            }
        };
        let final_state = options.final_state.unwrap_or(self.defaults.final_state);
        self.warn_of_final(final_state);
        let spec =
            CaptureSpec::new(&points, final_state, num_layers).map_err(|error| refuse(error.to_string()))?;
        Ok(Arc::new(spec))
    }
}

fn named(field: &str, row: Option<usize>) -> String {
    row.map_or_else(|| format!("`{field}`"), |row| format!("`{field}[{row}]`"))
}

/// What a proxy says its client had called the prompts, from the header `x-client-request-id`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Originals(Vec<String>);

impl Originals {
    /// Reads the header: a name, or a JSON list of names for a batch.
    pub fn read(header: Option<&[u8]>) -> Self {
        let Some(header) = header.filter(|header| !header.is_empty()) else { return Self::default() };
        match serde_json::from_slice::<Vec<String>>(header) {
            Ok(names) => Self(names),
            Err(_) => Self(vec![String::from_utf8_lossy(header).into_owned()]),
        }
    }

    /// The name of prompt `index` of `count`.
    fn of(&self, index: usize, count: usize) -> Option<String> {
        match self.0.as_slice() {
            [] => None,
            // One name for the whole call.
            [name] => Some(name.clone()),
            names if names.len() == count => names.get(index).cloned(),
            _ => None,
        }
    }
}

/// The two numberings of a capture's residual points, for people: `[2, 30, 58, 61]` and `[1, 29, 57, 60]`. `R[0]` has no
/// number on the output axis.
pub fn both_axes(spec: &CaptureSpec) -> (String, String) {
    let residuals = spec.planes().iter().filter_map(|point| match point {
        CapturePoint::Residual(layer) => Some(i64::from(*layer)),
        CapturePoint::FinalNorm => None,
    });
    let input: Vec<String> = residuals.clone().map(|layer| layer.to_string()).collect();
    let output =
        residuals.map(|layer| if layer == 0 { "embedding".to_owned() } else { (layer - 1).to_string() });
    (input.join(","), output.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests;
