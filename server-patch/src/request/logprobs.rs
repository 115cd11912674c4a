//! The fields of a request that ask for log-probabilities.

use serde_json::Value;

use crate::error::ApiError;

/// Most tokens to give with each.
const MOST_TOP: u64 = 1024;

/// What one prompt asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogprobRequest {
    /// The first position of the prompt that is asked about; `None` for none of them.
    pub prompt_from: Option<usize>,
    /// How many of the most likely tokens to give with each.
    pub top: usize,
    /// Tokens to give with each.
    pub token_ids: Option<Vec<i64>>,
    /// Whether tokens come with their texts.
    pub text: bool,
}

/// The fields as sent: each may be null, one for all prompts, or a list with one a prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogprobFields {
    pub(crate) wanted: Value,
    pub(crate) start: Value,
    pub(crate) top: Value,
    pub(crate) token_ids: Value,
    pub(crate) text: bool,
}

impl LogprobFields {
    /// One entry per prompt.
    pub(crate) fn check(self, batch: bool, count: usize) -> Result<Vec<Option<LogprobRequest>>, ApiError> {
        let wanted = per_prompt("return_logprob", self.wanted, batch, count, Value::is_array)?;
        let start = per_prompt("logprob_start_len", self.start, batch, count, Value::is_array)?;
        let top = per_prompt("top_logprobs_num", self.top, batch, count, Value::is_array)?;
        // A list of IDs is one value; a list of lists has one a prompt.
        let lists = |value: &Value| {
            value.as_array().is_some_and(|list| list.iter().any(|item| item.is_array() || item.is_null()))
        };
        let token_ids = per_prompt("token_ids_logprob", self.token_ids, batch, count, lists)?;
        let rows = wanted.into_iter().zip(start).zip(top).zip(token_ids);
        rows.map(|(((wanted, start), top), token_ids)| {
            let asked = match wanted {
                Value::Null => false,
                Value::Bool(asked) => asked,
                other => return Err(wrong("return_logprob", &other, "true or false")),
            };
            let prompt_from = match start.as_i64() {
                _ if start.is_null() => None,
                Some(-1) => None,
                Some(start) if start >= 0 => usize::try_from(start).ok(),
                _ => return Err(wrong("logprob_start_len", &start, "-1 or a position from 0")),
            };
            let top = match top.as_u64() {
                _ if top.is_null() => 0,
                Some(top) if top <= MOST_TOP => usize::try_from(top).unwrap_or_default(),
                _ => {
                    return Err(wrong("top_logprobs_num", &top, &format!("a number from 0 to {MOST_TOP}")));
                }
            };
            let token_ids = match token_ids {
                Value::Null => None,
                other => {
                    let ids = other.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
                    let ids: Option<Vec<i64>> = ids;
                    Some(ids.ok_or_else(|| wrong("token_ids_logprob", &other, "a list of token IDs"))?)
                }
            };
            Ok(asked.then_some(LogprobRequest { prompt_from, top, token_ids, text: self.text }))
        })
        .collect()
    }
}

/// The value for each prompt, of a field that may be a list of them where `is_list` says so.
fn per_prompt(
    name: &str,
    value: Value,
    batch: bool,
    count: usize,
    is_list: impl Fn(&Value) -> bool,
) -> Result<Vec<Value>, ApiError> {
    match value {
        Value::Array(values) if is_list(&Value::Array(values.clone())) => {
            if !batch {
                return Err(ApiError::Invalid(format!(
                    "`{name}` is a list, but there is a single prompt; lists go with a list of prompts"
                )));
            }
            if values.len() != count {
                let found = values.len();
                return Err(ApiError::Invalid(format!(
                    "`{name}` is a list of {found} for a batch of {count} prompts; one each is expected"
                )));
            }
            Ok(values)
        }
        value => Ok(vec![value; count]),
    }
}

fn wrong(name: &str, found: &Value, accepted: &str) -> ApiError {
    let found = crate::json::clipped(&found.to_string());
    ApiError::WrongType(format!("`{name}` is {found}; {accepted} is expected"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(json: &Value) -> LogprobFields {
        let of = |key: &str| json.get(key).cloned().unwrap_or_default();
        let (wanted, start, top) = (of("return_logprob"), of("logprob_start_len"), of("top_logprobs_num"));
        LogprobFields { wanted, start, top, token_ids: of("token_ids_logprob"), text: false }
    }

    #[test]
    fn one_value_is_for_all_prompts_and_a_list_has_one_each() {
        let one = |prompt_from, top, token_ids: Option<Vec<i64>>| {
            Some(LogprobRequest { prompt_from, top, token_ids, text: false })
        };
        assert_eq!(fields(&json!({})).check(false, 1).unwrap(), [None]);
        let all = json!({"return_logprob": true, "logprob_start_len": 2, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]});
        let expected = one(Some(2), 3, Some(vec![5, 6]));
        assert_eq!(fields(&all).check(true, 2).unwrap(), [expected.clone(), expected]);
        let each = json!({"return_logprob": [true, false, true], "logprob_start_len": [-1, 0, 0], "token_ids_logprob": [[1], null, [2]]});
        let found = fields(&each).check(true, 3).unwrap();
        assert_eq!(found, [one(None, 0, Some(vec![1])), None, one(Some(0), 0, Some(vec![2]))]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (json, batch, part) in [
            (json!({"return_logprob": "yes"}), false, "`return_logprob` is \"yes\"; true or false"),
            (
                json!({"return_logprob": [true]}),
                false,
                "`return_logprob` is a list, but there is a single prompt",
            ),
            (json!({"return_logprob": [true]}), true, "`return_logprob` is a list of 1 for a batch of 2"),
            (json!({"logprob_start_len": -2}), true, "`logprob_start_len` is -2; -1 or a position"),
            (json!({"top_logprobs_num": -1}), true, "`top_logprobs_num` is -1; a number from 0"),
            (json!({"top_logprobs_num": 1.5}), true, "`top_logprobs_num` is 1.5"),
            (
                json!({"token_ids_logprob": ["a"]}),
                true,
                "`token_ids_logprob` is [\"a\"]; a list of token IDs",
            ),
            (json!({"token_ids_logprob": 5}), true, "`token_ids_logprob` is 5"),
        ] {
            let error = fields(&json).check(batch, if batch { 2 } else { 1 }).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
