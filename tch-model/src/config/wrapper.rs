//! Configs of models that also see: the text model's own config lies inside, under `text_config`.

use serde_json::{Map, Value};

use super::raw::shortened;
use crate::LoadError;

/// The one wrapper whose text model this code runs.
const WRAPPER: (&str, &str) = ("KimiK25ForConditionalGeneration", "kimi_k25");

/// What the wrapper says for the text model too, where that does not say it itself.
const INHERITED: &[&str] =
    &["bos_token_id", "dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype"];
/// Of these, what must not be said twice with different values: it changes the numbers.
const DECISIVE: &[&str] = &["quantization_config", "tie_word_embeddings"];
/// What else a wrapper may hold: about images, or about nothing that is computed.
const OUTER: &[&str] = &[
    "architectures",
    "auto_map",
    "ignore_index",
    "model_type",
    "pad_token_id",
    "text_config",
    "transformers_version",
];
const ABOUT_IMAGES: &[&str] = &["image", "media", "projector", "video", "vision", "vit_"];

/// The text model's config: the one inside of a wrapper, or `config` itself.
pub(super) fn unwrap(mut config: Map<String, Value>) -> Result<Map<String, Value>, LoadError> {
    let names = config.get("architectures").and_then(Value::as_array);
    let is_wrapper = match names {
        Some(names) => names.iter().any(|name| name == WRAPPER.0),
        None => config.get("model_type").is_some_and(|name| name == WRAPPER.1),
    };
    let text = match (is_wrapper, config.remove("text_config")) {
        (false, None | Some(Value::Null)) => return Ok(config),
        (false, Some(_)) => {
            let found = config.get("architectures").or(config.get("model_type")).map(shortened);
            let supported = format!("{} around a `text_config`", WRAPPER.0);
            return Err(LoadError::unsupported("architectures", found.unwrap_or_default(), supported));
        }
        (true, text) => text,
    };
    let Some(Value::Object(mut text)) = text else {
        return Err(LoadError::MissingKey {
            key: "text_config".to_owned(),
            needed: format!("it holds the text model of {}", WRAPPER.0),
        });
    };
    for (key, value) in &config {
        if INHERITED.contains(&key.as_str()) {
            inherit(&mut text, key, value)?;
            continue;
        }
        let known = OUTER.contains(&key.as_str()) || ABOUT_IMAGES.iter().any(|word| key.contains(word));
        if !known && !key.starts_with('_') && !super::keys::is_off(value) {
            let supported =
                "no such key beside `text_config`; if it does not change the text model, remove it";
            return Err(LoadError::unsupported(key, shortened(value), supported));
        }
    }
    // A text config without a name is one of this family; Kimi calls it by its own.
    let named =
        ["architectures", "model_type"].iter().any(|&key| text.get(key).is_some_and(|v| !v.is_null()));
    if !named {
        text.insert("model_type".to_owned(), "kimi_k2".into());
    }
    Ok(text)
}

fn inherit(text: &mut Map<String, Value>, key: &str, value: &Value) -> Result<(), LoadError> {
    match text.get(key) {
        _ if value.is_null() => {}
        None | Some(Value::Null) => {
            text.insert(key.to_owned(), value.clone());
        }
        Some(own) if DECISIVE.contains(&key) && own != value => {
            let supported = format!("the same as `text_config.{key}` ({})", shortened(own));
            return Err(LoadError::unsupported(key, shortened(value), supported));
        }
        Some(_) => {}
    }
    Ok(())
}
