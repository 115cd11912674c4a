//! One tiny checkpoint for each way in which configs of the family differ (`tests/python/make_grid.py`), against
//! transformers where it implements them and the float64 reference everywhere: every plane, at every position.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;

use common::bounds::{MARGIN, within_bfloat16, within_float32};
use common::{Golden, load, model_dir, run, run_alone};
use serde_json::Value;
use tether_model::{DtypeChoice, Products, Routes};

/// Names, and whether transformers is a reference.
fn grid() -> BTreeMap<String, bool> {
    let listed = std::fs::read(model_dir("grid").join("grid.json")).unwrap();
    let listed: BTreeMap<String, Value> = serde_json::from_slice(&listed).unwrap();
    listed.into_iter().map(|(name, about)| (name, about["transformers"].as_bool().unwrap())).collect()
}

/// All models whose name begins with `part`.
fn is_exact(part: &str, at_least: usize) {
    let models: Vec<_> = grid().into_iter().filter(|(name, _)| name.starts_with(part)).collect();
    assert!(models.len() >= at_least, "only {} models of {part}", models.len());
    for (name, by_transformers) in models {
        let (path, golden) = (format!("grid/{name}"), Golden::read(&format!("grid/{name}")));
        println!("{name}: smallest margin between chosen and next expert or group {:.2e}", golden.margin);
        assert!(golden.margin > MARGIN, "{name}: the smallest margin is {:.2e}", golden.margin);
        let prompts = golden.prompts();
        let references: &[&str] = if by_transformers { &["f64", "f32"] } else { &["f64"] };
        let whole = load(&model_dir(&path), DtypeChoice::Float32, 4096, None);
        let tiled = load(&model_dir(&path), DtypeChoice::Float32, 7, None);
        let runs = [
            ("in a batch", run(&whole, &prompts, Routes::Free)),
            ("in tiles of 7", run(&tiled, &prompts, Routes::Free)),
            ("alone", run_alone(&whole, &prompts)),
        ];
        for (how, found) in &runs {
            for reference in references {
                within_float32(&format!("{name} {how}"), found, &golden, reference);
            }
        }
        if !by_transformers {
            continue;
        }
        for products in [Products::Widened, Products::Native] {
            let model = load(&model_dir(&path), DtypeChoice::BFloat16, 4096, Some(products));
            within_bfloat16(&format!("{name} {products:?}"), &run(&model, &prompts, Routes::Free), &golden);
        }
    }
}

#[test]
fn softmax_routing_is_exact_with_and_without_groups_norm_and_scale() {
    is_exact("softmax-", 8);
}

#[test]
fn sigmoid_routing_is_exact_with_and_without_groups_norm_scale_and_large_biases() {
    is_exact("sigmoid-", 8);
}

#[test]
fn every_variant_of_yarn_is_exact() {
    is_exact("yarn-", 10);
}

#[test]
fn every_shape_of_queries_experts_dense_layers_and_heads_is_exact() {
    is_exact("shape-", 10);
}

#[test]
fn the_grid_has_two_dozen_configurations_and_more_and_transformers_knows_most() {
    let grid = grid();
    let by_transformers = grid.values().filter(|by_transformers| **by_transformers).count();
    assert!(
        grid.len() >= 36 && by_transformers >= 24,
        "{} models, {by_transformers} by transformers",
        grid.len()
    );
}
