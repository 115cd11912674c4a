//! Runs of `tether-extract`, what goes in, and what comes out.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::SystemTime;

use half::bf16;
use serde_json::json;
use tether_dump::RequestId;

use crate::binaries::binary;
use crate::checkpoint::HIDDEN;
use crate::process::Process;

/// One row of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its tokens.
    pub input_ids: Vec<i64>,
    /// 1 where a token is trained on.
    pub loss_mask: Vec<i64>,
}

/// Writes `samples` as JSONL to `path`.
pub fn write_data_set(path: &Path, samples: &[Sample]) {
    let line = |(row, sample): (usize, &Sample)| {
        let line = json!({"id": format!("sample-{row}"), "input_ids": sample.input_ids, "loss_mask": sample.loss_mask});
        format!("{line}\n")
    };
    fs::write(path, samples.iter().enumerate().map(line).collect::<String>())
        .expect("the test's folder is writable");
}

/// A run of `tether-extract run --format specforge`.
pub struct ExtractRun {
    process: Process,
}

impl ExtractRun {
    /// Starts one from `data` to `out` through the proxy at `proxy`.
    pub fn start(proxy: SocketAddr, data: &Path, out: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new(binary("tether-extract"));
        command.arg("run").arg("--proxy").arg(format!("http://{proxy}")).arg("--data").arg(data);
        command.arg("--out").arg(out).args(["--format", "specforge"]).args(flags);
        // Each run's words in a file of their own, beside the output.
        let log = (0..).map(|run| out.with_extension(format!("{run}.log"))).find(|log| !log.exists());
        let log = log.expect("the range has no end");
        Self { process: Process::spawn("tether-extract", command, &log) }
    }

    /// Waits for its end.
    pub async fn wait(&self) -> ExitStatus {
        self.process.wait().await
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }
}

/// A SpecForge eagle3 file, read without our own code: a ZIP with one stored entry per tensor, in the order of the keys.
#[derive(Clone, Debug)]
pub struct TrainerFile {
    /// Where it is.
    pub path: PathBuf,
    /// When it was last written.
    pub modified: SystemTime,
    /// `input_ids`.
    pub input_ids: Vec<i64>,
    /// `loss_mask`.
    pub loss_mask: Vec<i64>,
    /// `hidden_state`: `N`, `[tokens, hidden]`.
    pub hidden_state: Vec<f32>,
    /// `aux_hidden_state`: `[tokens, 3 * hidden]`.
    pub aux_hidden_state: Vec<f32>,
    /// `tether_request_id`.
    pub request_id: RequestId,
}

/// The trainer files under `out`, by data set row.
///
/// # Panics
/// If one is not whole.
pub fn read_data_set(out: &Path) -> BTreeMap<usize, TrainerFile> {
    trainer_files(out).into_iter().map(|(row, path)| (row, TrainerFile::read(&path))).collect()
}

/// Where the trainer files under `out` are, by data set row. None before the run has made its folder.
pub fn trainer_files(out: &Path) -> BTreeMap<usize, PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        // Absent, or gone between two looks: a run is working there.
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let name =
        |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let row = |path: &Path| name(path).strip_prefix("data_")?.strip_suffix(".ckpt")?.parse().ok();
    let groups = entries(out).into_iter().filter(|folder| name(folder).starts_with("rows_"));
    groups.flat_map(|group| entries(&group)).filter_map(|path| Some((row(&path)?, path))).collect()
}

impl TrainerFile {
    fn read(path: &Path) -> Self {
        let open = File::open(path).and_then(|file| Ok((file.metadata()?.modified()?, file)));
        let (modified, file) = open.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut archive =
            zip::ZipArchive::new(file).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let names: Vec<_> = (0..archive.len())
            .filter_map(|at| Some(archive.by_index(at).ok()?.name().ok()?.into_owned()))
            .collect();
        let mut entry = |suffix: &str| {
            let name = names.iter().find(|name| name.ends_with(suffix));
            let name = name.unwrap_or_else(|| panic!("no `{suffix}` among {names:?} of {}", path.display()));
            let mut bytes = Vec::new();
            // Reads to the end, and so checks the CRC.
            archive
                .by_name(name)
                .expect("a listed entry")
                .read_to_end(&mut bytes)
                .expect("an entry is whole");
            bytes
        };
        let pickle = String::from_utf8_lossy(&entry("/data.pkl")).into_owned();
        let keys = ["input_ids", "loss_mask", "hidden_state", "aux_hidden_state", "tether_request_id"];
        let places: Vec<_> = keys.iter().map(|key| pickle.find(key)).collect();
        assert!(places.iter().all(Option::is_some), "{keys:?} are not all in {}", path.display());
        let request_id =
            pickle.char_indices().find_map(|(at, _)| pickle.get(at..at + RequestId::TEXT_LEN)?.parse().ok());
        let integers = |bytes: Vec<u8>| -> Vec<i64> {
            let words = bytes.chunks_exact(8);
            words.map(|word| i64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
        };
        let floats = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        };
        let file = Self {
            path: path.to_owned(),
            modified,
            input_ids: integers(entry("/data/0")),
            loss_mask: integers(entry("/data/1")),
            hidden_state: floats(entry("/data/2")),
            aux_hidden_state: floats(entry("/data/3")),
            request_id: request_id.unwrap_or_else(|| panic!("no request ID in {}", path.display())),
        };
        let tokens = file.input_ids.len();
        assert_eq!(file.loss_mask.len(), tokens, "{}", path.display());
        assert_eq!(file.hidden_state.len(), tokens * HIDDEN, "{}", path.display());
        assert_eq!(file.aux_hidden_state.len(), tokens * 3 * HIDDEN, "{}", path.display());
        assert!(
            file.hidden_state.iter().chain(&file.aux_hidden_state).all(|v| v.is_finite()),
            "{}",
            path.display()
        );
        file
    }
}
