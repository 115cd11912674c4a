//! One way to be configured for all binaries: flag, then environment variable, then `--config FILE.toml`, then default.
//!
//! A clap [`Parser`] describes the flags; this crate adds the two other sources. A variable is the prefix and the flag's
//! name in capitals (`TETHER_SERVER_MAX_BATCH_TOKENS` for `--max-batch-tokens`), a key in the file is the flag's name
//! (`max-batch-tokens`). An unknown variable with the prefix, or an unknown key, is an error: a misspelt setting must not
//! pass for the default. A bad value is reported with where it came from, its text, and what would have been accepted.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, Parser};

/// Why the settings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The command line is wrong, or `--help` or `--version` was asked for: clap's own message and exit code.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// A variable with the program's prefix names no flag.
    #[error("unknown environment variable {name}; known are {known}")]
    UnknownVariable {
        /// The variable.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// A key in the file names no flag.
    #[error("unknown key `{key}` in {}; known are {known}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Those that exist.
        known: String,
    },
    /// A value from a variable or from the file is not acceptable.
    #[error("{origin}: {reason}")]
    BadValue {
        /// Where it came from.
        origin: String,
        /// Its text, and what would have been accepted.
        reason: String,
    },
    /// The file given with `--config` cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the file system answered.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not TOML: {message}", path.display())]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        message: String,
    },
}

/// Reads the settings of this process, or prints what is wrong with them and exits with 2 (0 after `--help`).
pub fn parse<P: Parser>(prefix: &str) -> P {
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    match from_sources(prefix, std::env::args_os(), variables) {
        Ok(settings) => settings,
        Err(SettingsError::CommandLine(error)) => error.exit(),
        Err(error) => {
            let cause =
                std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            eprintln!("error: {error}{cause}");
            std::process::exit(2);
        }
    }
}

/// Reads the settings from `arguments` (the program's name first), `variables` whose names begin with `prefix`, and the
/// file that `--config` names. With subcommands, variables and keys set the flags of the one that is run; those that
/// only another one has are left alone.
///
/// # Errors
/// See [`SettingsError`].
pub fn from_sources<P: Parser>(
    prefix: &str,
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    variables: impl IntoIterator<Item = (String, OsString)>,
) -> Result<P, SettingsError> {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    // What stands on the command line, required flags aside: another source may give those.
    let lenient = lenient(P::command());
    let matches = lenient.clone().try_get_matches_from(&arguments)?;
    let (command, matches) = innermost(&lenient, &matches);
    let flags = Flags::of(command, &lenient);

    let mut given: BTreeMap<String, Given> = BTreeMap::new();
    let mut from_variables = BTreeMap::new();
    for (name, value) in variables {
        let Some(rest) = name.strip_prefix(prefix) else { continue };
        let flag = rest.to_lowercase().replace('_', "-");
        if !flags.everywhere.contains(&flag) {
            let known =
                flags.here.keys().map(|flag| variable_name(prefix, flag)).collect::<Vec<_>>().join(", ");
            return Err(SettingsError::UnknownVariable { name, known });
        }
        let value = value.to_str().map(str::to_owned).ok_or_else(|| SettingsError::BadValue {
            origin: name.clone(),
            reason: "the value is not UTF-8".into(),
        })?;
        let values = flags.split(&flag, &value);
        from_variables.insert(flag, Given { origin: name, values });
    }
    let config = on_command_line(matches, "config")
        .then(|| matches.get_one::<PathBuf>("config").cloned())
        .flatten()
        .or_else(|| from_variables.get("config").and_then(|given| given.values.first()).map(PathBuf::from));
    if let Some(path) = config {
        given.extend(read_file(&path, &flags)?);
    }
    given.extend(from_variables);

    let mut complete = arguments;
    for (flag, Given { origin, values }) in given {
        let Some(switch) = flags.here.get(&flag) else { continue };
        if on_command_line(matches, &switch.id) {
            continue;
        }
        let words = switch
            .words(&flag, &values)
            .map_err(|reason| SettingsError::BadValue { origin: origin.clone(), reason })?;
        check(command, &words).map_err(|reason| SettingsError::BadValue { origin, reason })?;
        complete.extend(words.into_iter().map(OsString::from));
    }
    Ok(P::try_parse_from(complete)?)
}

/// The values of one flag, from one source.
struct Given {
    origin: String,
    values: Vec<String>,
}

/// A flag as the other sources need to know it.
struct Switch {
    id: String,
    takes_value: bool,
    repeats: bool,
}

impl Switch {
    /// The flag on a command line, or why the values do not suit it.
    fn words(&self, flag: &str, values: &[String]) -> Result<Vec<String>, String> {
        if self.takes_value {
            return Ok(values.iter().map(|value| format!("--{flag}={value}")).collect());
        }
        match values.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["true" | "1"] => Ok(vec![format!("--{flag}")]),
            ["false" | "0"] => Ok(vec![]),
            _ => Err(format!("`{}` is not accepted; `true` or `false` is", values.join(","))),
        }
    }
}

struct Flags {
    /// Those of the command that is run.
    here: BTreeMap<String, Switch>,
    /// Those of any command of the program.
    everywhere: Vec<String>,
}

impl Flags {
    fn of(command: &Command, program: &Command) -> Self {
        let switches = |command: &Command| -> Vec<(String, Switch)> {
            command
                .get_arguments()
                .filter(|arg| !matches!(arg.get_action(), ArgAction::Help | ArgAction::Version))
                .filter_map(|arg| {
                    let switch = Switch {
                        id: arg.get_id().to_string(),
                        takes_value: arg.get_action().takes_values(),
                        repeats: matches!(arg.get_action(), ArgAction::Append),
                    };
                    Some((arg.get_long()?.to_owned(), switch))
                })
                .collect()
        };
        let commands = std::iter::once(program).chain(program.get_subcommands());
        let everywhere =
            commands.flat_map(|command| switches(command).into_iter().map(|(flag, _)| flag)).collect();
        Self { here: switches(command).into_iter().collect(), everywhere }
    }

    /// A variable holds one value, or the values of a flag that may be repeated, with white space between them.
    fn split(&self, flag: &str, value: &str) -> Vec<String> {
        match self.here.get(flag) {
            Some(switch) if switch.repeats => value.split_whitespace().map(str::to_owned).collect(),
            _ => vec![value.to_owned()],
        }
    }
}

fn variable_name(prefix: &str, flag: &str) -> String {
    format!("{prefix}{}", flag.to_uppercase().replace('-', "_"))
}

/// `command` and its subcommands, with no flag required: another source may give it.
fn lenient(command: Command) -> Command {
    command.mut_args(|arg| arg.required(false)).mut_subcommands(lenient)
}

/// The subcommand that is run, or the program itself.
fn innermost<'a>(command: &'a Command, matches: &'a ArgMatches) -> (&'a Command, &'a ArgMatches) {
    match matches.subcommand() {
        Some((name, matches)) => {
            let command = command.find_subcommand(name).expect("clap matched a subcommand of the program");
            innermost(command, matches)
        }
        None => (command, matches),
    }
}

fn on_command_line(matches: &ArgMatches, id: &str) -> bool {
    matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// Parses the words of one flag alone, so that what is wrong with them can be laid to their source.
fn check(command: &Command, words: &[String]) -> Result<(), String> {
    // Relations between flags ("requires", "conflicts") are judged when all are together.
    let mut alone = Command::new("check").no_binary_name(true).disable_help_flag(true);
    for arg in command.get_arguments().filter(|arg| arg.get_long().is_some()) {
        if words.iter().any(|word| word[2..].split('=').next() == arg.get_long()) {
            alone = alone.arg(arg.clone());
        }
    }
    match alone.try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) => {
            let text = error.to_string();
            let text =
                text.trim_start_matches("error: ").split("\n\nFor more information").next().unwrap_or(&text);
            Err(text.trim_end().replace("\n\n", "\n"))
        }
    }
}

fn read_file(path: &Path, flags: &Flags) -> Result<BTreeMap<String, Given>, SettingsError> {
    let text = fs::read_to_string(path)
        .map_err(|source| SettingsError::Unreadable { path: path.to_owned(), source })?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| SettingsError::NotToml {
        path: path.to_owned(),
        message: error.to_string(),
    })?;
    let mut given = BTreeMap::new();
    for (key, value) in table {
        if !flags.everywhere.contains(&key) || key == "config" {
            let known =
                flags.here.keys().filter(|flag| *flag != "config").cloned().collect::<Vec<_>>().join(", ");
            return Err(SettingsError::UnknownKey { path: path.to_owned(), key, known });
        }
        let origin = format!("key `{key}` in {}", path.display());
        let values = match value {
            toml::Value::Array(values) => values.iter().map(scalar).collect(),
            value => scalar(&value).map(|value| vec![value]),
        };
        let values = values.ok_or_else(|| SettingsError::BadValue {
            origin: origin.clone(),
            reason: "a string, number, boolean, or list of these is expected".into(),
        })?;
        let repeats = flags.here.get(&key).is_none_or(|switch| switch.repeats);
        // A list for a flag that takes one value is that value's comma-separated form.
        let values = if repeats { values } else { vec![values.join(",")] };
        given.insert(key, Given { origin, values });
    }
    Ok(given)
}

fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
