//! A JSON object inside `config.json`, read key by key.

use serde_json::{Map, Value};

use super::raw::shortened;
use crate::LoadError;

/// An object read key by key, so that what was not read can be refused: a key this code does not know may change the
/// numbers.
pub(super) struct Keys<'a> {
    name: String,
    object: &'a Map<String, Value>,
    seen: Vec<&'static str>,
}

impl<'a> Keys<'a> {
    /// The object that is called `name` in messages.
    pub(super) fn new(name: impl Into<String>, object: &'a Map<String, Value>) -> Self {
        Self { name: name.into(), object, seen: Vec::new() }
    }

    /// Whether the key is there, null or not.
    pub(super) fn contains(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// The value, if it is there and not null.
    pub(super) fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.seen.push(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Keys that say nothing about the numbers of a forward pass over the stored weights.
    pub(super) fn pass_over(&mut self, keys: &[&'static str]) {
        self.seen.extend(keys);
    }

    pub(super) fn number(&mut self, key: &'static str) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refuse(key, shortened(value), "a number"))
    }

    pub(super) fn positive(&mut self, key: &'static str) -> Result<Option<f64>, LoadError> {
        let path = self.path(key);
        self.number(key)?.map(|value| positive(&path, value)).transpose()
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<&'a str>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.refuse(key, shortened(value), "a string"))
    }

    pub(super) fn flag(&mut self, key: &'static str) -> Result<Option<bool>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.refuse(key, shortened(value), "true and false"))
    }

    pub(super) fn object(&mut self, key: &'static str) -> Result<Option<&'a Map<String, Value>>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.refuse(key, shortened(value), "an object"))
    }

    /// A list of strings.
    pub(super) fn texts(&mut self, key: &'static str) -> Result<Option<Vec<String>>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let texts = value.as_array().and_then(|list| list.iter().map(text).collect::<Option<Vec<_>>>());
        texts.map(Some).ok_or_else(|| self.refuse(key, shortened(value), "a list of strings"))
    }

    /// Refuses what was not read. A key without rope type, say, is not plain rope.
    pub(super) fn refuse_the_rest(&self, supported: &str) -> Result<(), LoadError> {
        let unread = |(key, value): &(&String, &Value)| !self.seen.contains(&key.as_str()) && !is_off(value);
        match self.object.iter().find(unread) {
            Some((key, value)) => Err(self.refuse(key, shortened(value), supported)),
            None => Ok(()),
        }
    }

    pub(super) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    pub(super) fn refuse(&self, key: &str, value: impl ToString, supported: impl ToString) -> LoadError {
        LoadError::unsupported(&self.path(key), value, supported)
    }

    pub(super) fn missing(&self, key: &str, needed: &str) -> LoadError {
        LoadError::MissingKey { key: self.path(key), needed: needed.to_owned() }
    }
}

/// Values that switch nothing on.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    }
}

pub(super) fn positive(key: &str, value: f64) -> Result<f64, LoadError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(LoadError::unsupported(key, value, "a positive number")),
    }
}
