//! Packed checkpoints through the real server: what a dump holds is what the reference makes of the unpacked model.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::json;
use tether_dump::{CapturePoint, RequestId};
use tether_tests::{Server, deviation};

/// A checkpoint that `tests/python/make_quantised.py` made.
fn golden(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tether/golden/quantised").join(name);
    assert!(dir.is_dir(), "{} is not there; cargo xtask test makes it", dir.display());
    dir
}

/// The numbers of a tensor, 4 or 8 bytes each.
fn numbers<const SIZE: usize, T>(file: &SafeTensors<'_>, name: &str, from: fn([u8; SIZE]) -> T) -> Vec<T> {
    let view = file.tensor(name).expect("the references have it");
    view.data().as_chunks().0.iter().map(|&bytes| from(bytes)).collect()
}

/// LD-08: a wrapper's config, its prefixes, its vision tensors, and int4; and a V3 in fp8 with a layer for multi-token
/// prediction.
#[tokio::test]
async fn dumps_of_packed_checkpoints_are_the_references_states() {
    for name in ["int4-kimi-k2.5", "fp8-v3"] {
        let dir = golden(name);
        let file = fs::read(dir.join("golden.safetensors")).expect("the references were made");
        let file = SafeTensors::deserialize(&file).expect("the references are whole");
        let shape = file.tensor("planes_f32").expect("transformers was run").shape().to_vec();
        let (planes, hidden) = (shape[1], shape[2]);
        let reference = numbers(&file, "planes_f32", f32::from_le_bytes);
        let (ids, lengths) =
            (numbers(&file, "token_ids", i64::from_le_bytes), numbers(&file, "lengths", i64::from_le_bytes));
        let points = (0..planes - 1).map(|point| point.to_string()).collect::<Vec<_>>().join(",");
        let server = Server::of_model(&dir)
            .flag("--dtype", "float32")
            .flag("--capture-layers", &points)
            .flag("--final", "both")
            .start()
            .await;
        let mut first = 0;
        for length in lengths.into_iter().map(|length| length as usize) {
            let rid = RequestId::new();
            let prompt = &ids[first..first + length];
            let body = json!({"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 0}});
            server.client().generate(&body).await.expect(200);
            let dump = server.dumps().read(rid);
            assert_eq!((dump.token_ids.as_slice(), dump.metadata.points.len()), (prompt, planes));
            for (plane, &point) in dump.metadata.points.iter().enumerate() {
                let rows = (first..first + length).map(|row| (row * planes + plane) * hidden);
                let expected: Vec<f32> = rows.flat_map(|at| reference[at..at + hidden].to_vec()).collect();
                let apart = deviation(dump.plane(point), &expected, hidden);
                assert!(apart.relative <= 1e-4 && apart.element <= 1e-3, "{name}, {point}: {apart:?}");
            }
            assert_eq!(dump.metadata.points.last(), Some(&CapturePoint::FinalNorm));
            first += length;
        }
    }
}

/// Kimi's directory as it is published: tiktoken's vocabulary beside the wrapped, packed model. Texts become the IDs that
/// OpenAI's tiktoken gives, and these are the ones that are run and dumped.
#[tokio::test]
async fn texts_to_a_kimi_checkpoint_are_tokenised_by_its_tiktoken_files() {
    let dir = golden("int4-kimi-k2.5");
    let texts: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("texts.json")).expect("it was made")).expect("JSON");
    let server = Server::of_model(&dir).flag("--capture-layers", "1,2,3").start().await;
    let mut compared = 0;
    for text in texts.as_array().expect("a list") {
        let ids: Vec<i64> = serde_json::from_value(text["ids"].clone()).expect("IDs");
        if ids.is_empty() || ids.len() > 100 {
            continue;
        }
        let rid = RequestId::new();
        let body = json!({"rid": rid, "text": text["text"], "sampling_params": {"max_new_tokens": 2, "temperature": 0},
                          "return_prompt_token_ids": true});
        let reply = server.client().generate(&body).await.expect(200).json();
        assert_eq!(reply["prompt_token_ids"], text["ids"], "{}", text["text"]);
        assert!(reply["text"].is_string());
        assert_eq!(server.dumps().read(rid).token_ids, ids);
        compared += 1;
    }
    assert!(compared > 20, "{compared} texts");
}
