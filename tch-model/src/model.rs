//! The model: loading it, and the pass over packed sequences.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use crate::attention::{Past, Step};
use crate::batch::Batch;
use crate::cache::KvCache;
use crate::capture::{Capture, CapturePoint, Captures};
use crate::config::Config;
use crate::devices::{self, Stage};
use crate::layer::DecoderLayer;
use crate::linear::Linear;
use crate::mapped::Parameter;
use crate::norm::RmsNorm;
use crate::products::Products;
use crate::rope::Rope;
use crate::routes::Routes;
use crate::scores::{Scores, Scoring};
use crate::weights::{Checkpoint, LoadTable, Source, Unused};
use crate::{ForwardError, LoadError};

/// How a checkpoint becomes a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Where it runs: one device, or several that the layers are spread over in order.
    pub devices: Vec<Device>,
    /// What it computes in.
    pub dtype: DtypeChoice,
    /// Packed rows that go through a layer together. More rows make better products and need more memory.
    pub tile_tokens: usize,
}

/// What the weights and the residual stream are held in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DtypeChoice {
    /// bfloat16 for a bfloat16 checkpoint, float32 for every other.
    #[default]
    Auto,
    /// float32.
    Float32,
    /// bfloat16.
    BFloat16,
}

/// One sequence of a step, or the next part of one.
#[derive(Debug)]
pub struct Sequence<'a> {
    /// Its tokens; those behind what the cache holds.
    pub token_ids: &'a [i64],
    /// What earlier passes have made of the tokens before these, to which this one adds. `None` for a sequence that is
    /// run whole and once.
    pub cache: Option<&'a mut KvCache>,
    /// What to keep of its hidden states.
    pub capture: Option<Capture<'a>>,
    /// Whether to compute the logits behind its last token.
    pub last_logits: bool,
    /// How likely given tokens are behind its own.
    pub scoring: Option<Scoring<'a>>,
}

impl<'a> Sequence<'a> {
    /// One that is run for nothing yet.
    pub fn new(token_ids: &'a [i64]) -> Self {
        Self { token_ids, cache: None, capture: None, last_logits: false, scoring: None }
    }
}

/// What a step made of one sequence.
#[derive(Debug)]
pub struct SequenceOutput {
    /// The tokens, int64 on the CPU: a part of the very tensor that the embedding consumed, or its copy from the device.
    pub token_ids: Tensor,
    /// `[rows, planes, hidden]` in the kind asked for, on the CPU, contiguous and in storage of its own.
    pub hidden_states: Option<Tensor>,
    /// `[vocab]`, f32 on the CPU: what the model says of the token after the last.
    pub logits: Option<Tensor>,
    /// What was asked by [`Sequence::scoring`].
    pub scores: Option<Scores>,
}

/// A DeepSeek-V2 or -V3 model with its weights. It is run from one thread at a time.
#[derive(Debug)]
pub struct Model {
    config: Config,
    stages: Vec<Stage>,
    kind: Kind,
    products: Products,
    tile_tokens: i64,
    body: Body,
    rope: Rope,
    table: LoadTable,
}

/// Everything that has weights.
#[derive(Debug)]
struct Body {
    embed_tokens: Parameter, // [vocab, hidden]
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Body {
    /// The embedding on the first device, norm and head on the last.
    fn load(
        source: &Source<'_>,
        config: &Config,
        stages: &[Stage],
        activations: Kind,
    ) -> Result<Self, LoadError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let (first, last) = ends(stages);
        let body = source.body();
        let embed_tokens = body.sub("embed_tokens").on(first).get("weight", &[vocab, hidden])?;
        let mut layers = Vec::new();
        for stage in stages {
            for index in stage.layers.clone() {
                let weights = body.sub("layers").sub(index).on(stage.device);
                layers.push(DecoderLayer::load(&weights, config, index as i64, activations)?);
            }
        }
        let tied = || -> Result<Linear, LoadError> {
            match first == last {
                true => Ok(Linear::sharing(&embed_tokens)),
                false => Ok(Linear::plain(Parameter::owned(embed_tokens.f_to_device(last)?))),
            }
        };
        Ok(Self {
            layers,
            norm: RmsNorm::load(&body.sub("norm").on(last), hidden, config.rms_norm_eps, activations)?,
            lm_head: match config.tie_word_embeddings {
                true => tied()?,
                false => Linear::load(&source.head().on(last), hidden, vocab, false)?,
            },
            embed_tokens,
        })
    }
}

/// The first and the last device.
fn ends(stages: &[Stage]) -> (Device, Device) {
    let device = |stage: Option<&Stage>| stage.expect("a model has a device, checked in `load`").device;
    (device(stages.first()), device(stages.last()))
}

impl Model {
    /// Loads the checkpoint in `dir`. Weights already in the kind asked for are used where they lie in the mapped files, so
    /// these must not be changed while the model exists.
    ///
    /// # Errors
    /// When the config asks for what this code does not do, and when files or tensors are absent or do not fit the config:
    /// all of them are named, before any weight is touched.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self, LoadError> {
        Self::load_with(dir, options, None)
    }

    /// As [`load`](Self::load), with the products chosen by the caller and not by the CPU.
    pub fn load_with(
        dir: &Path,
        options: &LoadOptions,
        products: Option<Products>,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let config = Config::read(dir)?;
        let tile_tokens = i64::try_from(options.tile_tokens).ok().filter(|&tokens| tokens > 0);
        let tile_tokens = tile_tokens.ok_or_else(|| LoadError::Option {
            option: "tile_tokens",
            value: options.tile_tokens.to_string(),
            supported: "at least one row goes through a layer at a time",
        })?;
        let stages = stages(&options.devices, &config)?;
        let checkpoint = Checkpoint::open(dir)?;
        let kind = kind(options.dtype, &config, &checkpoint);
        // Where one of several is the CPU, it is the one that needs care.
        let decisive = options.devices.iter().find(|device| **device == Device::Cpu);
        let decisive = *decisive.unwrap_or(&ends(&stages).0);
        let products = products.unwrap_or_else(|| Products::suited_to(decisive, kind));
        let activations = products.activations(kind);
        let _no_grad = tch::no_grad_guard();
        let check = Source::new(&checkpoint, &config, kind, false);
        Body::load(&check, &config, &stages, activations)?;
        report_unused(&check.finish()?.unused);
        let source = Source::new(&checkpoint, &config, kind, true);
        let body = Body::load(&source, &config, &stages, activations)?;
        let mut table = source.finish()?.table;
        table.took = started.elapsed();
        let rope = Rope::new(&config);
        let model = Self { config, stages, kind, products, tile_tokens, body, rope, table };
        tracing::info!(
            layers = model.config.num_hidden_layers,
            files = checkpoint.files(),
            compute = model.compute_note(),
            softmax_scale = model.config.softmax_scale(),
            parameters = model.table.total().parameters,
            stored_bytes = model.table.total().stored_bytes,
            mapped_bytes = model.table.total().mapped_bytes,
            seconds = model.table.took.as_secs_f64(),
            "model loaded"
        );
        Ok(model)
    }

    /// The checkpoint's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The kind of the residual stream, and so the most exact one that hidden states can be kept in.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What was loaded, and how it is stored.
    pub fn load_table(&self) -> &LoadTable {
        &self.table
    }

    /// What products are computed in.
    pub fn products(&self) -> Products {
        self.products
    }

    /// Device, number format, how products are computed and on how many threads: a line for the start-up log.
    pub fn compute_note(&self) -> String {
        let kind = match self.kind {
            Kind::BFloat16 => "bfloat16",
            _ => "float32",
        };
        let (products, threads) = (self.products, tch::get_num_threads());
        let place = match &self.stages[..] {
            [one] => devices::name(one.device),
            several => {
                let on =
                    |stage: &Stage| format!("{} on {}", range(&stage.layers), devices::name(stage.device));
                format!("layers {}", several.iter().map(on).collect::<Vec<_>>().join(", "))
            }
        };
        match self.stages.iter().any(|stage| stage.device == Device::Cpu) {
            true => format!("{place}, {kind}, {products}, {threads} threads"),
            false => format!("{place}, {kind}, {products}"),
        }
    }

    /// One pass over packed sequences; results in the order given.
    ///
    /// # Errors
    /// When a sequence cannot be run, or libtorch refuses. Nothing is kept of a failed pass: caches hold what they held, and
    /// the model stays usable.
    pub fn forward(&self, sequences: &mut [Sequence<'_>]) -> Result<Vec<SequenceOutput>, ForwardError> {
        self.forward_with(sequences, Routes::Free)
    }

    /// As [`forward`](Self::forward), watching or deciding which experts are used.
    pub fn forward_with(
        &self,
        sequences: &mut [Sequence<'_>],
        mut routes: Routes<'_>,
    ) -> Result<Vec<SequenceOutput>, ForwardError> {
        let batch = Batch::new(sequences, self.config.vocab_size, self.config.max_position_embeddings)?;
        let with_experts =
            (0..self.config.num_hidden_layers).filter(|&layer| self.config.is_moe(layer)).count();
        let (top_k, experts) = (self.config.num_experts_per_tok, self.config.n_routed_experts);
        guarded(|| {
            routes.check(with_experts, batch.rows(), top_k, experts)?;
            let captures = Captures::new(sequences, self.config.num_hidden_layers, self.config.hidden_size)?;
            let rows: Vec<i64> = batch.sequences().map(|(_, rows)| rows).collect();
            let mut reserve = |(sequence, rows): (&mut Sequence<'_>, &i64)| {
                let cache = sequence.cache.as_mut()?;
                let len = cache.len() as i64;
                Some(Past { len, layers: cache.reserve(*rows) })
            };
            let pasts = sequences.iter_mut().zip(&rows).map(&mut reserve).collect();
            let outputs = self.run(sequences, &batch, pasts, captures, &mut routes);
            for (sequence, rows) in sequences.iter_mut().zip(rows) {
                if let Some(cache) = &mut sequence.cache {
                    cache.extend(rows);
                }
            }
            Ok(outputs)
        })?
    }

    /// A cache without tokens, for a sequence that is run in parts.
    pub fn new_cache(&self) -> KvCache {
        self.new_cache_for(usize::MAX)
    }

    /// As [`new_cache`](Self::new_cache), for a sequence of no more than `tokens` tokens: it never takes more memory than
    /// these fill.
    pub fn new_cache_for(&self, tokens: usize) -> KvCache {
        let positions = self.config.max_position_embeddings;
        let limit = i64::try_from(tokens).unwrap_or(positions).min(positions);
        let devices = self.stages.iter().flat_map(|stage| stage.layers.clone().map(|_| stage.device));
        KvCache::new(devices, self.latent_width(), self.products.activations(self.kind), limit)
    }

    /// Bytes that a token takes in a cache, over all layers.
    pub fn cache_bytes_per_token(&self) -> u64 {
        let element = self.products.activations(self.kind).elt_size_in_bytes() as u64;
        self.latent_width() as u64 * self.config.num_hidden_layers as u64 * element
    }

    fn latent_width(&self) -> i64 {
        self.config.kv_lora_rank + self.config.qk_rope_head_dim
    }

    /// The output head over rows that went through the final norm: `[rows, hidden]` to `[rows, vocab]`, f32.
    ///
    /// # Errors
    /// When libtorch refuses, most often for want of memory.
    pub fn logits(&self, normed: &Tensor) -> Result<Tensor, ForwardError> {
        guarded(|| self.head(normed))
    }

    fn head(&self, normed: &Tensor) -> Tensor {
        let activations = self.products.activations(self.kind);
        let (_, last) = ends(&self.stages);
        let normed = normed.to_device(last).to_kind(activations);
        self.body.lm_head.forward(&normed).to_kind(Kind::Float)
    }

    /// The pass itself: for each layer, for each tile of tokens.
    fn run(
        &self,
        sequences: &[Sequence<'_>],
        batch: &Batch,
        pasts: Vec<Option<Past>>,
        mut captures: Captures<'_>,
        routes: &mut Routes<'_>,
    ) -> Vec<SequenceOutput> {
        if sequences.is_empty() {
            return Vec::new();
        }
        let ids: Vec<i64> = sequences.iter().flat_map(|sequence| sequence.token_ids).copied().collect();
        let token_ids = Tensor::from_slice(&ids).to_device(ends(&self.stages).0);
        // The residual stream of the whole step, `[num_tokens, hidden]`; layers work on it in place.
        let mut hidden = Tensor::embedding(&self.body.embed_tokens, &token_ids, -1, false, false);
        let tiles = batch.tiles(self.tile_tokens);
        let mut step = self.step(batch, ends(&self.stages).0, pasts);
        for (number, stage) in self.stages.iter().enumerate() {
            if number > 0 {
                hidden = hidden.to_device(stage.device);
                step = self.step(batch, stage.device, step.pasts);
            }
            for index in stage.layers.clone() {
                for tile in &tiles {
                    let mut rows = hidden.narrow(0, tile.first, tile.rows);
                    captures.keep(CapturePoint::Residual(index as u16), tile, &rows);
                    self.body.layers[index].forward_(&mut rows, tile, &step, routes);
                }
            }
        }
        for tile in &tiles {
            let rows = hidden.narrow(0, tile.first, tile.rows);
            captures.keep(CapturePoint::Residual(self.body.layers.len() as u16), tile, &rows);
            if captures.wants(CapturePoint::FinalNorm, tile) {
                captures.keep(CapturePoint::FinalNorm, tile, &self.body.norm.forward(&rows));
            }
        }
        let mut logits = self.last_logits(sequences, batch, &hidden).into_iter();
        let mut scores = self.scores(sequences, batch, &hidden).into_iter();
        // On the CPU this is the tensor that the embedding read.
        let token_ids = token_ids.to_device(Device::Cpu);
        let outputs = sequences.iter().zip(batch.sequences()).zip(captures.into_states());
        outputs
            .map(|((sequence, (first, rows)), hidden_states)| SequenceOutput {
                token_ids: token_ids.narrow(0, first, rows),
                hidden_states,
                logits: sequence.last_logits.then(|| logits.next()).flatten(),
                scores: scores.next().flatten(),
            })
            .collect()
    }

    fn step(&self, batch: &Batch, device: Device, pasts: Vec<Option<Past>>) -> Step {
        let activations = self.products.activations(self.kind);
        Step {
            rotations: self.rope.rotations(&batch.positions(), device),
            latents: Tensor::empty([batch.rows(), self.latent_width()], (activations, device)),
            pasts,
        }
    }

    fn scores(&self, sequences: &[Sequence<'_>], batch: &Batch, hidden: &Tensor) -> Vec<Option<Scores>> {
        let head = |rows: &Tensor| self.head(&self.body.norm.forward(rows));
        let of = |(sequence, (first, rows)): (&Sequence<'_>, (i64, i64))| {
            Some(sequence.scoring?.run(&hidden.narrow(0, first, rows), head))
        };
        sequences.iter().zip(batch.sequences()).map(of).collect()
    }

    /// The logits of those sequences that want them, in order. Norm and head see their last rows only.
    fn last_logits(&self, sequences: &[Sequence<'_>], batch: &Batch, hidden: &Tensor) -> Vec<Tensor> {
        let wanted = sequences.iter().zip(batch.sequences()).filter(|(sequence, _)| sequence.last_logits);
        let last: Vec<i64> = wanted.map(|(_, (first, rows))| first + rows - 1).collect();
        if last.is_empty() {
            return Vec::new();
        }
        let rows = hidden.index_select(0, &Tensor::from_slice(&last).to_device(hidden.device()));
        self.head(&self.body.norm.forward(&rows)).to_device(Device::Cpu).unbind(0)
    }
}

/// Runs `pass` without recording it for gradients, which is a setting of the thread, and turns the panic that a
/// refusal by libtorch becomes into an error. libtorch's own state is not touched by it: its operators either return a
/// tensor or do not.
fn guarded<T>(pass: impl FnOnce() -> T) -> Result<T, ForwardError> {
    let _no_grad = tch::no_grad_guard();
    catch_unwind(AssertUnwindSafe(pass)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text");
        // The rest is a C++ backtrace.
        let message = text.split("\\n").next().unwrap_or(text).lines().next().unwrap_or(text);
        ForwardError::Torch { message: message.to_owned() }
    })
}

fn kind(choice: DtypeChoice, config: &Config, checkpoint: &Checkpoint) -> Kind {
    match (choice, config.torch_dtype.as_deref()) {
        (DtypeChoice::Float32, _) => Kind::Float,
        (DtypeChoice::BFloat16, _) | (DtypeChoice::Auto, Some("bfloat16")) => Kind::BFloat16,
        (DtypeChoice::Auto, None) if checkpoint.embedding_kind() == Some(Kind::BFloat16) => Kind::BFloat16,
        (DtypeChoice::Auto, _) => Kind::Float,
    }
}

/// The layers over the devices.
fn stages(devices: &[Device], config: &Config) -> Result<Vec<Stage>, LoadError> {
    let layers = usize::try_from(config.num_hidden_layers).unwrap_or(usize::MAX);
    let refuse = |supported| {
        let value = devices.iter().map(|&device| devices::name(device)).collect::<Vec<_>>().join(",");
        Err(LoadError::Option { option: "devices", value, supported })
    };
    if devices.is_empty() || devices.len() > layers {
        return refuse("at least one device, and no more of them than layers");
    }
    if devices.iter().any(|device| device.is_cuda()) && !tch::Cuda::is_available() {
        return refuse("this libtorch finds no CUDA device");
    }
    Ok(devices::spread(layers, devices))
}

fn range(layers: &Range<usize>) -> String {
    format!("{}-{}", layers.start, layers.end - 1)
}

/// Says which tensors of the checkpoint are not used: some are expected, others may be a sign of a wrong config.
fn report_unused(unused: &[(Unused, &str)]) {
    let count = |what| unused.iter().filter(|(is, _)| *is == what).count();
    let (prediction, vision, implied) =
        (count(Unused::Prediction), count(Unused::Vision), count(Unused::Implied));
    if prediction + vision + implied > 0 {
        tracing::info!(
            multi_token_prediction = prediction,
            vision,
            implied,
            "tensors of what is not run were skipped"
        );
    }
    let elsewhere: Vec<&str> =
        unused.iter().filter(|(is, _)| *is == Unused::Elsewhere).map(|(_, name)| *name).collect();
    if !elsewhere.is_empty() {
        // All of an odd few; a whole second model is told by its first hundred.
        let names = elsewhere[..elsewhere.len().min(100)].join(", ");
        tracing::warn!(count = elsewhere.len(), names, "the checkpoint has tensors beside the text model");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_by_libtorch_is_an_error_of_one_line_and_leaves_gradients_as_they_were() {
        let vector = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        let error = guarded(|| vector.mm(&vector)).unwrap_err();
        let ForwardError::Torch { message } = &error else { panic!("{error}") };
        assert!(message.contains("must be a matrix") || message.contains("2D"), "{message}");
        assert_eq!(message.lines().count(), 1);
        let too_much = guarded(|| Tensor::zeros([1 << 60], (Kind::Float, Device::Cpu)));
        assert!(matches!(too_much, Err(ForwardError::Torch { .. })));
        assert!((vector.set_requires_grad(true) * 2.0).requires_grad());
    }
}
