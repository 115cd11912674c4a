//! The model: loading it, and the pass over packed sequences.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::attention::Step;
use crate::batch::Batch;
use crate::capture::{Capture, CapturePoint, Captures};
use crate::config::Config;
use crate::layer::DecoderLayer;
use crate::linear::Linear;
use crate::mapped::Parameter;
use crate::norm::RmsNorm;
use crate::products::Products;
use crate::rope::Rope;
use crate::routes::Routes;
use crate::weights::{Checkpoint, Source, Weights, kind_of};
use crate::{ForwardError, LoadError};

/// How a checkpoint becomes a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: Device,
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

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Its tokens; position 0 is the first.
    pub token_ids: &'a [i64],
    /// What to keep of its hidden states.
    pub capture: Option<Capture<'a>>,
    /// Whether to compute the logits behind its last token.
    pub last_logits: bool,
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
}

/// A DeepSeek-V2 or -V3 model with its weights. It is run from one thread at a time.
#[derive(Debug)]
pub struct Model {
    config: Config,
    device: Device,
    kind: Kind,
    products: Products,
    tile_tokens: i64,
    body: Body,
    rope: Rope,
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
    fn load(weights: &Weights<'_>, config: &Config, activations: Kind) -> Result<Self, LoadError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let model = weights.sub("model");
        let embed_tokens = model.sub("embed_tokens").get("weight", &[vocab, hidden])?;
        let layer = |index| DecoderLayer::load(&model.sub("layers").sub(index), config, index, activations);
        Ok(Self {
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
            norm: RmsNorm::load(&model.sub("norm"), hidden, config.rms_norm_eps, activations)?,
            lm_head: match config.tie_word_embeddings {
                true => Linear::sharing(&embed_tokens),
                false => Linear::load(&weights.sub("lm_head"), hidden, vocab, false)?,
            },
            embed_tokens,
        })
    }
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
        let config = Config::read(dir)?;
        let tile_tokens = i64::try_from(options.tile_tokens).ok().filter(|&tokens| tokens > 0);
        let tile_tokens = tile_tokens.ok_or_else(|| LoadError::Option {
            option: "tile_tokens",
            value: options.tile_tokens.to_string(),
            supported: "at least one row goes through a layer at a time",
        })?;
        if options.device.is_cuda() && !tch::Cuda::is_available() {
            return Err(LoadError::Option {
                option: "device",
                value: format!("{:?}", options.device),
                supported: "this libtorch finds no CUDA device",
            });
        }
        let checkpoint = Checkpoint::open(dir)?;
        let kind = kind(options.dtype, &config, &checkpoint);
        let products = products.unwrap_or_else(|| Products::suited_to(options.device, kind));
        let activations = products.activations(kind);
        let _no_grad = tch::no_grad_guard();
        let check = Source::new(&checkpoint, options.device, kind, false);
        Body::load(&check.root(), &config, activations)?;
        report_unused(&check.finish()?, &config);
        let source = Source::new(&checkpoint, options.device, kind, true);
        let body = Body::load(&source.root(), &config, activations)?;
        source.finish()?;
        let (device, rope) = (options.device, Rope::new(&config));
        let model = Self { config, device, kind, products, tile_tokens, body, rope };
        tracing::info!(
            layers = model.config.num_hidden_layers,
            files = checkpoint.files(),
            compute = model.compute_note(),
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

    /// Where the model runs.
    pub fn device(&self) -> Device {
        self.device
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
        match self.device {
            Device::Cpu => format!("cpu, {kind}, {products}, {threads} threads"),
            Device::Cuda(index) => format!("cuda:{index}, {kind}, {products}"),
            other => format!("{other:?}, {kind}, {products}"),
        }
    }

    /// One pass over packed sequences; results in the order given.
    ///
    /// # Errors
    /// When a sequence cannot be run, or libtorch refuses. Nothing is kept of a failed pass, and the model stays usable.
    pub fn forward(&self, sequences: &[Sequence<'_>]) -> Result<Vec<SequenceOutput>, ForwardError> {
        self.forward_with(sequences, Routes::Free)
    }

    /// As [`forward`](Self::forward), watching or deciding which experts are used.
    pub fn forward_with(
        &self,
        sequences: &[Sequence<'_>],
        mut routes: Routes<'_>,
    ) -> Result<Vec<SequenceOutput>, ForwardError> {
        let batch = Batch::new(sequences, self.config.vocab_size, self.config.max_position_embeddings)?;
        let with_experts =
            (0..self.config.num_hidden_layers).filter(|&layer| self.config.is_moe(layer)).count();
        let (top_k, experts) = (self.config.num_experts_per_tok, self.config.n_routed_experts);
        guarded(|| {
            routes.check(with_experts, batch.rows(), top_k, experts)?;
            let captures = Captures::new(sequences, self.config.num_hidden_layers, self.config.hidden_size)?;
            Ok(self.run(sequences, &batch, captures, &mut routes))
        })?
    }

    /// The output head over rows that went through the final norm: `[rows, hidden]` to `[rows, vocab]`, f32.
    ///
    /// # Panics
    /// When libtorch refuses, most often for want of memory.
    pub fn logits(&self, normed: &Tensor) -> Tensor {
        let _no_grad = tch::no_grad_guard();
        let activations = self.products.activations(self.kind);
        let normed = normed.to_device(self.device).to_kind(activations);
        self.body.lm_head.forward(&normed).to_kind(Kind::Float)
    }

    /// The pass itself: for each layer, for each tile of tokens.
    fn run(
        &self,
        sequences: &[Sequence<'_>],
        batch: &Batch,
        mut captures: Captures<'_>,
        routes: &mut Routes<'_>,
    ) -> Vec<SequenceOutput> {
        if sequences.is_empty() {
            return Vec::new();
        }
        let ids: Vec<i64> = sequences.iter().flat_map(|sequence| sequence.token_ids).copied().collect();
        let token_ids = Tensor::from_slice(&ids).to_device(self.device);
        // The residual stream of the whole step, `[num_tokens, hidden]`; layers work on it in place.
        let hidden = Tensor::embedding(&self.body.embed_tokens, &token_ids, -1, false, false);
        let tiles = batch.tiles(self.tile_tokens);
        let step = self.step(batch);
        for (layer, index) in self.body.layers.iter().zip(0..) {
            for tile in &tiles {
                let mut rows = hidden.narrow(0, tile.first, tile.rows);
                captures.keep(CapturePoint::Residual(index), tile, &rows);
                layer.forward_(&mut rows, tile, &step, routes);
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
        // On the CPU this is the tensor that the embedding read.
        let token_ids = token_ids.to_device(Device::Cpu);
        let outputs = sequences.iter().zip(batch.sequences()).zip(captures.into_states());
        outputs
            .map(|((sequence, (first, rows)), hidden_states)| SequenceOutput {
                token_ids: token_ids.narrow(0, first, rows),
                hidden_states,
                logits: sequence.last_logits.then(|| logits.next()).flatten(),
            })
            .collect()
    }

    fn step(&self, batch: &Batch) -> Step {
        let latent = self.config.kv_lora_rank + self.config.qk_rope_head_dim;
        let activations = self.products.activations(self.kind);
        Step {
            rotations: self.rope.rotations(&batch.positions(), batch.longest(), self.device),
            latents: Tensor::empty([batch.rows(), latent], (activations, self.device)),
        }
    }

    /// The logits of those sequences that want them, in order. Norm and head see their last rows only.
    fn last_logits(&self, sequences: &[Sequence<'_>], batch: &Batch, hidden: &Tensor) -> Vec<Tensor> {
        let wanted = sequences.iter().zip(batch.sequences()).filter(|(sequence, _)| sequence.last_logits);
        let last: Vec<i64> = wanted.map(|(_, (first, rows))| first + rows - 1).collect();
        if last.is_empty() {
            return Vec::new();
        }
        let rows = hidden.index_select(0, &Tensor::from_slice(&last).to_device(self.device));
        self.logits(&self.body.norm.forward(&rows)).to_device(Device::Cpu).unbind(0)
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
    let stored = || checkpoint.dtype("model.embed_tokens.weight").and_then(kind_of);
    match (choice, config.torch_dtype.as_deref()) {
        (DtypeChoice::Float32, _) => Kind::Float,
        (DtypeChoice::BFloat16, _) | (DtypeChoice::Auto, Some("bfloat16")) => Kind::BFloat16,
        (DtypeChoice::Auto, None) if stored() == Some(Kind::BFloat16) => Kind::BFloat16,
        (DtypeChoice::Auto, _) => Kind::Float,
    }
}

/// Says which tensors of the checkpoint are not used. Those of the layers for multi-token prediction, which come after
/// the decoder's, and the frequencies that old checkpoints store are expected; others may be a sign of a wrong config.
fn report_unused(names: &[&str], config: &Config) {
    let prediction = |name: &str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        layer.and_then(|layer| layer.parse().ok()).is_some_and(|layer: i64| layer >= config.num_hidden_layers)
    };
    let expected = |name: &&str| prediction(name) || name.ends_with(".rotary_emb.inv_freq");
    let (expected, unexpected): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| expected(name));
    if !expected.is_empty() {
        tracing::info!(count = expected.len(), "tensors of layers that are not run were skipped");
    }
    if !unexpected.is_empty() {
        let shown = unexpected[..unexpected.len().min(20)].join(", ");
        tracing::warn!(
            count = unexpected.len(),
            names = shown,
            "the checkpoint has tensors the config does not ask for"
        );
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
