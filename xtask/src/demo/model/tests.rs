use std::collections::BTreeSet;

use safetensors::SafeTensors;

use super::*;
use crate::demo::assets_dir;

fn model() -> (tempfile::TempDir, Written) {
    let dir = tempfile::tempdir().unwrap();
    let written = write(&dir.path().join("model"), &assets_dir()).unwrap();
    (dir, written)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn every_tensor_is_in_the_shard_that_the_index_names() {
    let (dir, written) = model();
    let dir = dir.path().join("model");
    let index = read_json(&dir.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    assert!(written.shards > 1, "one shard would leave the index untested");
    let expected: BTreeSet<_> = tensors(&SHAPE).into_iter().map(|spec| spec.name).collect();
    assert_eq!(map.keys().cloned().collect::<BTreeSet<_>>(), expected);

    let (mut size, mut numbers) = (0, 0);
    for number in 1..=written.shards {
        let name = format!("model-{number:05}-of-{:05}.safetensors", written.shards);
        let file = fs::read(dir.join(&name)).unwrap();
        for (tensor, view) in SafeTensors::deserialize(&file).unwrap().iter() {
            assert_eq!(map[tensor], name.as_str(), "{tensor}");
            let bias = tensor.ends_with("e_score_correction_bias");
            assert_eq!(view.dtype(), if bias { Dtype::F32 } else { Dtype::BF16 }, "{tensor}");
            size += view.data().len();
            numbers += view.shape().iter().product::<usize>();
        }
    }
    assert_eq!(index["metadata"]["total_size"], size);
    assert_eq!(written.parameters, numbers);
}

#[test]
fn the_same_seed_writes_the_same_bytes() {
    let ((one, _), (two, _)) = (model(), model());
    let name = "model/model-00001-of-";
    for entry in fs::read_dir(one.path().join("model")).unwrap() {
        let path = entry.unwrap().path();
        let same = two.path().join(path.strip_prefix(one.path()).unwrap());
        assert_eq!(fs::read(&path).unwrap(), fs::read(same).unwrap(), "{}", path.display());
    }
    // Pinned: numbers that hang on a library's generator would change with its version.
    let first = fs::read_dir(one.path().join("model")).unwrap().map(|entry| entry.unwrap().path());
    let first = first.into_iter().find(|path| path.to_string_lossy().contains(name)).unwrap();
    let file = fs::read(first).unwrap();
    let embedding = SafeTensors::deserialize(&file).unwrap();
    let embedding = embedding.tensor("model.embed_tokens.weight").unwrap();
    let row: Vec<f32> =
        embedding.data()[..8].chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    assert_eq!(row, PINNED);
}

/// The first numbers of the embedding, as a separate implementation in Python computes them.
const PINNED: [f32; 4] = [-0.013366699, 0.18359375, -1.2578125, 0.96875];

#[test]
fn weights_have_the_spread_they_are_drawn_with() {
    for spec in tensors(&SHAPE) {
        let (dtype, data) = bytes(&spec);
        let numbers: Vec<f64> = match dtype {
            Dtype::F32 => data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
            _ => data.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).into()).collect(),
        };
        let (low, high) = match spec.init {
            Init::Norm => (0.5, 1.5),
            Init::RoutingBias => (-0.1, 0.1),
            _ => (-6.0, 6.0),
        };
        assert!(numbers.iter().all(|x| (low..=high).contains(x)), "{}", spec.name);
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / numbers.len() as f64;
        let expected = match spec.init {
            Init::Projection => 1.0 / spec.shape[1] as f64,
            Init::Embedding => 1.0,
            Init::Norm => 1.0 / 12.0,
            Init::RoutingBias => 0.04 / 12.0,
        };
        // A standard error of the variance is expected * sqrt(2 / n); six of them, for 900 tensors.
        let slack = 6.0 * expected * (2.0 / numbers.len() as f64).sqrt();
        assert!((variance - expected).abs() < slack, "{}: {variance} against {expected}", spec.name);
    }
}

#[test]
fn the_model_has_every_part_of_the_real_one() {
    let config = config(&SHAPE);
    const {
        assert!(SHAPE.num_hidden_layers >= 8 && SHAPE.n_routed_experts >= 16);
        assert!(SHAPE.first_k_dense_replace >= 1 && SHAPE.first_k_dense_replace < SHAPE.num_hidden_layers);
    }
    assert!(SHAPE.n_group > 1 && SHAPE.n_routed_experts.is_multiple_of(SHAPE.n_group));
    let reachable = SHAPE.topk_group * SHAPE.n_routed_experts / SHAPE.n_group;
    assert!(SHAPE.num_experts_per_tok <= reachable && SHAPE.topk_group < SHAPE.n_group);
    assert_eq!(config["topk_method"], "noaux_tc");
    assert_eq!(config["rope_scaling"]["type"], "yarn");
}

#[test]
fn the_tokenizer_fits_the_vocabulary() {
    let tokenizer = read_json(&assets_dir().join("tokenizer.json"));
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap().values();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let ids = vocabulary.chain(added.iter().map(|token| &token["id"]));
    let highest = ids.map(|id| id.as_u64().unwrap()).max().unwrap();
    assert!(highest < SHAPE.vocab_size as u64, "token {highest} has no row in the embedding");
    let config = config(&SHAPE);
    for (key, text) in
        [("bos_token_id", "<｜begin▁of▁sentence｜>"), ("eos_token_id", "<｜end▁of▁sentence｜>")]
    {
        let token = added.iter().find(|token| token["content"] == text).unwrap();
        assert_eq!(token["id"], config[key], "{text}");
    }
}
