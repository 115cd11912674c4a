//! Tokens per second of the forward pass alone: no HTTP, no files.
//!
//! `cargo run --release -p tether-model --example throughput -- CHECKPOINT float32|bfloat16 TILE_TOKENS LENGTH…`

use std::path::Path;
use std::time::Instant;

use tch::{Device, Kind};
use tether_model::{Capture, CaptureSpec, DtypeChoice, FinalState, LoadOptions, Model, Sequence};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, dtype, tile_tokens, lengths @ ..] = arguments.as_slice() else {
        return Err(
            "needs a checkpoint, float32 or bfloat16, the tile's tokens and at least one length".into()
        );
    };
    let dtype = match dtype.as_str() {
        "float32" => DtypeChoice::Float32,
        "bfloat16" => DtypeChoice::BFloat16,
        other => return Err(format!("`{other}` is neither float32 nor bfloat16").into()),
    };
    let options = LoadOptions { devices: vec![Device::Cpu], dtype, tile_tokens: tile_tokens.parse()? };
    let started = Instant::now();
    let model = Model::load(Path::new(dir), &options)?;
    println!("loaded in {:.1} s: {}", started.elapsed().as_secs_f64(), model.compute_note());
    let vocab = model.config().vocab_size;
    let lengths = lengths.iter().map(|length| length.parse()).collect::<Result<Vec<i64>, _>>()?;
    let prompts: Vec<Vec<i64>> = lengths
        .iter()
        .map(|length| (0..*length).map(|token| (token * 7919 + length) % vocab).collect())
        .collect();
    let layers = model.config().num_hidden_layers;
    let spec = CaptureSpec::new(&[1, 2, 3], FinalState::PreNorm, layers)?;
    let capture = Some(Capture { spec: &spec, kind: Kind::BFloat16, first_row: 0 });
    let mut sequences: Vec<Sequence<'_>> =
        prompts.iter().map(|ids| Sequence { capture, ..Sequence::new(ids) }).collect();
    let tokens: i64 = lengths.iter().sum();
    for pass in 1..=3 {
        let started = Instant::now();
        drop(model.forward(&mut sequences)?);
        let seconds = started.elapsed().as_secs_f64();
        println!("pass {pass}: {tokens} tokens in {seconds:.2} s, {:.1} tokens/s", tokens as f64 / seconds);
    }
    Ok(())
}
