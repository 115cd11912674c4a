//! Running other programs to their end: every command is shown as one could type it, and a failure names it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// A command whose working directory is the checkout.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace::root());
    command
}

/// The cargo that started us, so that a toolchain override holds for what we start.
pub(crate) fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Shows the command, runs it with our output, and fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = show(command);
    println!("$ {line}");
    let status = command.status().with_context(|| format!("`{line}` could not be started"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// As [`run`], and hands every line of its standard output to `look` after passing it on.
pub(crate) fn run_watched(command: &mut Command, mut look: impl FnMut(&str)) -> Result<()> {
    let line = show(command);
    println!("$ {line}");
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("`{line}` could not be started"))?;
    let output = child.stdout.take().expect("standard output was asked to be piped");
    let mut reader = BufReader::new(output);
    let mut bytes = Vec::new();
    // Bytes, not `lines()`: a test may print what is not UTF-8, and that must not end the run.
    while reader.read_until(b'\n', &mut bytes).with_context(|| format!("reading from `{line}`"))? > 0 {
        std::io::stdout().write_all(&bytes).context("writing to standard output")?;
        look(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    let status = child.wait().with_context(|| format!("waiting for `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Runs quietly and returns what it wrote to standard output; on failure the error holds what it wrote to standard
/// error.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let line = show(command);
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().with_context(|| format!("`{line}` could not be started"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}\n{}", String::from_utf8_lossy(&stderr).trim());
    }
    Ok(String::from_utf8_lossy(&stdout).trim().to_owned())
}

/// The command as one would type it in the checkout.
pub(crate) fn show(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            words.push(format!("{}={}", name.to_string_lossy(), quote(&value.to_string_lossy())));
        }
    }
    words.push(word(command.get_program()));
    words.extend(command.get_args().map(word));
    words.join(" ")
}

/// One word of a command line: paths below the checkout become relative.
pub(crate) fn word(text: &OsStr) -> String {
    let path = std::path::Path::new(text);
    quote(&workspace::relative(path).to_string_lossy())
}

fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_one_could_type_it() {
        let mut shown = command(workspace::root().join("target/release/tether-server"));
        shown.arg("--model").arg(workspace::root().join("a model")).env("TETHER_CAMPAIGN", "1");
        assert_eq!(show(&shown), "TETHER_CAMPAIGN=1 target/release/tether-server --model 'a model'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn a_failure_names_the_command_and_carries_its_words() {
        let error =
            read(command("sh").args(["-c", "echo no such luck >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("sh -c") && error.contains("no such luck") && error.contains('3'), "{error}");
        let error = format!("{:#}", run(&mut command("a-program-that-is-not-there")).unwrap_err());
        assert!(error.contains("`a-program-that-is-not-there` could not be started"), "{error}");
    }

    #[test]
    fn every_line_is_seen_even_when_it_is_not_text() {
        let mut lines = Vec::new();
        run_watched(command("sh").args(["-c", r"printf 'one\n\377two\nlast'"]), |line| {
            lines.push(line.to_owned());
        })
        .unwrap();
        assert_eq!(lines, ["one", "\u{fffd}two", "last"]);
    }
}
