//! From settings to a running server: cheap checks, the port, then the model in the background.

use std::future::pending;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};
use std::time::Instant;

use prometheus::Registry;
use tether_model::{LoadRow, LoadTable};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::app::{App, Lifecycle};
use crate::auth::KeyError;
use crate::budget::Budget;
use crate::chat::{ChatError, ChatTemplate};
use crate::config::{Args, prepare_dump_dir};
use crate::engine::{Engine, EngineOptions};
use crate::identity::InFlightRids;
use crate::metrics::Metrics;
use crate::plan::{Planner, both_axes};
use crate::serve::serve;
use crate::sink::{Sink, SinkOptions};
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::torch::{TorchError, TorchModel, TorchOptions};

/// Packed rows that go through a layer together: products no longer get faster with more, and activations stay small.
const TILE_TOKENS: usize = 8192;

/// Why the server did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The tokenizer.
    #[error("the tokenizer in --model {} cannot be used", dir.display())]
    Tokenizer {
        /// The checkpoint.
        dir: PathBuf,
        /// Why.
        source: TokenizerError,
    },
    /// The address.
    #[error("--listen {address}: cannot listen there")]
    Listen {
        /// As given.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// The dump directory.
    #[error("cannot list --dump-dir {}", dir.display())]
    Scan {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The chat template.
    #[error("the chat template in {} cannot be used", dir.display())]
    Template {
        /// The model directory.
        dir: PathBuf,
        /// Why.
        source: ChatError,
    },
    /// A key.
    #[error("the API key cannot be used")]
    Key(#[from] KeyError),
    /// The model.
    #[error(transparent)]
    Model(#[from] TorchError),
    /// The metrics or the signals.
    #[error("cannot set up the process")]
    Process(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The engine thread is gone.
    #[error("the engine thread ended before the model was loaded")]
    EngineGone,
    /// Requests were cut.
    #[error("{0} requests did not end within --drain-timeout and were cut")]
    Cut(usize),
}

/// Starts the server, and runs it until SIGTERM or SIGINT.
///
/// # Errors
/// See [`StartError`].
pub async fn run(args: Args) -> Result<(), StartError> {
    let process = |error: prometheus::Error| StartError::Process(Box::new(error));
    let signals = |error: std::io::Error| StartError::Process(Box::new(error));
    let mut model = args.model_info()?;
    let defaults = args.capture_defaults(model.num_layers)?;
    let dump_dir = prepare_dump_dir(&args.dump_dir)?;
    let tokenizer = Tokenizer::read(&args.model)
        .map_err(|source| StartError::Tokenizer { dir: args.model.clone(), source })?
        .map(Arc::new);
    if let Some(eos) =
        tokenizer.as_deref().and_then(Tokenizer::eos).filter(|eos| !model.eos_token_ids.contains(eos))
    {
        model.eos_token_ids.push(eos);
    }
    let template = ChatTemplate::read(&args.model)
        .map_err(|source| StartError::Template { dir: args.model.clone(), source })?;
    let keys = args.sglang.keys()?;
    if let ignored @ [_, ..] = &*args.sglang.without_effect() {
        tracing::info!(flags = ignored.join(" "), "flags of SGLang that have no meaning here");
    }
    let listener = TcpListener::bind(args.address())
        .await
        .map_err(|source| StartError::Listen { address: args.address(), source })?;
    let address = listener.local_addr().map_err(signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(signals)?;
    let registry = Registry::new();
    let metrics = Metrics::register(&registry).map_err(process)?;
    tether_telemetry::register_process(&registry, "tether_server", env!("CARGO_PKG_VERSION"))
        .map_err(process)?;
    metrics.max_batch_tokens.set(i64::from(args.batch_tokens()));
    metrics.max_queued.set(i64::from(args.max_queued_requests));
    let budget = Budget::new(&dump_dir, args.dump_budget.0, args.dump_ttl.map(|ttl| ttl.0), &metrics)
        .map_err(|source| StartError::Scan { dir: dump_dir.clone(), source })?;

    if tokenizer.is_none() {
        tracing::warn!(model = %args.model.display(), "no tokenizer.json or tiktoken.model: only `input_ids` are served, and replies have no text");
    }
    let planner = Planner {
        model,
        defaults,
        tokenizer,
        template,
        dump_dtype: OnceLock::new(),
        server: format!("tether-server {}", env!("CARGO_PKG_VERSION")),
        tokenize_seconds: metrics.tokenize_seconds.clone(),
        warned: Once::new(),
    };
    planner.warn_of_final(args.final_state);
    table(&args, &planner, &dump_dir, &address.to_string());

    let sink = Sink::start(
        SinkOptions {
            dir: dump_dir.clone(),
            layout: args.dump_layout,
            fsync: args.fsync,
            writers: args.writers as usize,
            buffer_bytes: args.write_buffer.0,
            hidden_size: planner.model.hidden_size,
        },
        metrics.clone(),
    );
    let options = TorchOptions {
        dir: args.model.clone(),
        devices: args.places().iter().map(|place| place.0).collect(),
        dtype: args.compute(),
        dump_dtype: args.stored(),
        threads: args.compute_threads(),
        tile_tokens: TILE_TOKENS,
    };
    let spec = Arc::clone(&planner.defaults.spec);
    let log_json = args.log_json;
    let (loaded, model_loaded) = oneshot::channel();
    let load_started = Instant::now();
    let engine = Engine::start(
        EngineOptions {
            max_batch_tokens: args.batch_tokens() as usize,
            max_queued: args.max_queued_requests as usize,
            max_running: args.max_running_requests as usize,
            kv_budget: args.kv_budget().0,
            states_budget: args.write_buffer.0,
        },
        sink,
        metrics.clone(),
        move || {
            let model = TorchModel::load(&options)?;
            model.warm_up(&spec)?;
            Ok(model)
        },
        move |result: Result<&TorchModel, TorchError>| {
            // If the server has stopped meanwhile, nobody waits to hear this.
            let _ = loaded.send(result.map(|model| {
                let table = model.load_table().clone();
                (model.dump_dtype(), model.compute_note(), table)
            }));
        },
    );
    let launch = launch(&args, &planner, address);
    let app = Arc::new(App {
        launch,
        keys,
        planner,
        engine,
        budget: Arc::clone(&budget),
        dump_dir,
        queue_timeout: args.queue_timeout.0,
        incremental_streaming: args.incremental_streaming_output,
        metrics: metrics.clone(),
        registry,
        rids: InFlightRids::default(),
        lifecycle: Lifecycle::default(),
    });
    // Dropping the last handle joins the engine. Until the server has drained nothing may do so by returning: a load, or a
    // step of requests that were cut, can take longer than anybody wants to wait for the exit.
    let keep = ManuallyDrop::new(Arc::clone(&app));
    let scanning = tokio::spawn(budget.keep_scanning(pending()));

    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn({
        let app = Arc::clone(&app);
        let drain_timeout = args.drain_timeout.0;
        async move { serve(listener, app, async { drop(stopped.await) }, drain_timeout).await }
    });
    let early = tokio::select! {
        result = model_loaded => match result {
            Ok(Ok((dtype, compute, table))) => {
                loaded_table(&table, log_json);
                // Set here and nowhere else.
                let _ = app.planner.dump_dtype.set(dtype);
                metrics.load_seconds.set(load_started.elapsed().as_secs_f64());
                metrics.ready.set(1);
                app.lifecycle.serve();
                let seconds = load_started.elapsed().as_secs_f64();
                tracing::info!(%address, compute, dump_dtype = %dtype, seconds, "ready");
                None
            }
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => return Err(StartError::EngineGone),
        },
        signal = told(&mut terminate, &mut interrupt) => Some(signal),
    };
    let signal = match early {
        Some(signal) => signal,
        None => told(&mut terminate, &mut interrupt).await,
    };
    tracing::info!(signal, "stopping; a second signal stops at once");
    // The server listens for this as long as it runs.
    let _ = stop.send(());
    let drained = tokio::select! {
        drained = server => drained.map_err(|error| StartError::Process(Box::new(error)))?,
        _ = told(&mut terminate, &mut interrupt) => return Err(StartError::Cut(app.lifecycle.in_flight())),
    };
    scanning.abort();
    if drained.cut > 0 {
        return Err(StartError::Cut(drained.cut));
    }
    // A model that is still being loaded is not waited for: nothing of it is left behind.
    if early.is_none() {
        // Joins the engine, which joins the writers.
        tokio::task::spawn_blocking(move || drop((app, ManuallyDrop::into_inner(keep))))
            .await
            .map_err(|error| StartError::Process(Box::new(error)))?;
    }
    tracing::info!("stopped");
    Ok(())
}

/// Waits for the signal to stop, and names it.
async fn told(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

/// How the server was launched, for `/server_info`: by SGLang's names what means the same there.
fn launch(args: &Args, planner: &Planner, address: SocketAddr) -> serde_json::Value {
    let model = &planner.model;
    serde_json::json!({
        "model_path": model.path, "tokenizer_path": model.path, "served_model_name": model.name,
        "host": address.ip(), "port": address.port(), "version": env!("CARGO_PKG_VERSION"), "frontend": "rust",
        "tp_size": 1, "dp_size": 1, "pp_size": 1, "device": args.places()[0].to_string(),
        "dtype": format!("{:?}", args.dtype).to_lowercase(), "context_length": model.context,
        "max_req_input_len": model.context, "chunked_prefill_size": args.batch_tokens(),
        "max_prefill_tokens": args.batch_tokens(), "max_running_requests": args.max_running_requests,
        "max_queued_requests": args.max_queued_requests, "disable_radix_cache": true, "weight_version": "default",
        "skip_tokenizer_init": planner.tokenizer.is_none(),
        "incremental_streaming_output": args.incremental_streaming_output,
    })
}

/// What was loaded, for the log.
fn loaded_table(table: &LoadTable, log_json: bool) {
    if !log_json {
        tracing::info!("parameters\n{table}");
        return;
    }
    for (stored_as, row) in table.rows() {
        let LoadRow { tensors, parameters, stored_bytes, mapped_bytes } = row;
        tracing::info!(stored_as, tensors, parameters, stored_bytes, mapped_bytes, "parameters");
    }
}

/// What will be served, for the log.
fn table(args: &Args, planner: &Planner, dump_dir: &Path, address: &str) {
    let model = &planner.model;
    let spec = &planner.defaults.spec;
    let (input, output) = both_axes(spec);
    let points: Vec<String> = spec.planes().iter().map(ToString::to_string).collect();
    let points = points.join(",");
    let devices = args.places().iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    if args.log_json {
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            address,
            model = model.name,
            architecture = model.architecture,
            layers = model.num_layers,
            hidden = model.hidden_size,
            vocab = model.vocab_size,
            context = model.context,
            points,
            input_axis = input,
            output_axis = output,
            r#final = %args.final_state,
            devices,
            dtype = ?args.dtype,
            dump_dtype = ?args.dump_dtype,
            threads = args.compute_threads(),
            max_batch_tokens = args.batch_tokens(),
            max_running_requests = args.max_running_requests,
            kv_budget = %args.kv_budget(),
            dump_dir = %dump_dir.display(),
            dump_budget = %args.dump_budget,
            dump_layout = %args.dump_layout,
            fsync = args.fsync,
            "starting"
        );
        return;
    }
    let auto = |dtype: crate::config::ComputeDtype| format!("{dtype:?}").to_lowercase();
    let rows = [
        ("address", address.to_owned()),
        (
            "model",
            format!(
                "{} ({}, config {})",
                model.name,
                model.architecture,
                &model.config_hash[..12.min(model.config_hash.len())]
            ),
        ),
        (
            "shape",
            format!(
                "{} layers, hidden {}, vocabulary {}, context {}",
                model.num_layers, model.hidden_size, model.vocab_size, model.context
            ),
        ),
        ("planes", format!("{points} (final {})", args.final_state)),
        ("input axis", format!("{input} (SGLang, vLLM, speculators, --capture-layers)")),
        ("output axis", format!("{output} (SpecForge, ModelOpt, TorchSpec, NeMo)")),
        ("capture", format!("{:?}", args.capture).to_lowercase()),
        ("compute", format!("{devices}, dtype {}, {} threads", auto(args.dtype), args.compute_threads())),
        (
            "batch",
            format!(
                "{} prompt tokens, {} texts continued, KV budget {}",
                args.batch_tokens(),
                args.max_running_requests,
                args.kv_budget()
            ),
        ),
        (
            "dumps",
            format!(
                "{} ({} layout, {}, budget {}{})",
                dump_dir.display(),
                args.dump_layout,
                auto(args.dump_dtype),
                args.dump_budget,
                if args.fsync { ", fsync" } else { "" }
            ),
        ),
    ];
    let lines: String = rows.iter().map(|(name, value)| format!("\n  {name:<12} {value}")).collect();
    tracing::info!("tether-server {}{lines}", env!("CARGO_PKG_VERSION"));
}
