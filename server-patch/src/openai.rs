//! OpenAI's routes, in SGLang's form, over the same engine: a body becomes one of `/generate`, and its elements become choices.
//!
//! vLLM's extraction clients talk to these too: `return_token_ids` repeats the prompt, and a captured request has
//! `kv_transfer_params.hidden_states_path`.

use serde_json::{Map, Value, json};

use crate::chat::{ChatTemplate, Conversation};
use crate::error::ApiError;
use crate::json::{UniqueKeys, clipped};
use crate::stream::Emitted;
use crate::tokenizer::Tokenizer;

/// Which of the two forms a call has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
}

/// A call as `/generate` takes it, with what its reply needs to know.
#[derive(Clone, Debug)]
pub struct Call {
    /// The body for `/generate`.
    pub body: Value,
    form: Form,
    model: String,
    /// Texts of the prompts where the reply begins with them.
    echo: bool,
    return_token_ids: bool,
    /// Whether a streamed reply ends with the usage.
    include_usage: bool,
    logprobs: bool,
    /// Whether the prompt was given as token IDs and is not known as text.
    top: u64,
}

/// Default of `max_tokens` for completions; a chat goes on to the end of the context.
const MAX_TOKENS: u64 = 16;

/// Fields that are handed on to `sampling_params` under another or the same name.
const SAMPLING: [(&str, &str); 18] = [
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("logit_bias", "logit_bias"),
    ("min_tokens", "min_new_tokens"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("seed", "sampling_seed"),
    ("n", "n"),
    ("ignore_eos", "ignore_eos"),
    ("skip_special_tokens", "skip_special_tokens"),
    ("spaces_between_special_tokens", "spaces_between_special_tokens"),
    ("no_stop_trim", "no_stop_trim"),
    ("json_schema", "json_schema"),
];
/// Fields that mean the same in `/generate`, or are refused there by name.
const SAME: [&str; 5] = ["rid", "capture", "lora_path", "priority", "stream"];
/// Fields that say nothing about the result: names for logs, and caches that there are none of.
const WITHOUT_EFFECT: [&str; 10] = [
    "user",
    "metadata",
    "store",
    "cache_salt",
    "extra_key",
    "service_tier",
    "stream_options",
    "detokenize",
    "safety_identifier",
    "prompt_cache_key",
];
/// Fields that would change the result and are not implemented, with the values that ask for nothing.
const UNSUPPORTED: [(&str, &[&str]); 14] = [
    ("best_of", &["1"]),
    ("suffix", &["\"\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("regex", &[]),
    ("ebnf", &[]),
    ("structural_tag", &[]),
    ("return_hidden_states", &["false"]),
    ("custom_logit_processor", &[]),
    ("continue_final_message", &["false"]),
    ("parallel_tool_calls", &["true"]),
    ("prompt_logprobs", &[]),
    ("audio", &[]),
    ("modalities", &["[\"text\"]"]),
    ("use_beam_search", &["false"]),
];

fn invalid(text: String) -> ApiError {
    ApiError::Invalid(text)
}

fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let UniqueKeys(fields) = serde_json::from_slice(body)?;
    Ok(fields)
}

fn boolean(fields: &Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => {
            Err(invalid(format!("`{name}` is {}; true or false is expected", clipped(&other.to_string()))))
        }
    }
}

fn number(fields: &Map<String, Value>, name: &str, least: u64) -> Result<Option<u64>, ApiError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().filter(|number| *number >= least) {
            Some(number) => Ok(Some(number)),
            None => Err(invalid(format!(
                "`{name}` is {}; a number from {least} is expected",
                clipped(&value.to_string())
            ))),
        },
    }
}

impl Call {
    /// Reads the body of `/v1/completions`; `model` is what the server calls its own.
    ///
    /// # Errors
    /// [`ApiError::NotJson`] or [`ApiError::Invalid`].
    pub fn completion(body: &[u8], model: &str) -> Result<Self, ApiError> {
        let fields = object(body)?;
        let mut call =
            Self::common(&fields, Form::Completion, model, &["prompt", "logprobs", "echo", "max_tokens"])?;
        let prompt = fields.get("prompt").unwrap_or(&Value::Null);
        let expected = "a text, a list of token IDs, or a list of either";
        let key = match prompt {
            Value::String(text) if text.is_empty() => {
                return Err(invalid("`prompt` cannot be empty".to_owned()));
            }
            Value::String(_) => "text",
            Value::Array(items) => match items.first() {
                None => return Err(invalid("`prompt` cannot be empty".to_owned())),
                Some(Value::String(_)) => "text",
                Some(_) => "input_ids",
            },
            Value::Null => return Err(invalid(format!("`prompt` is missing; {expected} is expected"))),
            other => {
                let found = clipped(&other.to_string());
                return Err(invalid(format!("`prompt` is {found}; {expected} is expected")));
            }
        };
        call.body[key] = prompt.clone();
        call.body["sampling_params"]["max_new_tokens"] =
            json!(number(&fields, "max_tokens", 1)?.unwrap_or(MAX_TOKENS));
        call.echo = boolean(&fields, "echo")?;
        if let Some(top) = number(&fields, "logprobs", 0)? {
            call.ask_logprobs(top);
            if call.echo {
                call.body["logprob_start_len"] = json!(0);
            }
        }
        if call.echo {
            call.body["return_prompt_token_ids"] = json!(true);
            if call.logprobs && call.is_streamed() {
                return Err(invalid(
                    "`echo` and `logprobs` cannot be streamed together: those of the prompt are known at the end".to_owned(),
                ));
            }
        }
        Ok(call)
    }

    /// Reads the body of `/v1/chat/completions` and renders its messages.
    ///
    /// # Errors
    /// [`ApiError::NotJson`] or [`ApiError::Invalid`].
    pub fn chat(
        body: &[u8],
        model: &str,
        template: Option<&ChatTemplate>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self, ApiError> {
        let fields = object(body)?;
        let own = [
            "messages",
            "tools",
            "tool_choice",
            "chat_template_kwargs",
            "add_generation_prompt",
            "logprobs",
            "top_logprobs",
            "max_tokens",
            "max_completion_tokens",
        ];
        let mut call = Self::common(&fields, Form::Chat, model, &own)?;
        call.body["input_ids"] = json!(rendered(body, &fields, template, tokenizer)?);
        let most = match number(&fields, "max_completion_tokens", 0)? {
            None => number(&fields, "max_tokens", 0)?,
            most => most,
        };
        call.body["sampling_params"]["max_new_tokens"] = json!(most);
        let top = number(&fields, "top_logprobs", 0)?;
        if boolean(&fields, "logprobs")? {
            call.ask_logprobs(top.unwrap_or(0));
        }
        Ok(call)
    }

    fn common(fields: &Map<String, Value>, form: Form, model: &str, own: &[&str]) -> Result<Self, ApiError> {
        let mut sampling = Map::new();
        let mut body = Map::new();
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            let name = name.as_str();
            if let Some((_, to)) = SAMPLING.iter().find(|(from, _)| *from == name) {
                sampling.insert((*to).to_owned(), value.clone());
            } else if SAME.contains(&name) {
                body.insert(name.to_owned(), value.clone());
            } else if let Some((_, neutral)) = UNSUPPORTED.iter().find(|(field, _)| *field == name) {
                let text = value.to_string();
                if !neutral.contains(&text.as_str()) {
                    let accepted = neutral.first().copied().unwrap_or("null");
                    let found = clipped(&text);
                    return Err(invalid(format!(
                        "`{name}` is {found}; this server does not implement it and accepts only {accepted}"
                    )));
                }
            } else if !own.contains(&name) && !WITHOUT_EFFECT.contains(&name) {
                match name {
                    // The name of the model is not checked, as in SGLang: a server has one.
                    "model" | "return_token_ids" | "kv_transfer_params" => {}
                    _ => tracing::debug!(field = clipped(name), "an unknown field was let be"),
                }
            }
        }
        body.insert("sampling_params".to_owned(), Value::Object(sampling));
        extraction(fields, &mut body)?;
        number(fields, "n", 1)?;
        let return_token_ids = boolean(fields, "return_token_ids")?;
        if return_token_ids {
            body.insert("return_prompt_token_ids".to_owned(), json!(true));
        }
        let include_usage = match fields.get("stream_options") {
            None | Some(Value::Null) => false,
            Some(Value::Object(options)) => boolean(options, "include_usage")?,
            Some(other) => {
                let found = clipped(&other.to_string());
                return Err(invalid(format!("`stream_options` is {found}; an object is expected")));
            }
        };
        let model = fields.get("model").and_then(Value::as_str).unwrap_or(model).to_owned();
        let body = Value::Object(body);
        Ok(Self { body, form, model, echo: false, return_token_ids, include_usage, logprobs: false, top: 0 })
    }

    fn ask_logprobs(&mut self, top: u64) {
        self.logprobs = true;
        self.top = top;
        self.body["return_logprob"] = json!(true);
        self.body["top_logprobs_num"] = json!(top);
        self.body["return_text_in_logprobs"] = json!(true);
    }

    /// Whether the reply comes event by event.
    pub fn is_streamed(&self) -> bool {
        self.body["stream"] == json!(true)
    }

    /// The name that the choices of a reply have in common.
    fn id(element: &Value, list: bool) -> Value {
        let id = &element["meta_info"]["id"];
        match id.as_str().and_then(|id| id.rsplit_once('_')).filter(|_| list) {
            Some((common, _)) => json!(common),
            None => id.clone(),
        }
    }

    /// The reply for what `/generate` answered; `texts` decodes prompts that the reply begins with.
    pub fn reply(&self, generated: &Value, created: u64, texts: impl Fn(&Value) -> String) -> Value {
        let elements: Vec<&Value> = match generated {
            Value::Array(elements) => elements.iter().collect(),
            one => vec![one],
        };
        let first = elements.first().copied().unwrap_or(&Value::Null);
        let id = Self::id(first, generated.is_array());
        let sum =
            |key: &str| elements.iter().filter_map(|element| element["meta_info"][key].as_u64()).sum::<u64>();
        let samples = self.body["sampling_params"]["n"].as_u64().unwrap_or(1).max(1);
        let (prompt, completion) = (sum("prompt_tokens") / samples, sum("completion_tokens"));
        let choices: Vec<Value> =
            elements.iter().enumerate().map(|(index, element)| self.choice(index, element, &texts)).collect();
        let mut reply = json!({
            "id": id,
            "object": match self.form { Form::Completion => "text_completion", Form::Chat => "chat.completion" },
            "created": created,
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
                "prompt_tokens_details": null, "reasoning_tokens": 0, "completion_tokens_details": null,
            },
            "metadata": {
                "weight_version": first["meta_info"]["weight_version"],
                "weight_versions": first["meta_info"]["weight_versions"],
            },
        });
        let prompts = elements.len() as u64 / samples;
        if let Some(capture) = first["meta_info"].get("capture").filter(|_| prompts == 1) {
            reply["kv_transfer_params"] = json!({"hidden_states_path": capture["path"]});
            reply["metadata"]["capture"] = capture.clone();
        }
        if self.return_token_ids && self.form == Form::Chat {
            reply["prompt_token_ids"] = first["prompt_token_ids"].clone();
        }
        reply
    }

    fn choice(&self, index: usize, element: &Value, texts: &impl Fn(&Value) -> String) -> Value {
        let reason = &element["meta_info"]["finish_reason"];
        let text = element["text"].as_str().unwrap_or_default();
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": reason["type"],
            "matched_stop": matched(reason),
        });
        match self.form {
            Form::Completion => {
                let echoed = if self.echo { texts(&element["prompt_token_ids"]) } else { String::new() };
                choice["text"] = json!(echoed + text);
            }
            Form::Chat => {
                choice["message"] = json!({"role": "assistant", "content": text, "reasoning_content": null});
            }
        }
        // Of several prompts each choice says where its own states are.
        if let Some(capture) = element["meta_info"].get("capture") {
            choice["id"] = element["meta_info"]["id"].clone();
            choice["capture"] = capture.clone();
        }
        if self.return_token_ids {
            choice["token_ids"] = element["output_ids"].clone();
            choice["prompt_token_ids"] = element["prompt_token_ids"].clone();
        }
        if self.logprobs {
            choice["logprobs"] = match self.form {
                Form::Completion => self.completion_logprobs(&element["meta_info"]),
                Form::Chat => self.chat_logprobs(&element["meta_info"]),
            };
        }
        choice
    }

    fn completion_logprobs(&self, meta: &Value) -> Value {
        let list = |key: &str| meta[key].as_array().cloned().unwrap_or_default();
        let (mut tokens, mut tops) = (Vec::new(), Vec::new());
        if self.echo {
            tokens.extend(list("input_token_logprobs"));
            tops.extend(list("input_top_logprobs"));
        }
        tokens.extend(list("output_token_logprobs"));
        tops.extend(list("output_top_logprobs"));
        let named = |pairs: &Value| match pairs.as_array() {
            None => Value::Null,
            Some(pairs) => {
                let pairs = pairs
                    .iter()
                    .map(|pair| (pair[2].as_str().unwrap_or_default().to_owned(), pair[0].clone()));
                Value::Object(pairs.collect())
            }
        };
        json!({
            "tokens": tokens.iter().map(|token| token[2].clone()).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token[0].clone()).collect::<Vec<_>>(),
            "top_logprobs": if self.top > 0 { tops.iter().map(named).collect() } else { Value::Null },
            // As SGLang: offsets are not computed.
            "text_offset": vec![-1; tokens.len()],
        })
    }

    fn chat_logprobs(&self, meta: &Value) -> Value {
        let list = |key: &str| meta[key].as_array().cloned().unwrap_or_default();
        let entry = |triple: &Value| {
            let text = triple[2].as_str().unwrap_or_default();
            json!({"token": text, "bytes": text.as_bytes(), "logprob": triple[0]})
        };
        let mut tops = list("output_top_logprobs").into_iter();
        let content = list("output_token_logprobs").into_iter().map(|token| {
            let mut entry_of_token = entry(&token);
            let top = tops.next().unwrap_or_default();
            entry_of_token["top_logprobs"] = top.as_array().into_iter().flatten().map(entry).collect();
            entry_of_token
        });
        json!({"content": content.collect::<Vec<_>>()})
    }
}

/// The chunks of a streamed reply.
#[derive(Debug)]
pub struct Chunks {
    call: Call,
    created: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Of the chunks so far.
    id: Value,
}

impl Chunks {
    /// Of a call that was made at `created`, in seconds.
    pub fn new(call: Call, created: u64) -> Self {
        Self { call, created, prompt_tokens: 0, completion_tokens: 0, id: Value::Null }
    }

    /// Those for choice `index`, of which `element` has all that there is so far and `emitted` says what is out; `texts`
    /// decodes a prompt that the text begins with.
    pub(crate) fn of(
        &mut self,
        index: usize,
        element: &Value,
        emitted: &mut Emitted,
        texts: &dyn Fn(&Value) -> String,
    ) -> Vec<Value> {
        let begins = !std::mem::replace(&mut emitted.begun, true);
        let (mut added, before) = emitted.advance(element);
        let meta = &element["meta_info"];
        let reason = &meta["finish_reason"];
        let new_tokens = emitted.tokens > before;
        let logprobs = |of: &dyn Fn(&Value) -> Value| match self.call.logprobs && new_tokens {
            true => of(&new_logprobs(meta, emitted.tokens - before)),
            false => Value::Null,
        };
        let mut choices = Vec::new();
        match self.call.form {
            Form::Completion => {
                if begins && self.call.echo {
                    added.insert_str(0, &texts(&element["prompt_token_ids"]));
                }
                choices.push(json!({
                    "index": index, "text": added, "logprobs": logprobs(&|meta| self.call.completion_logprobs(meta)),
                    "finish_reason": reason["type"], "matched_stop": matched(reason),
                }));
            }
            Form::Chat => {
                let choice = |delta: Value, logprobs: Value| json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null, "matched_stop": null});
                if begins {
                    let role = json!({"role": "assistant", "content": "", "reasoning_content": null});
                    choices.push(choice(role, Value::Null));
                }
                if !added.is_empty() || (self.call.logprobs && new_tokens) {
                    let delta = json!({"content": added, "reasoning_content": null});
                    choices.push(choice(delta, logprobs(&|meta| self.call.chat_logprobs(meta))));
                }
                if !reason.is_null() {
                    let mut last = choice(json!({"reasoning_content": null}), Value::Null);
                    (last["finish_reason"], last["matched_stop"]) = (reason["type"].clone(), matched(reason));
                    choices.push(last);
                }
            }
        }
        if let Some(last) = choices.last_mut().filter(|_| !reason.is_null()) {
            self.completion_tokens += meta["completion_tokens"].as_u64().unwrap_or_default();
            // The samples of one prompt follow each other, and have it once.
            if (index as u64).is_multiple_of(self.samples()) {
                self.prompt_tokens += meta["prompt_tokens"].as_u64().unwrap_or_default();
            }
            if let Some(capture) = meta.get("capture") {
                last["capture"] = capture.clone();
            }
            if self.call.return_token_ids {
                last["token_ids"] = element["output_ids"].clone();
                last["prompt_token_ids"] = element["prompt_token_ids"].clone();
            }
        }
        // One for all chunks, whichever choice they are of.
        if self.id.is_null() {
            self.id = Call::id(element, self.is_list());
        }
        choices.into_iter().map(|choice| self.chunk(&json!([choice]))).collect()
    }

    /// The chunk behind all others, if the client asked for it.
    pub(crate) fn usage(&self) -> Option<Value> {
        let (prompt, completion) = (self.prompt_tokens, self.completion_tokens);
        self.call.include_usage.then(|| {
            let mut chunk = self.chunk(&json!([]));
            chunk["usage"] = json!({
                "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
                "prompt_tokens_details": null, "reasoning_tokens": 0, "completion_tokens_details": null,
            });
            chunk
        })
    }

    fn samples(&self) -> u64 {
        self.call.body["sampling_params"]["n"].as_u64().unwrap_or(1).max(1)
    }

    fn is_list(&self) -> bool {
        let several =
            |value: &Value| value.as_array().and_then(|items| items.first()).is_some_and(Value::is_array);
        self.samples() > 1 || several(&self.call.body["input_ids"]) || self.call.body["text"].is_array()
    }

    fn chunk(&self, choices: &Value) -> Value {
        let object = match self.call.form {
            Form::Completion => "text_completion",
            Form::Chat => "chat.completion.chunk",
        };
        let mut chunk = json!({"id": self.id, "object": object, "created": self.created, "model": self.call.model, "choices": choices});
        if self.call.form == Form::Completion {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

/// What ended a text, of a `finish_reason`.
fn matched(reason: &Value) -> Value {
    reason.get("matched").cloned().unwrap_or(Value::Null)
}

/// `meta_info` with the log-probabilities of the last `count` tokens only.
fn new_logprobs(meta: &Value, count: usize) -> Value {
    let behind = |key: &str| {
        let last = |list: &Vec<Value>| list[list.len().saturating_sub(count)..].to_vec();
        let list = meta[key].as_array().map(last);
        (key.to_owned(), json!(list.unwrap_or_default()))
    };
    Value::Object(["output_token_logprobs", "output_top_logprobs"].map(behind).into_iter().collect())
}

/// vLLM's request fields for extraction: what the dump covers. A path of the client's choice is refused.
fn extraction(fields: &Map<String, Value>, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let params = match fields.get("kv_transfer_params") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(params)) => params,
        Some(other) => {
            let found = clipped(&other.to_string());
            return Err(invalid(format!("`kv_transfer_params` is {found}; an object is expected")));
        }
    };
    for (name, value) in params {
        match (name.as_str(), value) {
            ("include_output_tokens", Value::Bool(false)) | (_, Value::Null) => {}
            ("include_output_tokens", Value::Bool(true)) => match body.get("capture") {
                None => drop(body.insert("capture".to_owned(), json!({"rows": "all"}))),
                Some(_) => {
                    return Err(invalid(
                        "`kv_transfer_params.include_output_tokens` and `capture` are both given; one is enough".to_owned(),
                    ));
                }
            },
            (name, value) => {
                let (name, found) = (clipped(name), clipped(&value.to_string()));
                return Err(invalid(format!(
                    "`kv_transfer_params.{name}` is {found}; only include_output_tokens, true or false, is accepted: the server chooses the path"
                )));
            }
        }
    }
    Ok(())
}

/// The token IDs of a conversation. `body` is read once more so that the keys of messages and tools keep their order.
pub(crate) fn rendered(
    body: &[u8],
    fields: &Map<String, Value>,
    template: Option<&ChatTemplate>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<i64>, ApiError> {
    #[derive(serde::Deserialize)]
    struct Ordered {
        messages: Vec<minijinja::Value>,
        #[serde(default)]
        tools: Option<minijinja::Value>,
        #[serde(default)]
        chat_template_kwargs: Option<std::collections::BTreeMap<String, minijinja::Value>>,
    }
    let messages = match fields.get("messages") {
        Some(Value::Array(messages)) if messages.is_empty() => {
            return Err(invalid("Messages cannot be empty.".to_owned()));
        }
        Some(Value::Array(messages)) => messages,
        Some(other) => {
            let found = clipped(&other.to_string());
            return Err(invalid(format!("`messages` is {found}; a list of messages is expected")));
        }
        None => return Err(invalid("`messages` is missing; a list of messages is expected".to_owned())),
    };
    let mut joined = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        joined.push(checked(index, message)?);
    }
    let (Some(template), Some(tokenizer)) = (template, tokenizer) else {
        return Err(invalid(
            "messages need a tokenizer and a chat template beside the model; /v1/completions takes a prompt"
                .to_owned(),
        ));
    };
    let ordered: Ordered = serde_json::from_slice(body)?;
    let messages = ordered.messages.into_iter().zip(joined).map(|(message, content)| match content {
        None => message,
        // Templates of text models put strings together.
        Some(text) => {
            let mut entries: Vec<(minijinja::Value, minijinja::Value)> = Vec::new();
            for key in message.try_iter().into_iter().flatten() {
                let value = message.get_item(&key).unwrap_or_default();
                let value = if key.as_str() == Some("content") {
                    minijinja::Value::from(text.clone())
                } else {
                    value
                };
                entries.push((key, value));
            }
            minijinja::Value::from_pairs(entries)
        }
    });
    let choice = fields.get("tool_choice").filter(|choice| !choice.is_null());
    let tools = match choice.map(|choice| choice.as_str()) {
        Some(Some("none")) => None,
        None | Some(Some("auto")) => ordered.tools.filter(|tools| !tools.is_none()),
        Some(_) => {
            let found = choice.map(|choice| clipped(&choice.to_string())).unwrap_or_default();
            return Err(invalid(format!(
                "`tool_choice` is {found}; this server does not force tools and accepts auto and none"
            )));
        }
    };
    let conversation = Conversation {
        messages: minijinja::Value::from(messages.collect::<Vec<_>>()),
        tools,
        add_generation_prompt: match fields.get("add_generation_prompt") {
            None | Some(Value::Null) => true,
            Some(_) => boolean(fields, "add_generation_prompt")?,
        },
        variables: ordered.chat_template_kwargs.unwrap_or_default(),
    };
    let text = template.render(&conversation).map_err(|error| invalid(error.to_string()))?;
    tokenizer.encode_bare(&text).map_err(|error| invalid(error.to_string()))
}

/// Checks one message; the text of its parts, if its content is a list of them.
fn checked(index: usize, message: &Value) -> Result<Option<String>, ApiError> {
    let wrong = |what: String| invalid(format!("`messages[{index}]`{what}"));
    let Value::Object(message) = message else {
        let found = clipped(&message.to_string());
        return Err(wrong(format!(" is {found}; an object with role and content is expected")));
    };
    const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
    match message.get("role").and_then(Value::as_str) {
        Some(role) if ROLES.contains(&role) => {}
        role => {
            let found = role.map_or_else(|| "missing".to_owned(), |role| format!("{:?}", clipped(role)));
            return Err(wrong(format!(".role is {found}; one of {} is expected", ROLES.join(", "))));
        }
    }
    match message.get("content") {
        Some(Value::String(_)) => Ok(None),
        None | Some(Value::Null) if message.contains_key("tool_calls") => Ok(None),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match part["type"].as_str() {
                Some("text") => part["text"].as_str().map(str::to_owned),
                _ => None,
            };
            let texts: Option<Vec<String>> = parts.iter().map(text).collect();
            let texts = texts.ok_or_else(|| {
                wrong(".content has a part that is no text; only texts are accepted".to_owned())
            });
            Ok(Some(texts?.join(" ")))
        }
        _ => Err(wrong(".content is missing; a text is expected".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::needless_pass_by_value, reason = "a test hands over what it just made")]
    fn completion(body: Value) -> Result<Call, ApiError> {
        Call::completion(body.to_string().as_bytes(), "own")
    }

    #[test]
    fn a_completion_becomes_a_body_of_generate() {
        let call = completion(json!({
            "model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0, "seed": 7, "stop": ["x"], "min_tokens": 1,
            "n": 2, "logprobs": 2, "echo": true, "rid": "r", "user": "u", "return_token_ids": true,
        }));
        let expected = json!({
            "input_ids": [1, 2], "rid": "r", "return_logprob": true, "top_logprobs_num": 2, "return_text_in_logprobs": true,
            "logprob_start_len": 0, "return_prompt_token_ids": true,
            "sampling_params": {"max_new_tokens": 3, "temperature": 0, "sampling_seed": 7, "stop": ["x"], "min_new_tokens": 1, "n": 2},
        });
        assert_eq!(call.unwrap().body, expected);
        assert_eq!(completion(json!({"prompt": "a"})).unwrap().body["sampling_params"]["max_new_tokens"], 16);
    }

    #[test]
    fn vllms_extraction_field_chooses_rows_and_no_path() {
        let ask = |params: Value| completion(json!({"prompt": [1], "kv_transfer_params": params}));
        assert_eq!(
            ask(json!({"include_output_tokens": true})).unwrap().body["capture"],
            json!({"rows": "all"})
        );
        assert_eq!(ask(json!({"include_output_tokens": false})).unwrap().body.get("capture"), None);
        let error = ask(json!({"hidden_states_path": "/x"})).unwrap_err().to_string();
        assert!(
            error.contains("`kv_transfer_params.hidden_states_path`") && error.contains("the server chooses"),
            "{error}"
        );
    }

    #[test]
    fn a_key_that_decides_what_is_kept_may_not_be_there_twice() {
        for (body, key) in [
            (r#"{"prompt":[5],"rid":"a","rid":"b"}"#, "rid"),
            (r#"{"prompt":[5],"prompt":[6]}"#, "prompt"),
            (r#"{"prompt":[5],"r\u0069d":"a","rid":"b"}"#, "rid"),
            (r#"{"prompt":[5],"capture":{"rows":"all","rows":"prompt"}}"#, "rows"),
            (r#"{"prompt":[[5],[6]],"capture":[true,{"points":[1],"points":[2]}]}"#, "points"),
            (
                r#"{"prompt":[5],"kv_transfer_params":{"include_output_tokens":true,"include_output_tokens":false}}"#,
                "include_output_tokens",
            ),
        ] {
            for error in [
                Call::completion(body.as_bytes(), "own").unwrap_err(),
                Call::chat(body.as_bytes(), "own", None, None).unwrap_err(),
            ] {
                assert!(error.to_string().contains(&format!("`{key}` is given twice")), "{body}: {error}");
                assert_eq!(error.status(), 400);
            }
        }
        // Elsewhere a name may come again in another object.
        let body = r#"{"prompt":[5],"capture":[{"rows":"all"},{"rows":"all"}]}"#;
        assert!(Call::completion(body.as_bytes(), "own").is_ok());
        for body in ["[]", "5", "null"] {
            let error = Call::completion(body.as_bytes(), "own").unwrap_err();
            assert!(error.to_string().contains("a JSON object"), "{error}");
        }
    }

    #[test]
    fn of_several_prompts_each_choice_says_where_its_states_are() {
        let element = |id: &str, path: Option<&str>| {
            let mut meta = json!({"id": id, "finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": 1});
            if let Some(path) = path {
                meta["capture"] = json!({"path": path});
            }
            json!({"text": "", "output_ids": [1], "meta_info": meta})
        };
        let call = completion(json!({"prompt": [[5], [6], [7]]})).unwrap();
        let reply = call.reply(
            &json!([element("c_0", None), element("c_1", Some("/d/b")), element("c_2", Some("/d/c"))]),
            0,
            |_| String::new(),
        );
        assert_eq!((reply.get("kv_transfer_params"), reply["metadata"].get("capture")), (None, None));
        let captures: Vec<_> =
            (0..3).map(|index| reply["choices"][index]["capture"]["path"].clone()).collect();
        assert_eq!(captures, [json!(null), json!("/d/b"), json!("/d/c")]);
        assert_eq!(reply["choices"][2]["id"], "c_2");
        // Of one prompt the reply says it as vLLM does, whatever the number of samples.
        let call = completion(json!({"prompt": [5], "n": 2})).unwrap();
        let reply =
            call.reply(&json!([element("c_0", Some("/d/a")), element("c_1", None)]), 0, |_| String::new());
        assert_eq!(reply["kv_transfer_params"]["hidden_states_path"], "/d/a");
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name_and_what_has_no_effect_is_not() {
        for (field, value) in [
            ("response_format", json!({"type": "json_object"})),
            ("suffix", json!("x")),
            ("best_of", json!(4)),
        ] {
            let error = completion(json!({"prompt": "a", field: value})).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{field}` is ")), "{error}");
        }
        let legal = json!({"prompt": "a", "stream": false, "response_format": {"type": "text"}, "best_of": 1, "store": true});
        assert!(completion(legal).is_ok());
        for (body, part) in [
            (json!({}), "`prompt` is missing"),
            (json!({"prompt": ""}), "`prompt` cannot be empty"),
            (json!({"prompt": []}), "`prompt` cannot be empty"),
            (json!({"prompt": 5}), "`prompt` is 5"),
            (json!({"prompt": "a", "max_tokens": 0}), "`max_tokens` is 0; a number from 1"),
            (json!({"prompt": "a", "logprobs": true}), "`logprobs` is true"),
            (json!({"prompt": "a", "echo": 1}), "`echo` is 1"),
        ] {
            let error = completion(body).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn messages_are_checked_one_by_one() {
        let chat = |messages: Value| {
            Call::chat(json!({"messages": messages}).to_string().as_bytes(), "own", None, None)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(chat(json!([])), "Messages cannot be empty.");
        assert!(chat(json!("x")).starts_with("`messages` is \"x\""));
        assert!(chat(json!([{"role": "user", "content": "a"}, 5])).starts_with("`messages[1]` is 5"));
        assert!(
            chat(json!([{"role": "nobody", "content": "a"}])).starts_with("`messages[0]`.role is \"nobody\"")
        );
        assert!(chat(json!([{"role": "user"}])).starts_with("`messages[0]`.content is missing"));
        let image = json!([{"role": "user", "content": [{"type": "image_url"}]}]);
        assert!(chat(image).starts_with("`messages[0]`.content has a part that is no text"));
        assert!(
            chat(json!([{"role": "user", "content": "a"}])).contains("need a tokenizer and a chat template")
        );
    }
}
