//! SGLang's launch flags, so that a launch script needs one word changed.

use std::path::PathBuf;

use clap::Args;

use crate::auth::{Key, KeyError, Keys};

/// Flags of `sglang.launch_server`. Those without a meaning here are taken and named in the log.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "SGLang's flags")]
pub struct SglangFlags {
    /// Address to listen on, with --port; instead of --listen
    #[arg(long, value_name = "ADDR", conflicts_with = "listen")]
    pub host: Option<String>,
    /// Port to listen on. [default with --host: 30000]
    #[arg(long, value_name = "PORT", conflicts_with = "listen")]
    pub port: Option<u16>,
    /// Key that clients send as `Authorization: Bearer KEY`; better given as TETHER_SERVER_API_KEY or --api-key-file
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<Key>,
    /// Its file, of which the first line is taken
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    pub api_key_file: Option<PathBuf>,
    /// Key for /abort_request and /flush_cache, which then take no other
    #[arg(long, value_name = "KEY")]
    pub admin_api_key: Option<Key>,
    /// Its file, of which the first line is taken
    #[arg(long, value_name = "FILE", conflicts_with = "admin_api_key")]
    pub admin_api_key_file: Option<PathBuf>,
    /// Most positions, if fewer than the model has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context_length: Option<u32>,
    /// As --max-batch-tokens; -1 leaves that as it is
    #[arg(long, value_name = "N", allow_hyphen_values = true, conflicts_with = "max_batch_tokens", value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    pub chunked_prefill_size: Option<i64>,
    /// Without a meaning here but for 1
    #[arg(long, visible_alias = "tp-size", alias = "tensor-parallel-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1))]
    pub tp: Option<u32>,
    /// Without a meaning here: memory is mapped, and --kv-budget and --dump-budget bound the rest
    #[arg(long, value_name = "PART")]
    pub mem_fraction_static: Option<f64>,
    /// Without a meaning here: there is no prefix cache
    #[arg(long)]
    pub disable_radix_cache: bool,
    /// Without a meaning here: no code of a checkpoint is run
    #[arg(long)]
    pub trust_remote_code: bool,
}

impl SglangFlags {
    /// The flags that were given and change nothing.
    pub fn without_effect(&self) -> Vec<&'static str> {
        let given = [
            ("--tp", self.tp.is_some()),
            ("--mem-fraction-static", self.mem_fraction_static.is_some()),
            ("--disable-radix-cache", self.disable_radix_cache),
            ("--trust-remote-code", self.trust_remote_code),
            ("--chunked-prefill-size", self.chunked_prefill_size.is_some_and(|size| size < 1)),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// Where to listen, if the flags say so.
    pub fn listen(&self) -> Option<String> {
        (self.host.is_some() || self.port.is_some()).then(|| {
            let host = self.host.as_deref().unwrap_or("127.0.0.1");
            let port = self.port.unwrap_or(30_000);
            match host.contains(':') {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            }
        })
    }

    /// The keys, read from their files.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn keys(&self) -> Result<Keys, KeyError> {
        let read = |key: &Option<Key>, file: &Option<PathBuf>| match (key, file) {
            (None, Some(file)) => Key::read(file).map(Some),
            (key, _) => Ok(key.clone()),
        };
        Ok(Keys {
            api: read(&self.api_key, &self.api_key_file)?,
            admin: read(&self.admin_api_key, &self.admin_api_key_file)?,
        })
    }
}
