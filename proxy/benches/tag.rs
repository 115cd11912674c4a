//! How fast a body of 1 MB is tagged: 200,000 token IDs of one prompt.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tether_dump::RequestId;
use tether_proxy::body::{Edit, Spliced};
use tether_proxy::tag::{self, Endpoint};

/// IDs as a real prompt has them, of one to six digits and in no order that a branch predictor could learn.
fn body() -> Bytes {
    let mut state = 1u64;
    let ids = (0..200_000).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 129_280).to_string()
    });
    let ids: Vec<_> = ids.collect();
    format!(r#"{{"input_ids":[{}],"sampling_params":{{"max_new_tokens":1}}}}"#, ids.join(",")).into()
}

fn tag_one(body: &Bytes, read_tokens: bool) -> Spliced {
    let found = tag::find(Endpoint::Generate, body, read_tokens).expect("the body is an object");
    let value = tag::rid_value(found.batch, std::iter::once(RequestId::new()));
    Spliced::new(body, [Edit { slot: &found.slot, key: "rid", value: &value }])
}

fn tagging(criterion: &mut Criterion) {
    let body = body();
    let mut group = criterion.benchmark_group("tag");
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function("find and splice rid", |bench| bench.iter(|| tag_one(black_box(&body), false)));
    group.bench_function("and read and hash token IDs", |bench| {
        bench.iter(|| tag_one(black_box(&body), true));
    });
    group.finish();
}

criterion_group!(benches, tagging);
criterion_main!(benches);
