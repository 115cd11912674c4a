//! The model behind the engine: tether-model's forward pass as a [`StepModel`].

use std::ffi::CStr;
use std::path::PathBuf;
use std::slice;

use tch::{Device, Kind, Tensor};
use tether_dump::Dtype;
use tether_model::{Capture, DtypeChoice, KvCache, LoadError, LoadOptions, LoadTable, Model, Sequence};

use crate::engine::{States, StepError, StepModel, StepOutput, StepSequence};

/// What to load, where, and in which number formats.
#[derive(Clone, Debug)]
pub struct TorchOptions {
    /// The checkpoint.
    pub dir: PathBuf,
    /// Where it runs: one device, or several that layers are spread over.
    pub devices: Vec<Device>,
    /// What it computes in.
    pub dtype: DtypeChoice,
    /// What states are stored in; `None` for what it computes in.
    pub dump_dtype: Option<Dtype>,
    /// Threads of an operation on the CPU.
    pub threads: usize,
    /// Packed rows that go through a layer together.
    pub tile_tokens: usize,
}

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// The checkpoint.
    #[error("the model in {} could not be loaded", dir.display())]
    Load {
        /// Where it is.
        dir: PathBuf,
        /// Why.
        source: LoadError,
    },
    /// The device.
    #[error("--device cuda:{index}: {reason}")]
    NoDevice {
        /// The one asked for.
        index: usize,
        /// Why it cannot be used.
        reason: String,
    },
    /// The model computes in something that no dump can be in.
    #[error("the model computes in {kind:?}, which no dump can be in; --dump-dtype names one that it can")]
    NoDtype {
        /// What it computes in.
        kind: Kind,
    },
    /// The trial run.
    #[error("the model was loaded, but a trial run failed")]
    WarmUp(#[source] StepError),
}

/// A loaded model.
pub struct TorchModel {
    model: Model,
    dump_kind: Kind,
    dump_dtype: Dtype,
}

impl TorchModel {
    /// Loads the checkpoint. Must be called on the thread that will run it: libtorch's settings are per thread.
    ///
    /// # Errors
    /// See [`TorchError`].
    pub fn load(options: &TorchOptions) -> Result<Self, TorchError> {
        // Each thread that calls libtorch gets a pool of its own, so these are set once, on the one that does.
        tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
        tch::set_num_interop_threads(1);
        for device in &options.devices {
            if let Device::Cuda(index) = *device {
                open_cuda(index)?;
            }
        }
        let load = LoadOptions {
            devices: options.devices.clone(),
            dtype: options.dtype,
            tile_tokens: options.tile_tokens,
        };
        let model = Model::load(&options.dir, &load)
            .map_err(|source| TorchError::Load { dir: options.dir.clone(), source })?;
        let dump_dtype = match options.dump_dtype {
            Some(dtype) => dtype,
            None => dtype_of(model.kind()).ok_or(TorchError::NoDtype { kind: model.kind() })?,
        };
        let dump_kind = match dump_dtype {
            Dtype::Float32 => Kind::Float,
            Dtype::BFloat16 => Kind::BFloat16,
            Dtype::Float16 => Kind::Half,
        };
        Ok(Self { model, dump_kind, dump_dtype })
    }

    /// What states are stored in.
    pub fn dump_dtype(&self) -> Dtype {
        self.dump_dtype
    }

    /// Device, number format and threads, for the start-up log.
    pub fn compute_note(&self) -> String {
        self.model.compute_note()
    }

    /// What was loaded, and how it is stored.
    pub fn load_table(&self) -> &LoadTable {
        self.model.load_table()
    }

    /// Runs a few tokens, so that what is set up on first use is there before the first request. Makes no dump.
    ///
    /// # Errors
    /// What the pass said.
    pub fn warm_up(&self, spec: &tether_model::CaptureSpec) -> Result<(), TorchError> {
        let config = self.model.config();
        let tokens = 8.min(config.vocab_size).min(config.max_position_embeddings);
        let token_ids: Vec<i64> = (0..tokens).collect();
        let capture = crate::engine::StepCapture { spec, first_row: 0 };
        let sequence = StepSequence {
            token_ids: &token_ids,
            cache: None,
            capture: Some(capture),
            logits: true,
            scoring: None,
        };
        self.step(&mut [sequence]).map(drop).map_err(TorchError::WarmUp)
    }
}

impl StepModel for TorchModel {
    type Cache = KvCache;

    fn new_cache(&self, tokens: usize) -> KvCache {
        self.model.new_cache_for(tokens)
    }

    fn cache_bytes_per_token(&self) -> u64 {
        self.model.cache_bytes_per_token()
    }

    fn step(&self, sequences: &mut [StepSequence<'_, KvCache>]) -> Result<Vec<StepOutput>, StepError> {
        // Off per thread, so it stands where the forward pass is.
        let _no_grad = tch::no_grad_guard();
        let mut sequences: Vec<Sequence<'_>> =
            sequences.iter_mut().map(|sequence| self.sequence(sequence)).collect();
        let outputs = self.model.forward(&mut sequences).map_err(|error| StepError(error.to_string()))?;
        let unreadable = |error: tch::TchError| StepError(error.to_string());
        let outputs = outputs.into_iter().map(|output| {
            Ok(StepOutput {
                token_ids: Vec::try_from(&output.token_ids).map_err(unreadable)?,
                states: output
                    .hidden_states
                    .map(|states| TensorBytes::new(states).map(States::new))
                    .transpose()?,
                logits: output.logits.map(|logits| Vec::try_from(&logits)).transpose().map_err(unreadable)?,
                scores: output.scores,
            })
        });
        outputs.collect()
    }
}

impl TorchModel {
    fn sequence<'a>(&self, sequence: &'a mut StepSequence<'_, KvCache>) -> Sequence<'a> {
        let capture = |capture: crate::engine::StepCapture<'a>| Capture {
            spec: capture.spec,
            kind: self.dump_kind,
            first_row: capture.first_row,
        };
        Sequence {
            token_ids: sequence.token_ids,
            cache: sequence.cache.as_deref_mut(),
            capture: sequence.capture.map(capture),
            last_logits: sequence.logits,
            scoring: sequence.scoring,
        }
    }
}

fn dtype_of(kind: Kind) -> Option<Dtype> {
    match kind {
        Kind::Float => Some(Dtype::Float32),
        Kind::BFloat16 => Some(Dtype::BFloat16),
        Kind::Half => Some(Dtype::Float16),
        _ => None,
    }
}

/// The memory of a tensor, as the bytes that a dump holds.
struct TensorBytes {
    tensor: Tensor,
    len: usize,
}

impl TensorBytes {
    fn new(tensor: Tensor) -> Result<Self, StepError> {
        if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
            return Err(StepError("hidden states came in memory that cannot be read as it lies".to_owned()));
        }
        let len = tensor.numel() * tensor.kind().elt_size_in_bytes();
        Ok(Self { tensor, len })
    }
}

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: a contiguous CPU tensor (checked in `new`) owns `numel * element size` initialised bytes at its data
        // pointer, alive as long as `tensor` is. Nobody writes to them: the model gave the tensor away with its own
        // storage, and this struct never hands it out.
        unsafe { slice::from_raw_parts(self.tensor.data_ptr().cast::<u8>(), self.len) }
    }
}

/// Opens libtorch's CUDA half, which registers itself. Not linked against, so that one binary also runs where there is none.
fn open_cuda(index: usize) -> Result<(), TorchError> {
    let refuse = |reason: String| Err(TorchError::NoDevice { index, reason });
    // SAFETY: a constant, terminated string; the library's initialisers are libtorch's own, run once by the loader, on a
    // process that has started no work on libtorch yet. `dlerror` gives a terminated string or null, read at once.
    let error = unsafe {
        let handle = libc::dlopen(c"libtorch_cuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        let error = if handle.is_null() { libc::dlerror() } else { std::ptr::null_mut() };
        (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
    };
    if let Some(error) = error {
        return refuse(format!("libtorch's CUDA library could not be opened: {error}"));
    }
    let devices = tch::Cuda::device_count();
    match usize::try_from(devices) {
        Ok(devices) if index < devices => Ok(()),
        _ => refuse(format!("libtorch sees {devices} CUDA devices")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_tensor_are_its_values_in_little_endian() {
        let bytes = TensorBytes::new(Tensor::from_slice(&[1.0f32, -2.5]).view([1, 2])).unwrap();
        assert_eq!(bytes.as_ref(), [1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat());
        let empty = TensorBytes::new(Tensor::from_slice::<f32>(&[])).unwrap();
        assert!(empty.as_ref().is_empty());
    }

    #[test]
    fn a_view_across_rows_is_not_read_as_if_it_were_whole() {
        let square = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
        assert!(TensorBytes::new(square.tr()).is_err());
    }
}
