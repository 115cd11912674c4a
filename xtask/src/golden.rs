//! The references that tests compare against, in `.tether/golden/`: made by other people's code, a few minutes' work, so
//! made again only when what they are made with has changed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::folder::WholeFolder;
use crate::{process, python_env, workspace};

/// Makes them all, in the folder it is given.
const SCRIPT: &str = "make_models.py";
/// Where it and what it imports are.
const FOLDER: &str = "tests/python";

/// Makes sure that the references are there and made by the scripts and packages as they stand.
pub(crate) fn ensure() -> Result<()> {
    let dir = workspace::tether_dir().join("golden");
    let shown = workspace::relative(&dir).display();
    let folder = WholeFolder::new(dir.clone(), made_from(&workspace::root().join(FOLDER))?);
    if folder.is_current() {
        println!("references of the tests: {shown} (already made)");
        return Ok(());
    }
    println!("references of the tests: making them with transformers (takes a few minutes)");
    folder.make(|partial| {
        let script = Path::new(FOLDER).join(SCRIPT);
        process::run(process::command(python_env::interpreter()).arg(script).arg(partial))
    })
}

/// Every file that has a say in what the references are, with its text.
fn made_from(scripts: &Path) -> Result<String> {
    let reading = || format!("reading {}", scripts.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(scripts).with_context(reading)? {
        let name = entry.with_context(reading)?.file_name().to_string_lossy().into_owned();
        let script = name.starts_with("make_") || name == "exactness_reference.py";
        if (script && name.ends_with(".py")) || name.starts_with("requirements") {
            names.push(name);
        }
    }
    names.sort();
    let mut text = String::new();
    for name in names {
        let path = scripts.join(&name);
        let script = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        text.push_str(&format!("# {name}\n{script}\n"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_a_script_or_a_package_makes_the_references_anew() {
        let scripts = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(scripts.path().join(name), text).unwrap();
        let now = || made_from(scripts.path()).unwrap();
        write(SCRIPT, "1");
        let mut before = now();
        for name in ["make_grid.py", "exactness_reference.py", "requirements.txt", "requirements-no-deps.txt"]
        {
            write(name, "1");
            assert_ne!(now(), before, "{name}");
            before = now();
            write(name, "2");
            assert_ne!(now(), before, "{name}");
            before = now();
        }
        write("test_demo_run.py", "1");
        assert_eq!(now(), before, "a test has no say in them");
    }

    #[test]
    fn every_script_that_the_references_import_has_a_say() {
        let scripts = workspace::root().join(FOLDER);
        let text = made_from(&scripts).unwrap();
        assert!(text.contains(&format!("# {SCRIPT}\n")));
        for line in text.lines().map(str::trim) {
            let Some(name) = line.strip_prefix("import ").and_then(|rest| rest.split([' ', ',']).next())
            else {
                continue;
            };
            if scripts.join(name).with_extension("py").is_file() {
                assert!(text.contains(&format!("# {name}.py\n")), "{name} is imported and has no say");
            }
        }
    }
}
