//! Work that is done in pieces on real shapes is done in one on tiny ones. Here the pieces are tiny too, so that every loop
//! runs many times, with remainders, over the models that the other tests run in one: the same references, the same bounds.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::bounds::{within_bfloat16, within_float32};
use common::{Golden, float32, load, model_dir, run, run_in_chunks};
use tether_model::{DtypeChoice, Pieces, Products, Routes};

/// A few scores, five keys, three rows, and weights cut into blocks of a few outputs: 128 inputs make six, 160 make five.
fn tiny() {
    Pieces { scores: 40, earlier_keys: 5, mlp_rows: 3, weight_elements: 800 }.use_everywhere();
}

fn float32_is_exact(name: &str, references: &[&str]) {
    tiny();
    let golden = Golden::read(name);
    let prompts = golden.prompts();
    let model = float32(name, 64);
    let batch = run(&model, &prompts, Routes::Free);
    // Few rows behind many others are attended to in the compressed form, more of them expanded.
    let chunks = [7, 100].map(|chunk| (chunk, run_in_chunks(&model, &prompts, chunk)));
    for reference in references {
        within_float32(&format!("{name} in a batch"), &batch, &golden, reference);
        for (chunk, found) in &chunks {
            within_float32(&format!("{name} in chunks of {chunk}"), found, &golden, reference);
        }
    }
}

#[test]
fn plain_weights_are_exact() {
    for name in ["tiny-v2", "tiny-v2-group", "tiny-v3"] {
        float32_is_exact(name, &["f64", "f32"]);
    }
}

/// Blocks of packed rows begin in the middle of a matrix, fp8's where one of its own blocks of factors does.
#[test]
fn packed_weights_are_exact() {
    for name in ["fp8-v3", "int4-kimi-k2.5", "nvfp4-modelopt", "nvfp4-kimi-k2.5"] {
        float32_is_exact(&format!("quantised/{name}"), &["f64", "f32"]);
    }
}

#[test]
fn bfloat16_is_as_exact_as_transformers() {
    tiny();
    for name in ["tiny-v3", "quantised/fp8-v3"] {
        let golden = Golden::read(name);
        let prompts = golden.prompts();
        for products in [Products::Widened, Products::Native] {
            let model = load(&model_dir(name), DtypeChoice::BFloat16, 64, Some(products));
            within_bfloat16(&format!("{name}, {products:?}"), &run(&model, &prompts, Routes::Free), &golden);
        }
        let model = load(&model_dir(name), DtypeChoice::BFloat16, 64, None);
        within_bfloat16(&format!("{name} in chunks of 7"), &run_in_chunks(&model, &prompts, 7), &golden);
    }
}
