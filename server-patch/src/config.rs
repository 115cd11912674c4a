//! The command line, and the checks on it that cost nothing beside loading weights.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use clap::{Parser, ValueEnum};
use tch::Device;
use tether_dump::{Dtype, DumpLayout, FinalState};
use tether_model::{CaptureSpec, Config, DtypeChoice, InvalidCapture, LoadError, default_points};

use crate::launch::SglangFlags;
use crate::plan::{CaptureDefaults, CaptureMode, ModelInfo};
use crate::units::{ByteSize, Span};

/// Serves a DeepSeek-V2/V3-family model over SGLang's /generate and writes the hidden states of every tagged request to
/// <dump-dir>/<request id>.safetensors before it answers.
///
/// Every flag can also be given as a variable (TETHER_SERVER_MAX_BATCH_TOKENS for --max-batch-tokens) or as a key of
/// the file that --config names (max-batch-tokens = 4096); a flag wins over a variable, and that over the file.
#[derive(Clone, Debug, Parser)]
#[command(name = "tether-server", version)]
pub struct Args {
    /// Checkpoint directory: config.json, safetensors and, for text prompts, tokenizer.json
    #[arg(long, visible_alias = "model-path", value_name = "DIR")]
    pub model: PathBuf,
    /// Address to listen on; port 0 takes a free one, which the log names
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:30000")]
    pub listen: String,
    /// Where dumps are published; made if it is not there
    #[arg(long, value_name = "DIR")]
    pub dump_dir: PathBuf,
    /// A TOML file with more of these settings
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Residual-stream points to capture, counted by what enters a layer, as SGLang and vLLM count (2 is the output of
    /// layer 1). [default: 2, n/2, n-3 for n layers]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', allow_hyphen_values = true)]
    pub capture_layers: Option<Vec<i64>>,
    /// Last plane of a dump: pre_norm (what speculators reads), post_norm (SpecForge, ModelOpt, AngelSlim), both or none
    #[arg(long = "final", value_name = "STATE", default_value = "pre_norm")]
    pub final_state: FinalState,
    /// Who gets a dump without asking: requests whose rid is a request ID, or all
    #[arg(long, value_enum, default_value = "tagged")]
    pub capture: Capture,
    /// Number format to compute in; auto is that of the checkpoint
    #[arg(long, value_enum, default_value = "auto")]
    pub dtype: ComputeDtype,
    /// Number format of dumps; auto is that of the computation
    #[arg(long, value_enum, default_value = "auto")]
    pub dump_dtype: ComputeDtype,
    /// cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Place,
    /// Devices to spread the layers over, in order and as evenly as can be, such as cuda:0,cuda:1; instead of --device
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', conflicts_with = "device")]
    pub device_map: Option<Vec<Place>>,
    /// Threads of an operation on the CPU. [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Tokens in one forward pass over several requests; a longer prompt runs alone
    #[arg(long, value_name = "N", default_value = "8192", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_batch_tokens: u32,

    /// Form of a dump: file, <request id>.safetensors; or directory, req_<request id>/ with a PyTorch file a plane, for
    /// clients that scan a directory
    #[arg(long, value_name = "LAYOUT", default_value = "file")]
    pub dump_layout: DumpLayout,
    /// Bytes that dumps may take before new requests wait, then get 503
    #[arg(long, value_name = "SIZE", default_value = "64GiB")]
    pub dump_budget: ByteSize,
    /// Delete dumps older than this, such as 1h. [default: never]
    #[arg(long, value_name = "TIME")]
    pub dump_ttl: Option<Span>,
    /// Sync a dump and its directory to disk before the reply
    #[arg(long)]
    pub fsync: bool,
    /// Threads that write dumps
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub writers: u32,
    /// Bytes of states that may wait for the disk before the model has to
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub write_buffer: ByteSize,

    /// Longest wait for room in the dump directory and for the first step, then 503
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub queue_timeout: Span,
    /// Bytes that the KV caches of texts being continued may take. [default: a quarter of the memory that is available
    /// at the start]
    #[arg(long, value_name = "SIZE")]
    pub kv_budget: Option<ByteSize>,
    /// Texts that are continued at a time; more wait
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_running_requests: u32,
    /// Prompts that may wait for their first step; more get 503
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_queued_requests: u32,
    /// What the model is called in replies and dumps. [default: the value of --model]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Events of a streamed /generate have the text and tokens since the last one, instead of all so far
    #[arg(long)]
    pub incremental_streaming_output: bool,
    /// After SIGTERM or SIGINT, longest time for requests in flight
    #[arg(long, value_name = "TIME", default_value = "5m")]
    pub drain_timeout: Span,
    /// error, warn, info, debug or trace, or a filter such as tether_server=debug,info
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
    /// Log one JSON object a line
    #[arg(long)]
    pub log_json: bool,

    /// SGLang's own flags.
    #[command(flatten)]
    pub sglang: SglangFlags,
}

/// Taken for the memory that is available where the system does not say.
const FALLBACK_MEMORY: u64 = 4 << 30;

/// `--capture`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Capture {
    /// Requests whose rid is a request ID.
    Tagged,
    /// Every request.
    All,
}

/// `--dtype` and `--dump-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputeDtype {
    /// As the checkpoint, or as the computation.
    Auto,
    /// Single precision.
    Float32,
    /// Its upper half.
    Bfloat16,
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place(pub Device);

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let index = |text: &str| text.parse::<usize>().ok();
        let device = match text {
            "cpu" => Some(Device::Cpu),
            "cuda" => Some(Device::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(index).map(Device::Cuda),
        };
        device.map(Self).ok_or_else(|| "expected cpu, cuda or cuda:N".to_owned())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            other => write!(f, "{other:?}"),
        }
    }
}

/// Settings that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The checkpoint.
    #[error("--model {}", dir.display())]
    Model {
        /// As given.
        dir: PathBuf,
        /// Why it cannot be.
        source: LoadError,
    },
    /// More positions than the model has.
    #[error("--context-length is {length}; the model has {most} positions, and at most these are accepted")]
    Context {
        /// As given.
        length: usize,
        /// `max_position_embeddings`.
        most: usize,
    },
    /// The points.
    #[error("--capture-layers cannot be captured")]
    Points {
        /// Which and why.
        source: InvalidCapture,
    },
    /// The model is too shallow for the usual points.
    #[error("--capture-layers is needed, from 0 to {num_layers} on the input axis")]
    NoDefault {
        /// Layers.
        num_layers: i64,
        /// Why.
        source: InvalidCapture,
    },
    /// The dump directory.
    #[error("--dump-dir {} cannot be written", dir.display())]
    DumpDir {
        /// As given.
        dir: PathBuf,
        /// What the file system says.
        source: io::Error,
    },
    /// What ends a text cannot be known.
    #[error("{} cannot be read: {reason}; `eos_token_id` may be a token ID or a list of them", path.display())]
    Generation {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A size in the config that makes no sense.
    #[error("--model {}: `{key}` is {value}", dir.display())]
    Size {
        /// As given.
        dir: PathBuf,
        /// In config.json.
        key: &'static str,
        /// Its value.
        value: i64,
    },
}

impl Args {
    /// What to compute in.
    pub fn compute(&self) -> DtypeChoice {
        match self.dtype {
            ComputeDtype::Auto => DtypeChoice::Auto,
            ComputeDtype::Float32 => DtypeChoice::Float32,
            ComputeDtype::Bfloat16 => DtypeChoice::BFloat16,
        }
    }

    /// What to store, if not what is computed in.
    pub fn stored(&self) -> Option<Dtype> {
        match self.dump_dtype {
            ComputeDtype::Auto => None,
            ComputeDtype::Float32 => Some(Dtype::Float32),
            ComputeDtype::Bfloat16 => Some(Dtype::BFloat16),
        }
    }

    /// Bytes that KV caches may take. On CUDA the memory of the host says nothing of the device's, but no more than that is
    /// asked for.
    pub fn kv_budget(&self) -> ByteSize {
        let available = || ByteSize(crate::memory::available_memory().unwrap_or(FALLBACK_MEMORY) / 4);
        self.kv_budget.unwrap_or_else(available)
    }

    /// Where the model runs.
    pub fn places(&self) -> &[Place] {
        self.device_map.as_deref().unwrap_or(std::slice::from_ref(&self.device))
    }

    /// Where to listen.
    pub fn address(&self) -> String {
        self.sglang.listen().unwrap_or_else(|| self.listen.clone())
    }

    /// Tokens in one forward pass.
    pub fn batch_tokens(&self) -> u32 {
        let size = self.sglang.chunked_prefill_size.and_then(|size| u32::try_from(size).ok());
        size.filter(|size| *size > 0).unwrap_or(self.max_batch_tokens)
    }

    /// Threads of an operation.
    pub fn compute_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(cores, |threads| threads as usize)
    }

    /// Reads the model's config.
    ///
    /// # Errors
    /// When it is absent or not of a model that can be served.
    pub fn model_info(&self) -> Result<ModelInfo, ConfigError> {
        let dir = &self.model;
        let config = Config::read(dir).map_err(|source| ConfigError::Model { dir: dir.clone(), source })?;
        let size = |key, value: i64| {
            usize::try_from(value).map_err(|_| ConfigError::Size { dir: dir.clone(), key, value })
        };
        let name = self.served_model_name.clone().unwrap_or_else(|| dir.display().to_string());
        Ok(ModelInfo {
            name,
            // Clients compare it with paths of their own.
            path: fs::canonicalize(dir).unwrap_or_else(|_| dir.clone()),
            config_hash: config.hash().to_owned(),
            architecture: config.architecture.to_string(),
            num_layers: config.num_hidden_layers,
            hidden_size: size("hidden_size", config.hidden_size)?,
            vocab_size: config.vocab_size,
            context: self.context(size("max_position_embeddings", config.max_position_embeddings)?)?,
            eos_token_ids: ends(dir, config.eos_token_id)?,
        })
    }

    /// Positions to serve of a model that has so many.
    fn context(&self, most: usize) -> Result<usize, ConfigError> {
        match self.sglang.context_length.map(|length| length as usize) {
            Some(length) if length > most => Err(ConfigError::Context { length, most }),
            length => Ok(length.unwrap_or(most)),
        }
    }

    /// The points to capture by default, checked against the model's depth.
    ///
    /// # Errors
    /// When a point does not exist, with the range of those that do.
    pub fn capture_defaults(&self, num_layers: i64) -> Result<CaptureDefaults, ConfigError> {
        let points = match &self.capture_layers {
            Some(points) => points.clone(),
            None => default_points(num_layers)
                .map_err(|source| ConfigError::NoDefault { num_layers, source })?
                .to_vec(),
        };
        let spec = CaptureSpec::new(&points, self.final_state, num_layers)
            .map_err(|source| ConfigError::Points { source })?;
        let mode = match self.capture {
            Capture::Tagged => CaptureMode::Tagged,
            Capture::All => CaptureMode::All,
        };
        Ok(CaptureDefaults {
            points,
            final_state: self.final_state,
            spec: Arc::new(spec),
            mode,
            layout: self.dump_layout,
        })
    }
}

/// The tokens that end a text: those of `config.json`, and those of `generation_config.json`, which may name others (an
/// instruct model's end of a turn, say). SGLang and transformers honour both.
fn ends(dir: &Path, mut of_config: Vec<i64>) -> Result<Vec<i64>, ConfigError> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(i64),
        Many(Vec<i64>),
    }
    #[derive(serde::Deserialize)]
    struct GenerationConfig {
        eos_token_id: Option<OneOrMany>,
    }
    let path = dir.join("generation_config.json");
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(of_config),
        Err(error) => return Err(ConfigError::Generation { path, reason: error.to_string() }),
    };
    let read: GenerationConfig = serde_json::from_slice(&bytes)
        .map_err(|error| ConfigError::Generation { path, reason: error.to_string() })?;
    let more = match read.eos_token_id {
        None => Vec::new(),
        Some(OneOrMany::One(id)) => vec![id],
        Some(OneOrMany::Many(ids)) => ids,
    };
    for id in more {
        if !of_config.contains(&id) {
            of_config.push(id);
        }
    }
    Ok(of_config)
}

/// Makes the dump directory if need be, tries to write in it, removes what a killed server left, and returns its absolute
/// path, which is what replies name.
///
/// # Errors
/// [`ConfigError::DumpDir`].
pub fn prepare_dump_dir(dir: &Path) -> Result<PathBuf, ConfigError> {
    let prepare = || {
        fs::create_dir_all(dir)?;
        let probe = dir.join(format!(".tether-probe-{}", std::process::id()));
        File::create(&probe)?;
        fs::remove_file(&probe)?;
        let stale = tether_dump::remove_stale_temporaries(dir)?;
        if stale > 0 {
            tracing::info!(files = stale, "removed dumps that a killed server had left half written");
        }
        fs::canonicalize(dir)
    };
    prepare().map_err(|source| ConfigError::DumpDir { dir: dir.to_owned(), source })
}

#[cfg(test)]
mod tests;
