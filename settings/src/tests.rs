use std::io::Write;

use super::*;

#[derive(Debug, Parser)]
struct Program {
    /// Required.
    #[arg(long)]
    model: String,
    #[arg(long, default_value_t = 8192)]
    max_batch_tokens: u32,
    #[arg(long)]
    upstream: Vec<String>,
    #[arg(long)]
    fsync: bool,
    #[arg(long)]
    config: Option<PathBuf>,
}

fn read(arguments: &[&str], variables: &[(&str, &str)]) -> Result<Program, SettingsError> {
    let arguments = std::iter::once("program").chain(arguments.iter().copied());
    let variables = variables.iter().map(|&(name, value)| (name.to_owned(), OsString::from(value)));
    from_sources("TETHER_X_", arguments, variables)
}

fn file(contents: &str) -> (tempfile::NamedTempFile, String) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(contents.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
    let (_file, path) = file("max-batch-tokens = 1\nmodel = \"from-file\"\nfsync = true");
    let with = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut all = vec!["--config", &path];
        all.extend(arguments);
        read(&all, variables).unwrap()
    };
    let variable = [("TETHER_X_MAX_BATCH_TOKENS", "2")];
    assert_eq!(with(&["--max-batch-tokens", "3"], &variable).max_batch_tokens, 3);
    assert_eq!(with(&[], &variable).max_batch_tokens, 2);
    assert_eq!(with(&[], &[]).max_batch_tokens, 1);
    assert_eq!(read(&["--model", "m"], &[]).unwrap().max_batch_tokens, 8192);
    let program = with(&[], &[]);
    assert_eq!((program.model.as_str(), program.fsync), ("from-file", true));
}

#[test]
fn a_repeated_flag_is_replaced_as_a_whole_by_a_stronger_source() {
    let (_file, path) = file("upstream = [\"a\", \"b\"]");
    let program = read(&["--model", "m", "--config", &path], &[]).unwrap();
    assert_eq!(program.upstream, ["a", "b"]);
    let program = read(&["--model", "m", "--config", &path], &[("TETHER_X_UPSTREAM", "c d")]).unwrap();
    assert_eq!(program.upstream, ["c", "d"]);
    let program = read(&["--model", "m", "--upstream", "e"], &[("TETHER_X_UPSTREAM", "c d")]).unwrap();
    assert_eq!(program.upstream, ["e"]);
}

#[test]
fn the_file_may_be_named_by_a_variable() {
    let (_file, path) = file("model = \"m\"");
    assert_eq!(read(&[], &[("TETHER_X_CONFIG", &path)]).unwrap().model, "m");
}

#[test]
fn a_misspelt_variable_or_key_is_an_error_that_lists_the_known_ones() {
    let error = read(&["--model", "m"], &[("TETHER_X_MAX_BATCH_TOKEN", "1")]).unwrap_err().to_string();
    assert!(
        error.contains("TETHER_X_MAX_BATCH_TOKEN;") && error.contains("TETHER_X_MAX_BATCH_TOKENS"),
        "{error}"
    );
    let (_file, path) = file("max_batch_tokens = 1");
    let error = read(&["--model", "m", "--config", &path], &[]).unwrap_err().to_string();
    assert!(error.contains("`max_batch_tokens`") && error.contains("max-batch-tokens"), "{error}");
}

#[test]
fn variables_of_other_programs_are_left_alone() {
    assert!(read(&["--model", "m"], &[("TETHER_Y_MODEL", "n"), ("PATH", "/bin")]).is_ok());
}

#[test]
fn a_bad_value_is_laid_to_its_source() {
    let error = read(&["--model", "m"], &[("TETHER_X_MAX_BATCH_TOKENS", "many")]).unwrap_err().to_string();
    assert!(error.contains("TETHER_X_MAX_BATCH_TOKENS") && error.contains("many"), "{error}");
    let error = read(&["--model", "m"], &[("TETHER_X_FSYNC", "maybe")]).unwrap_err().to_string();
    assert!(error.contains("TETHER_X_FSYNC") && error.contains("`true` or `false`"), "{error}");
    let (_file, path) = file("max-batch-tokens = -4");
    let error = read(&["--model", "m", "--config", &path], &[]).unwrap_err().to_string();
    assert!(error.contains(&path) && error.contains("-4"), "{error}");
}

#[test]
fn a_required_flag_may_come_from_a_variable_but_must_come_from_somewhere() {
    assert_eq!(read(&[], &[("TETHER_X_MODEL", "m")]).unwrap().model, "m");
    assert!(matches!(read(&[], &[]), Err(SettingsError::CommandLine(_))));
}

#[derive(Debug, Parser)]
enum Tool {
    Run {
        #[arg(long)]
        proxy: String,
        #[arg(long)]
        config: Option<PathBuf>,
    },
    Verify {
        #[arg(long)]
        out: PathBuf,
    },
}

#[test]
fn settings_go_to_the_subcommand_that_is_run() {
    let variables =
        || [("TETHER_X_PROXY".to_owned(), OsString::from("p")), ("TETHER_X_OUT".to_owned(), "o".into())];
    let tool: Tool = from_sources("TETHER_X_", ["tool", "run"], variables()).unwrap();
    assert!(matches!(tool, Tool::Run { proxy, config: None } if proxy == "p"));
    let tool: Tool = from_sources("TETHER_X_", ["tool", "verify"], variables()).unwrap();
    assert!(matches!(tool, Tool::Verify { out } if out == Path::new("o")));
}
