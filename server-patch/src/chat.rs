//! Chat templates: a conversation to the text that the model was trained on.
//!
//! Templates are Jinja as transformers runs it: blocks are trimmed, loops can be broken, Python's methods of strings, lists and
//! dicts work, and `raise_exception`, `strftime_now` and `tojson` exist.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::tokenizer::{SpecialTokens, TokenizerConfig, TokenizerError};

/// The templates of a checkpoint.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: SpecialTokens,
}

/// What to render.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The messages, as the client sent them.
    pub messages: Value,
    /// Tools the model may call; undefined if there are none.
    pub tools: Option<Value>,
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// More variables of the template.
    pub variables: BTreeMap<String, Value>,
}

/// Why a conversation has no text.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file.
    #[error("{}: {reason}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint's tokenizer config.
    #[error(transparent)]
    Config(#[from] TokenizerError),
    /// The template refused the conversation.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed on the conversation.
    #[error("the chat template cannot be rendered with these messages: {0}")]
    Failed(String),
}

const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

impl ChatTemplate {
    /// Reads the templates of the checkpoint in `dir`: `chat_template.jinja` and `additional_chat_templates/`, else those in
    /// `tokenizer_config.json`. `None` if there are none.
    ///
    /// # Errors
    /// When there is one that cannot be read or parsed.
    pub fn read(dir: &Path) -> Result<Option<Self>, ChatError> {
        let config = TokenizerConfig::read(dir)?;
        let mut templates: BTreeMap<String, (PathBuf, String)> = BTreeMap::new();
        for (name, template) in config.chat_templates() {
            templates.insert(name, (dir.join("tokenizer_config.json"), template));
        }
        // Files are the newer form, and win.
        let mut files = vec![(DEFAULT.to_owned(), dir.join("chat_template.jinja"))];
        let failed = |path: &Path, error: &dyn fmt::Display| ChatError::File {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let more = dir.join("additional_chat_templates");
        match fs::read_dir(&more) {
            Ok(entries) => {
                for entry in entries {
                    let path = entry.map_err(|error| failed(&more, &error))?.path();
                    if path.extension().is_some_and(|extension| extension == "jinja") {
                        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                        files.push((name, path));
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&more, &error)),
        }
        for (name, path) in files {
            match fs::read_to_string(&path) {
                Ok(template) => drop(templates.insert(name, (path, template))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(&path, &error)),
            }
        }
        if templates.is_empty() {
            return Ok(None);
        }
        let mut environment = environment();
        for (name, (path, template)) in templates {
            environment.add_template_owned(name, template).map_err(|error| failed(&path, &chain(&error)))?;
        }
        Ok(Some(Self { environment, special_tokens: config.special_tokens() }))
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// [`ChatError::Refused`] where the template raises an exception, [`ChatError::Failed`] where it does not fit.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ChatError> {
        let named = |name| self.environment.get_template(name).ok();
        let with_tools = conversation.tools.as_ref().and_then(|_| named(WITH_TOOLS));
        let template = with_tools.or_else(|| named(DEFAULT)).ok_or_else(|| {
            let names: Vec<&str> = self.environment.templates().map(|(name, _)| name).collect();
            ChatError::Failed(format!("there is none called `{DEFAULT}`, only {}", names.join(", ")))
        })?;
        let mut variables = conversation.variables.clone();
        let SpecialTokens { bos, eos, unk, pad } = &self.special_tokens;
        // A token that the model does not have is undefined, which renders as nothing.
        for (name, token) in [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)]
        {
            if let Some(token) = token {
                variables.insert(name.to_owned(), Value::from(token.clone()));
            }
        }
        variables.insert("messages".to_owned(), conversation.messages.clone());
        variables.insert("tools".to_owned(), conversation.tools.clone().unwrap_or(Value::from(())));
        variables.insert("documents".to_owned(), Value::from(()));
        let add = Value::from(conversation.add_generation_prompt);
        variables.insert("add_generation_prompt".to_owned(), add);
        template.render(Value::from_pairs(variables)).map_err(|error| match raised(&error) {
            Some(message) => ChatError::Refused(message),
            None => ChatError::Failed(chain(&error)),
        })
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the default ones"));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format));
    environment.add_filter("tojson", to_json);
    environment
}

/// Marks what a template said by `raise_exception`.
const RAISED: &str = "raised: ";

/// What the template said, if it refused by itself.
fn raised(error: &minijinja::Error) -> Option<String> {
    let mut next: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = next {
        let detail = error.downcast_ref::<minijinja::Error>().and_then(minijinja::Error::detail);
        if let Some(message) = detail.and_then(|detail| detail.strip_prefix(RAISED)) {
            return Some(message.to_owned());
        }
        next = error.source();
    }
    None
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

/// The present date and time in UTC, by the directives of `strftime` that templates use.
fn strftime(format: &str) -> Result<String, minijinja::Error> {
    let now = time::OffsetDateTime::now_utc();
    let unknown = |directive: String| {
        let text = format!("strftime_now does not know `%{directive}`");
        minijinja::Error::new(ErrorKind::InvalidOperation, text)
    };
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let directive = rest.next().map(String::from).unwrap_or_default();
        text.push_str(&match directive.as_str() {
            "Y" => now.year().to_string(),
            "m" => format!("{:02}", u8::from(now.month())),
            "d" => format!("{:02}", now.day()),
            "H" => format!("{:02}", now.hour()),
            "M" => format!("{:02}", now.minute()),
            "S" => format!("{:02}", now.second()),
            "B" => now.month().to_string(),
            "b" => now.month().to_string()[..3].to_owned(),
            "A" => now.weekday().to_string(),
            "a" => now.weekday().to_string()[..3].to_owned(),
            "%" => "%".to_owned(),
            _ => return Err(unknown(directive)),
        });
    }
    Ok(text)
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what transformers' filter is: a space
/// behind commas and colons, `indent`, `separators` and `sort_keys` where given.
#[allow(clippy::needless_pass_by_value, reason = "a filter is handed its options")]
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys: bool = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii: bool = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        None => (item.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            let text = "`separators` of tojson are two strings";
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, text));
        }
    };
    let json = Json { indent, sort_keys, ensure_ascii, item, key };
    let mut text = String::new();
    json.write(value, 0, &mut text)?;
    Ok(Value::from_safe_string(text))
}

struct Json {
    indent: Option<usize>,
    sort_keys: bool,
    ensure_ascii: bool,
    item: String,
    key: String,
}

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), minijinja::Error> {
        match value.kind() {
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let entries = keys.into_iter().map(|key| Ok((Some(key.to_string()), value.get_item(&key)?)));
                let entries: Vec<_> = entries.collect::<Result<_, minijinja::Error>>()?;
                self.collection(('{', '}'), entries, depth, out)
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.collection(('[', ']'), items, depth, out)
            }
            ValueKind::Undefined => Err(minijinja::Error::new(
                ErrorKind::InvalidOperation,
                "an undefined value cannot be written as JSON",
            )),
            _ => {
                let scalar = serde_json::to_string(value)
                    .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
                self.text(&scalar, out);
                Ok(())
            }
        }
    }

    fn collection(
        &self,
        (open, close): (char, char),
        entries: Vec<(Option<String>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), minijinja::Error> {
        out.push(open);
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        let empty = entries.is_empty();
        for (index, (key, value)) in entries.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            line(depth + 1, out);
            if let Some(key) = key {
                self.text(&serde_json::to_string(&key).expect("a string is JSON"), out);
                out.push_str(&self.key);
            }
            self.write(&value, depth + 1, out)?;
        }
        if !empty {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn text(&self, json: &str, out: &mut String) {
        if !self.ensure_ascii {
            // Python also escapes DEL not; what serde_json escapes, Python does too, in the same way.
            out.push_str(json);
            return;
        }
        for character in json.chars() {
            if character.is_ascii() {
                out.push(character);
            } else {
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        ChatTemplate::read(dir.path()).unwrap().unwrap()
    }

    fn render(source: &str, variables: &str) -> Result<String, ChatError> {
        let conversation =
            Conversation { variables: serde_json::from_str(variables).unwrap(), ..Conversation::default() };
        template(source).render(&conversation)
    }

    #[test]
    fn json_is_written_as_python_does() {
        let variables = r#"{"x": {"b": [1, 2.5, "ä\n\"", null, true], "a": {}, "c": []}}"#;
        assert_eq!(
            render("{{ x | tojson }}", variables).unwrap(),
            r#"{"b": [1, 2.5, "ä\n\"", null, true], "a": {}, "c": []}"#
        );
        assert_eq!(
            render("{{ x | tojson(indent=2, sort_keys=true) }}", variables).unwrap(),
            "{\n  \"a\": {},\n  \"b\": [\n    1,\n    2.5,\n    \"ä\\n\\\"\",\n    null,\n    true\n  ],\n  \"c\": []\n}"
        );
        assert_eq!(render("{{ x.b[2] | tojson(ensure_ascii=true) }}", variables).unwrap(), r#""\u00e4\n\"""#);
    }

    #[test]
    fn a_template_refuses_in_its_own_words_and_a_misfit_says_what() {
        let refused = render("{{ raise_exception('roles must alternate') }}", "{}").unwrap_err();
        assert_eq!(refused.to_string(), "the chat template refuses these messages: roles must alternate");
        let failed = render("{{ x.y.z }}", r#"{"x": 1}"#).unwrap_err().to_string();
        assert!(failed.starts_with("the chat template cannot be rendered"), "{failed}");
    }

    #[test]
    fn dates_loops_and_pythons_methods_work() {
        assert_eq!(render("{{ strftime_now('%Y')|length }}%", "{}").unwrap(), "4%");
        assert!(render("{{ strftime_now('%Q') }}", "{}").unwrap_err().to_string().contains("`%Q`"));
        let source = "{% for k, v in x.items() %}{% if v == 2 %}{% continue %}{% endif %}{{ k.upper().strip() }}{% endfor %}";
        assert_eq!(render(source, r#"{"x": {"b ": 1, "c": 2, " a": 3}}"#).unwrap(), "BA");
        assert_eq!(render("{{ x.split('</t>')[-1] }}", r#"{"x": "a</t>b"}"#).unwrap(), "b");
        // Blocks are trimmed, as transformers sets Jinja.
        assert_eq!(render("a\n  {% if true %}\nb\n  {% endif %}\nc", "{}").unwrap(), "a\nb\nc");
    }

    #[test]
    fn files_win_over_the_config_and_tools_choose_their_template() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert!(ChatTemplate::read(dir.path()).unwrap().is_none());
        let named = r#"{"bos_token": {"content": "<s>"}, "chat_template": [
            {"name": "default", "template": "{{ bos_token }}plain"}, {"name": "tool_use", "template": "tools"}]}"#;
        write("tokenizer_config.json", named);
        let render = |tools: Option<Value>| {
            let template = ChatTemplate::read(dir.path()).unwrap().unwrap();
            template.render(&Conversation { tools, ..Conversation::default() }).unwrap()
        };
        assert_eq!(render(None), "<s>plain");
        assert_eq!(render(Some(Value::from(vec![1]))), "tools");
        write("chat_template.jinja", "file{{ eos_token }}");
        assert_eq!(render(None), "file");
        write("chat_template.jinja", "{% if %}");
        let error = ChatTemplate::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("chat_template.jinja"), "{error}");
    }
}
