//! `cargo xtask dashboards`: writes the files that are made from the typed dashboards and from the binaries' own words.

use anyhow::Result;

use crate::{process, python_env};

const SCRIPTS: &[&str] = &["grafana/source/build.py", "tests/python/metrics_doc.py"];

pub(crate) fn run() -> Result<()> {
    python_env::ensure()?;
    process::run(process::cargo().args(["build", "--release", "--workspace"]))?;
    for script in SCRIPTS {
        process::run(process::command(python_env::interpreter()).arg(script))?;
    }
    Ok(())
}
