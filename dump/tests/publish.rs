//! What a reader of the dump directory sees.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use std::fs;
use std::path::Path;

use common::{any_parts, parts};
use proptest::prelude::*;
use tether_dump::{
    CapturePoint, Dtype, DumpFile, Head, PublishError, RequestId, VerifyError, dump_path, encoded_len,
    publish, remove_stale_temporaries,
};

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

const NEVER: &dyn Fn() -> bool = &|| false;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_published_dump_reads_back_whole_and_verifies(parts in any_parts(), sync in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let published = publish(dir.path(), &parts.dump(), sync, NEVER).unwrap();
        prop_assert_eq!(&published.path, &dump_path(dir.path(), parts.metadata.request_id));
        prop_assert_eq!(published.bytes, fs::metadata(&published.path).unwrap().len());
        prop_assert_eq!(published.bytes, encoded_len(&parts.metadata, parts.token_ids.len(), parts.hidden_size));
        let file = DumpFile::open(&published.path).unwrap();
        prop_assert_eq!(&file.head().metadata, &parts.metadata);
        prop_assert_eq!(&file.head().token_ids, &parts.token_ids);
        prop_assert_eq!(file.hidden_states(), &parts.hidden_states[..]);
        file.verify().unwrap();
        let head = Head::read(&published.path).unwrap();
        prop_assert_eq!(&head.metadata, &parts.metadata);
        prop_assert_eq!(&head.token_ids, &parts.token_ids);
    }

    #[test]
    fn a_dump_cut_short_or_too_long_is_refused(parts in any_parts(), cut in any::<prop::sample::Index>()) {
        let dir = tempfile::tempdir().unwrap();
        let path = publish(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..cut.index(whole.len())]).unwrap();
        prop_assert!(Head::read(&path).is_err());
        prop_assert!(DumpFile::open(&path).is_err());
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        prop_assert!(Head::read(&path).is_err());
        prop_assert!(DumpFile::open(&path).is_err());
    }

    #[test]
    fn one_flipped_bit_in_the_data_is_found(parts in any_parts(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let dir = tempfile::tempdir().unwrap();
        let path = publish(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
        let mut bytes = fs::read(&path).unwrap();
        let data = bytes.len() - parts.hidden_states.len() - parts.token_ids.len() * 8;
        let at = data + at.index(bytes.len() - data);
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        let error = DumpFile::open(&path).unwrap().verify().unwrap_err();
        prop_assert!(matches!(error, VerifyError::DataHash { .. }), "{error}");
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), len in 0u64..400) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, &bytes).unwrap();
        prop_assert!(Head::read(&path).is_err());
        prop_assert!(DumpFile::open(&path).is_err());
        fs::write(&path, [&len.to_le_bytes(), &bytes[..]].concat()).unwrap();
        prop_assert!(Head::read(&path).is_err());
        prop_assert!(DumpFile::open(&path).is_err());
    }
}

#[test]
fn planes_are_cut_out_by_name() {
    let parts = parts(3, 3, 5, Dtype::BFloat16);
    let dir = tempfile::tempdir().unwrap();
    let path = publish(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    let file = DumpFile::open(&path).unwrap();
    assert_eq!(file.find(CapturePoint::Residual(7)), None);
    let plane = file.find(CapturePoint::FinalNorm).unwrap();
    assert_eq!(plane, 2);
    for (token, row) in file.plane(plane).enumerate() {
        let start = (token * 3 + plane) * 5 * 2;
        assert_eq!(row, &parts.hidden_states[start..start + 10]);
    }
}

#[test]
fn a_second_dump_of_a_request_is_refused_and_the_first_stands() {
    let dir = tempfile::tempdir().unwrap();
    let first = parts(2, 2, 4, Dtype::Float32);
    let path = publish(dir.path(), &first.dump(), false, NEVER).unwrap().path;
    let before = fs::read(&path).unwrap();
    let mut second = parts(3, 2, 4, Dtype::Float32);
    second.metadata.request_id = first.metadata.request_id;
    let error = publish(dir.path(), &second.dump(), false, NEVER).unwrap_err();
    assert!(matches!(error, PublishError::AlreadyPublished { id } if id == first.metadata.request_id));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn a_request_cancelled_before_its_dump_is_named_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(2, 2, 4, Dtype::Float32);
    let error = publish(dir.path(), &parts.dump(), false, &|| true).unwrap_err();
    assert!(matches!(error, PublishError::Cancelled));
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_value_that_is_not_finite_is_named_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in [Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
        // Large enough that the value stands beyond the first chunk.
        let mut parts = parts(90, 4, 1024, dtype);
        let (token, plane, channel) = (77, 2, 1001);
        let at = ((token * 4 + plane) * 1024 + channel) * dtype.size();
        parts.hidden_states[at..at + dtype.size()].fill(0xff);
        let error = publish(dir.path(), &parts.dump(), false, NEVER).unwrap_err();
        assert_eq!(error.to_string(), "hidden state is not finite at token 77, R2, channel 1001");
        assert!(names(dir.path()).is_empty());
    }
}

#[test]
fn states_that_do_not_fit_the_tokens_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut parts = parts(2, 2, 4, Dtype::Float32);
    parts.hidden_states.pop();
    let error = publish(dir.path(), &parts.dump(), false, NEVER).unwrap_err();
    assert_eq!(error.to_string(), "hidden states are 63 bytes, 2 tokens x 2 planes x 4 float32 are 64");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_directory_that_is_not_there_is_named() {
    let parts = parts(1, 1, 1, Dtype::Float32);
    let error = publish(Path::new("/no/such/directory"), &parts.dump(), false, NEVER).unwrap_err();
    assert_eq!(error.to_string(), "cannot write a dump in /no/such/directory");
}

#[test]
fn stale_temporaries_go_and_nothing_else_does() {
    let dir = tempfile::tempdir().unwrap();
    let stale = format!(".{}.abc.tmp", RequestId::new());
    let live = format!(".{}.def.tmp", RequestId::new());
    for name in [&stale, &live, "notes.tmp", ".hidden"] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    let writer = fs::File::open(dir.path().join(&live)).unwrap();
    rustix::fs::flock(&writer, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_eq!(remove_stale_temporaries(dir.path()).unwrap(), 1);
    let mut left = names(dir.path());
    left.sort();
    let mut expected = vec![live.clone(), "notes.tmp".into(), ".hidden".into()];
    expected.sort();
    assert_eq!(left, expected);
}

/// A file of format version 1, kept from the day the format was fixed: later readers must read it too.
#[test]
fn the_first_version_of_the_format_is_still_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1.safetensors");
    let file = DumpFile::open(&path).unwrap();
    file.verify().unwrap();
    let head = file.head();
    assert_eq!(head.metadata.request_id.to_string(), "019adb10-0000-7000-8000-000000000001");
    assert_eq!(head.metadata.client_rid.as_deref(), Some("sample-1"));
    assert_eq!(head.metadata.points, [CapturePoint::Residual(2), CapturePoint::FinalNorm]);
    assert_eq!(head.token_ids, [3, 10, 17]);
    assert_eq!((head.planes(), head.hidden_size), (2, 4));
    let values: Vec<f32> = file
        .hidden_states()
        .chunks_exact(2)
        .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
        .collect();
    let expected: Vec<f32> = (0..24).map(|i| i as f32 - 8.0).collect();
    assert_eq!(values, expected);
}
