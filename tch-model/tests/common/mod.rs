//! The tiny checkpoints that `tests/python/make_models.py` writes, and what the references made of them.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod bounds;

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};
use tether_model::{
    Capture, CaptureSpec, DtypeChoice, FinalState, KvCache, LoadOptions, Model, Products, Routes, Sequence,
    SequenceOutput,
};

/// Where the models are. Fails, and does not skip, if they were not made.
pub(crate) fn golden_dir() -> PathBuf {
    // Tests run side by side, one on each core; products this small gain nothing from more.
    tch::set_num_threads(1);
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tether/golden");
    assert!(
        dir.join("complete").is_file(),
        "{} holds no complete set of reference models; make it with: .tether/venv/bin/python tests/python/make_models.py",
        dir.display()
    );
    dir
}

pub(crate) fn model_dir(name: &str) -> PathBuf {
    let dir = golden_dir().join(name);
    assert!(
        dir.is_dir(),
        "{} was not made yet; make it with: .tether/venv/bin/python tests/python/make_models.py",
        dir.display()
    );
    dir
}

pub(crate) fn load(dir: &Path, dtype: DtypeChoice, tile_tokens: usize, products: Option<Products>) -> Model {
    Model::load_with(dir, &LoadOptions { devices: vec![device()], dtype, tile_tokens }, products).unwrap()
}

/// Where the models run: the CPU, or what `TETHER_TEST_DEVICE` says, `cuda:0` for example.
pub(crate) fn device() -> Device {
    let Ok(name) = std::env::var("TETHER_TEST_DEVICE") else { return Device::Cpu };
    match name.strip_prefix("cuda:").map(str::parse) {
        _ if name == "cpu" => Device::Cpu,
        Some(Ok(index)) => Device::Cuda(index),
        _ => panic!("TETHER_TEST_DEVICE is {name}; cpu or cuda:N is expected"),
    }
}

pub(crate) fn float32(name: &str, tile_tokens: usize) -> Model {
    load(&model_dir(name), DtypeChoice::Float32, tile_tokens, None)
}

/// One model's prompts and what the references made of them.
pub(crate) struct Golden {
    pub(crate) prompts: Vec<Vec<i64>>,
    pub(crate) margin: f64,
    file: Vec<u8>,
}

impl Golden {
    pub(crate) fn read(name: &str) -> Self {
        Self::read_file(name, "golden.safetensors")
    }

    /// Another file of the same prompts.
    pub(crate) fn read_file(name: &str, file: &str) -> Self {
        let file = std::fs::read(model_dir(name).join(file)).unwrap();
        let (_, header) = SafeTensors::read_metadata(&file).unwrap();
        let margin = header.metadata().as_ref().unwrap()["margin"].parse().unwrap();
        let mut golden = Self { prompts: Vec::new(), margin, file };
        let ids: Vec<i64> = golden.get("token_ids").try_into().unwrap();
        let lengths: Vec<i64> = golden.get("lengths").try_into().unwrap();
        let mut rest = ids.as_slice();
        for length in lengths {
            let (prompt, behind) = rest.split_at(length as usize);
            golden.prompts.push(prompt.to_vec());
            rest = behind;
        }
        golden
    }

    pub(crate) fn get(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.file).unwrap();
        let view = file.tensor(name).unwrap();
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::F64 => Kind::Double,
            Dtype::I64 => Kind::Int64,
            other => panic!("{name} is {other:?}"),
        };
        let shape: Vec<i64> = view.shape().iter().map(|&dimension| dimension as i64).collect();
        Tensor::from_data_size(view.data(), &shape, kind)
    }

    /// The reference's experts, one tensor for each layer that has any.
    pub(crate) fn experts(&self) -> Vec<Tensor> {
        self.get("experts").unbind(0)
    }

    pub(crate) fn prompts(&self) -> Vec<&[i64]> {
        self.prompts.iter().map(Vec::as_slice).collect()
    }
}

/// Every plane there is.
pub(crate) fn everything(model: &Model) -> CaptureSpec {
    let layers = model.config().num_hidden_layers;
    let points: Vec<i64> = (0..=layers).collect();
    CaptureSpec::new(&points, FinalState::Both, layers).unwrap()
}

pub(crate) fn sequences<'a>(prompts: &[&'a [i64]], spec: &'a CaptureSpec) -> Vec<Sequence<'a>> {
    let capture = Some(Capture { spec, kind: Kind::Float, first_row: 0 });
    prompts
        .iter()
        .map(|token_ids| Sequence { capture, last_logits: true, ..Sequence::new(token_ids) })
        .collect()
}

/// All planes `[tokens, planes, hidden]` and all logits `[tokens, vocab]` of prompts run together, in float32.
pub(crate) fn run(model: &Model, prompts: &[&[i64]], routes: Routes<'_>) -> (Tensor, Tensor) {
    let spec = everything(model);
    let outputs = model.forward_with(&mut sequences(prompts, &spec), routes).unwrap();
    let planes: Vec<&Tensor> = outputs.iter().map(|output| output.hidden_states.as_ref().unwrap()).collect();
    let planes = Tensor::cat(&planes, 0);
    let logits = model
        .logits(&planes.select(1, spec.planes().len() as i64 - 1).to_device(device()))
        .unwrap()
        .to_device(Device::Cpu);
    let planes = planes.to_device(Device::Cpu);
    let ends = prompts.iter().scan(0, |end, prompt| {
        *end += prompt.len() as i64;
        Some(*end - 1)
    });
    for (output, row) in outputs.iter().zip(ends) {
        check_last_logits(model, output, &logits.get(row));
    }
    (planes, logits)
}

/// The logits that a pass gives, which generation uses, are those of a sequence's last row, which the tests hold to the
/// reference.
fn check_last_logits(model: &Model, output: &SequenceOutput, of_row: &Tensor) {
    // bfloat16 rounds norm and head anew where other rows are beside a row; float32's last bits are all that may differ.
    let bound = if model.kind() == Kind::Float { 1e-5 } else { 2e-2 };
    let last = output.logits.as_ref().unwrap().to_device(Device::Cpu);
    assert_eq!(last.kind(), Kind::Float);
    let apart = (&last - of_row).abs().max().double_value(&[]);
    let largest = last.abs().max().double_value(&[]);
    assert!(apart <= bound * largest, "last logits are off by {apart} of {largest}");
}

/// Each prompt in a pass of its own.
pub(crate) fn run_alone(model: &Model, prompts: &[&[i64]]) -> (Tensor, Tensor) {
    let runs: Vec<_> = prompts.iter().map(|prompt| run(model, &[prompt], Routes::Free)).collect();
    let (planes, logits): (Vec<&Tensor>, Vec<&Tensor>) =
        runs.iter().map(|(planes, logits)| (planes, logits)).unzip();
    (Tensor::cat(&planes, 0), Tensor::cat(&logits, 0))
}

/// As [`run`], each prompt `chunk` tokens at a time behind a cache of its own; the next chunks of all go through together.
pub(crate) fn run_in_chunks(model: &Model, prompts: &[&[i64]], chunk: usize) -> (Tensor, Tensor) {
    let spec = everything(model);
    let capture = Some(Capture { spec: &spec, kind: Kind::Float, first_row: 0 });
    let mut caches: Vec<KvCache> = prompts.iter().map(|_| model.new_cache()).collect();
    let mut planes: Vec<Vec<Tensor>> = prompts.iter().map(|_| Vec::new()).collect();
    let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap();
    let (mut passes, mut ends) = (Vec::new(), Vec::new());
    for first in (0..longest).step_by(chunk) {
        let going = |prompt: &&[i64]| prompt.len() > first;
        let mut step: Vec<Sequence<'_>> = prompts
            .iter()
            .zip(&mut caches)
            .filter(|(prompt, _)| going(prompt))
            .map(|(prompt, cache)| Sequence {
                capture,
                cache: Some(cache),
                last_logits: true,
                ..Sequence::new(&prompt[first..prompt.len().min(first + chunk)])
            })
            .collect();
        let outputs = model.forward(&mut step).unwrap();
        let mut begin = 0;
        for prompt in prompts {
            if going(prompt) {
                ends.push((begin + prompt.len().min(first + chunk) - 1) as i64);
            }
            begin += prompt.len();
        }
        let of = planes.iter_mut().zip(prompts).filter(|(_, prompt)| going(prompt));
        for ((planes, _), mut output) in of.zip(outputs) {
            planes.push(output.hidden_states.take().unwrap());
            passes.push(output);
        }
    }
    for (cache, prompt) in caches.iter().zip(prompts) {
        assert_eq!(cache.len(), prompt.len());
    }
    let planes: Vec<Tensor> = planes.into_iter().flatten().collect();
    let planes = Tensor::cat(&planes, 0);
    let logits = model
        .logits(&planes.select(1, spec.planes().len() as i64 - 1).to_device(device()))
        .unwrap()
        .to_device(Device::Cpu);
    for (output, row) in passes.iter().zip(ends) {
        check_last_logits(model, output, &logits.get(row));
    }
    (planes.to_device(Device::Cpu), logits)
}

/// `|a - b| / |b|`, in float64.
pub(crate) fn relative_error(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    ((a - &b).norm() / b.norm()).double_value(&[])
}

/// The largest difference of an element, as a part of its row's largest magnitude.
pub(crate) fn worst_element(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    let largest = b.abs().amax([-1i64].as_slice(), true);
    ((a - &b).abs() / largest).max().double_value(&[])
}
