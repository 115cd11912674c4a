//! Every plane and the logits, at every position, against transformers and an independent float64 reference, within the
//! bounds of `docs/contract.md`: alone, in a batch of sixteen of other lengths, and split over tiles.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::bounds::{FLOAT32, MARGIN, within_bfloat16, within_float32};
use common::{
    Golden, float32, load, model_dir, relative_error, run, run_alone, run_in_chunks, worst_element,
};
use tch::{Kind, Tensor};
use tether_model::{DtypeChoice, Model, Products, Routes};

/// Tiles that hold everything, that hold some sequences and split others, and that split nearly all or all of them.
const TILES: [usize; 4] = [4096, 64, 7, 1];
/// Tiles of one row are slow and say no more in bfloat16 than in float32.
const COARSE_TILES: [usize; 3] = [4096, 64, 7];

/// float32 in every way of running, against each of `references`.
fn float32_is_exact(name: &str, references: &[&str]) {
    let golden = Golden::read(name);
    let prompts = golden.prompts();
    for tile_tokens in TILES {
        let model = float32(name, tile_tokens);
        let batch = run(&model, &prompts, Routes::Free);
        for reference in references {
            within_float32(&format!("{name} in a batch, tiles of {tile_tokens}"), &batch, &golden, reference);
        }
    }
    for tile_tokens in [4096, 64] {
        let alone = run_alone(&float32(name, tile_tokens), &prompts);
        for reference in references {
            within_float32(&format!("{name} alone, tiles of {tile_tokens}"), &alone, &golden, reference);
        }
    }
}

/// bfloat16 in every way of running and of multiplying, after the margin that makes the comparison meaningful.
fn bfloat16_is_as_exact_as_transformers(name: &str) {
    let golden = Golden::read(name);
    let prompts = golden.prompts();
    println!("{name}: smallest margin between chosen and next expert or group {:.2e}", golden.margin);
    assert!(golden.margin > MARGIN, "{name}: the smallest margin is {:.2e}", golden.margin);
    for products in [Products::Widened, Products::Native] {
        let model = |tile_tokens| load(&model_dir(name), DtypeChoice::BFloat16, tile_tokens, Some(products));
        for tile_tokens in COARSE_TILES {
            let batch = run(&model(tile_tokens), &prompts, Routes::Free);
            within_bfloat16(
                &format!("{name} in a batch, {products:?}, tiles of {tile_tokens}"),
                &batch,
                &golden,
            );
        }
        let alone = run_alone(&model(4096), &prompts);
        within_bfloat16(&format!("{name} alone, {products:?}"), &alone, &golden);
    }
}

#[test]
fn v2_with_direct_queries_and_greedy_routing_is_exact() {
    float32_is_exact("tiny-v2", &["f64", "f32"]);
}

#[test]
fn v2_with_group_limited_routing_and_yarn_is_exact() {
    float32_is_exact("tiny-v2-group", &["f64", "f32"]);
}

#[test]
fn v3_with_biased_routing_in_groups_and_yarn_is_exact() {
    float32_is_exact("tiny-v3", &["f64", "f32"]);
}

/// Where transformers' classes leave something out, the reference is the authors' description.
#[test]
fn what_transformers_leaves_out_follows_the_authors() {
    float32_is_exact("tiny-v2-author", &["f64"]);
}

#[test]
fn v2_in_bfloat16_is_as_exact_as_transformers() {
    bfloat16_is_as_exact_as_transformers("tiny-v2");
}

#[test]
fn v2_with_groups_in_bfloat16_is_as_exact_as_transformers() {
    bfloat16_is_as_exact_as_transformers("tiny-v2-group");
}

#[test]
fn v3_in_bfloat16_is_as_exact_as_transformers() {
    bfloat16_is_as_exact_as_transformers("tiny-v3");
}

/// `[layers, tokens, top_k]`, each token's experts in ascending order.
fn ordered(experts: &[Tensor]) -> Tensor {
    Tensor::stack(experts, 0).sort(-1, false).0
}

/// The experts a model chooses, by layer.
fn chosen(model: &Model, prompts: &[&[i64]]) -> Vec<Tensor> {
    let mut recorded = Vec::new();
    let _ = run(model, prompts, Routes::Recorded(&mut recorded));
    recorded
}

/// Ordinary random gates: thousands of choices, some of them hardly decided.
#[test]
fn near_ties_fall_as_in_the_reference() {
    let golden = Golden::read("tiny-v3-ties");
    println!("tiny-v3-ties: smallest margin {:.2e}", golden.margin);
    assert!(golden.margin < 1e-4, "there is no near-tie in this model");
    let found = chosen(&float32("tiny-v3-ties", 4096), &golden.prompts());
    let same = ordered(&found).eq_tensor(&ordered(&golden.experts())).all_dim(-1, false);
    let (tokens, flipped) = (same.numel(), same.logical_not().sum(Kind::Int64).int64_value(&[]));
    assert_eq!(flipped, 0, "{flipped} of {tokens} choices differ from the float64 reference's");
}

#[test]
fn with_the_references_experts_near_ties_do_not_matter() {
    let name = "tiny-v3-ties";
    let golden = Golden::read(name);
    let (prompts, experts) = (golden.prompts(), golden.experts());
    for tile_tokens in COARSE_TILES {
        let what = format!("{name} with the reference's experts, tiles of {tile_tokens}");
        let exact = run(&float32(name, tile_tokens), &prompts, Routes::forced(&experts));
        within_float32(&what, &exact, &golden, "f64");
        within_float32(&what, &exact, &golden, "f32");
        for products in [Products::Widened, Products::Native] {
            let model = load(&model_dir(name), DtypeChoice::BFloat16, tile_tokens, Some(products));
            let rounded = run(&model, &prompts, Routes::forced(&experts));
            within_bfloat16(&format!("{what}, {products:?}"), &rounded, &golden);
        }
    }
}

/// A token at a time and a few (absorbed, behind the first), many (expanded) and all at once.
const CHUNKS: [usize; 4] = [1, 7, 128, 4096];

#[test]
fn chunks_of_any_size_behind_a_cache_are_exact() {
    for (name, reference) in [("tiny-v2", "f32"), ("tiny-v2-group", "f64"), ("tiny-v3", "f64")] {
        let golden = Golden::read(name);
        let prompts = golden.prompts();
        for (chunk, tile_tokens) in CHUNKS.into_iter().zip([4096, 5, 64, 4096]) {
            let found = run_in_chunks(&float32(name, tile_tokens), &prompts, chunk);
            let what = format!("{name} in chunks of {chunk}, tiles of {tile_tokens}");
            within_float32(&what, &found, &golden, reference);
        }
    }
}

#[test]
fn chunks_behind_a_cache_are_as_exact_as_transformers_in_bfloat16() {
    for name in ["tiny-v2", "tiny-v2-group", "tiny-v3"] {
        let golden = Golden::read(name);
        let prompts = golden.prompts();
        for products in [Products::Widened, Products::Native] {
            let model = load(&model_dir(name), DtypeChoice::BFloat16, 4096, Some(products));
            for chunk in [1, 7, 128] {
                let found = run_in_chunks(&model, &prompts, chunk);
                within_bfloat16(&format!("{name} in chunks of {chunk}, {products:?}"), &found, &golden);
            }
        }
    }
}

/// The comparisons above can fail: a plane against its neighbour does, and so does one with a single element changed.
#[test]
fn a_wrong_plane_and_a_wrong_element_are_noticed() {
    let golden = Golden::read("tiny-v2");
    let planes = golden.get("planes_f32");
    for plane in 0..planes.size()[1] - 1 {
        let (this, next) = (planes.select(1, plane), planes.select(1, plane + 1));
        assert!(
            relative_error(&this, &next) > 100.0 * FLOAT32.0,
            "planes {plane} and {} are alike",
            plane + 1
        );
    }
    let plane = planes.select(1, 3);
    let changed = plane.copy();
    let largest = plane.get(17).abs().max().double_value(&[]);
    let _ = changed.get(17).get(5).g_add_scalar_(2e-3 * largest);
    assert!(worst_element(&changed, &plane) > FLOAT32.1);
}
