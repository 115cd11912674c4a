use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use tch::{Device, Kind};

use super::*;
use crate::config::Config;
use crate::linear::Linear;
use crate::weights::{Checkpoint, Source};

/// A checkpoint that `tests/python/make_quantised.py` packed, and unpacked again by itself.
fn golden(name: &str) -> PathBuf {
    tch::set_num_threads(1);
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tether/golden/quantised");
    assert!(
        dir.join("complete").is_file(),
        "{} is not whole; make it with: .tether/venv/bin/python tests/python/make_models.py",
        dir.display()
    );
    dir.join(name)
}

/// Every packed matrix of the checkpoint, expanded, has the very bits that the script's own unpacking has.
fn unpacks_to_the_scripts_bits(name: &str, matrices: usize) {
    let dir = golden(name);
    let (config, checkpoint) = (Config::read(&dir).unwrap(), Checkpoint::open(&dir).unwrap());
    let file = std::fs::read(dir.join("unpacked.safetensors")).unwrap();
    let unpacked = SafeTensors::deserialize(&file).unwrap();
    assert!(unpacked.len() >= matrices, "{name}: only {} matrices are packed", unpacked.len());
    let source = Source::new(&checkpoint, &config, Kind::BFloat16, true);
    for (module, expected) in unpacked.tensors() {
        let [outputs, inputs] = expected.shape() else { panic!("{module}") };
        let weights = source.under("").sub(&module);
        let linear = Linear::load(&weights, *inputs as i64, *outputs as i64, false).unwrap();
        let found = Vec::<f32>::try_from(linear.expanded(Kind::Float).view(-1)).unwrap();
        let expected: Vec<u32> =
            expected.data().as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        // A zero's sign is the codes' too.
        let found: Vec<u32> = found.into_iter().map(f32::to_bits).collect();
        assert!(found == expected, "{name}: {module} differs");
    }
    // Nothing was noted against any of them.
    let problems = source.finish().err().map(|error| error.to_string()).unwrap_or_default();
    assert!(!problems.contains("quantization_config"), "{problems}");
}

#[test]
fn fp8_blocks_unpack_to_the_scripts_bits_partial_ones_included() {
    unpacks_to_the_scripts_bits("fp8-v3", 40);
}

#[test]
fn int4_groups_unpack_to_the_scripts_bits() {
    unpacks_to_the_scripts_bits("int4-kimi-k2.5", 24);
}

#[test]
fn nvfp4_unpacks_to_the_scripts_bits_under_both_tools_names() {
    unpacks_to_the_scripts_bits("nvfp4-modelopt", 24);
    unpacks_to_the_scripts_bits("nvfp4-kimi-k2.5", 24);
}

/// Products go block by block, also where a block of rows is cut at an fp8 block's end.
#[test]
fn a_product_with_a_packed_matrix_is_that_with_the_whole_of_it() {
    tch::manual_seed(3);
    for (name, module) in
        [("fp8-v3", "model.layers.0.mlp.gate_proj"), ("nvfp4-modelopt", "model.layers.0.mlp.gate_proj")]
    {
        let dir = golden(name);
        let (config, checkpoint) = (Config::read(&dir).unwrap(), Checkpoint::open(&dir).unwrap());
        let source = Source::new(&checkpoint, &config, Kind::BFloat16, true);
        let linear = Linear::load(&source.under("").sub(module), 160, 288, false).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            let x = Tensor::randn([5, 160], (kind, Device::Cpu));
            let expected = x.mm(&linear.expanded(kind).tr());
            assert_eq!(linear.forward(&x).kind(), kind);
            assert!(linear.forward(&x).allclose(&expected, 1e-5, 1e-5, false), "{name} in {kind:?}");
        }
    }
}

/// NM-19: 192 x 130 in blocks of 128 has 2 x 2 factors, three of the blocks partial.
#[test]
fn partial_blocks_have_factors_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let (ones, factors) = (vec![0x38u8; 192 * 130], [1f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat());
    let view = |dtype, shape: &[usize], data| {
        safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap()
    };
    let tensors = [
        ("x.weight", view(Dtype::F8_E4M3, &[192, 130], &ones)),
        ("x.weight_scale_inv", view(Dtype::F32, &[2, 2], &factors)),
    ];
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    let config = Config::read(&golden("fp8-v3")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let source = Source::new(&checkpoint, &config, Kind::Float, true);
    let whole = Linear::load(&source.under("").sub("x"), 130, 192, false).unwrap().expanded(Kind::Float);
    for (row, column, expected) in [
        (0, 0, 1.0),
        (127, 127, 1.0),
        (0, 128, 2.0),
        (127, 129, 2.0),
        (128, 0, 3.0),
        (191, 127, 3.0),
        (191, 129, 4.0),
    ] {
        assert_eq!(whole.double_value(&[row, column]), expected, "row {row}, column {column}");
    }
}
