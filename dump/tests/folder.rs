//! The legacy layout as a client that scans the directory sees it.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod common;

use std::fs;
use std::path::Path;

use common::{any_parts, parts};
use proptest::prelude::*;
use tether_dump::{
    Dtype, DumpFile, DumpLayout, FinalState, Head, PublishError, VerifyError, folder_path, publish,
    publish_folder, remove_stale_temporaries,
};

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const NEVER: &dyn Fn() -> bool = &|| false;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_folder_reads_back_as_the_file_of_the_same_dump_does(parts in any_parts(), sync in any::<bool>()) {
        let (of_files, of_folders) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = publish(of_files.path(), &parts.dump(), false, NEVER).unwrap();
        let folder = publish_folder(of_folders.path(), &parts.dump(), sync, NEVER).unwrap();
        prop_assert_eq!(&folder.path, &folder_path(of_folders.path(), parts.metadata.request_id));
        let on_disk: u64 =
            fs::read_dir(&folder.path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        prop_assert_eq!(folder.bytes, on_disk);
        let most =
            DumpLayout::Directory.most_bytes(&parts.metadata, parts.token_ids.len(), parts.hidden_size);
        prop_assert!(on_disk <= most, "{on_disk} bytes, {most} were foreseen");
        let (file, read) = (DumpFile::open(&file.path).unwrap(), DumpFile::open(&folder.path).unwrap());
        prop_assert_eq!(&file.head().metadata, &read.head().metadata);
        prop_assert_eq!(&file.head().token_ids, &read.head().token_ids);
        prop_assert_eq!(file.hidden_states(), read.hidden_states());
        for plane in 0..file.head().planes() {
            prop_assert!(file.plane(plane).eq(read.plane(plane)));
        }
        read.verify().unwrap();
        prop_assert_eq!(&Head::read(&folder.path).unwrap().metadata, &parts.metadata);
    }

    #[test]
    fn a_changed_or_shortened_plane_is_found(parts in any_parts(), at in any::<prop::sample::Index>()) {
        prop_assume!(!parts.hidden_states.is_empty());
        let dir = tempfile::tempdir().unwrap();
        let folder = publish_folder(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
        let plane = folder.join("final.pt");
        let whole = fs::read(&plane).unwrap();
        // The data begins at the first multiple of 64 behind the entry's own header.
        let row = parts.hidden_size * parts.metadata.dtype.size();
        let states = 64..64 + parts.token_ids.len() * row;
        prop_assume!(!states.is_empty());
        let mut changed = whole.clone();
        changed[states.start + at.index(states.len())] ^= 1;
        fs::write(&plane, &changed).unwrap();
        let found = DumpFile::open(&folder).unwrap().verify();
        prop_assert!(matches!(found, Err(VerifyError::DataHash { .. })), "{:?}", found);
        fs::write(&plane, &whole[..at.index(whole.len())]).unwrap();
        prop_assert!(DumpFile::open(&folder).is_err());
    }
}

#[test]
fn each_plane_is_a_file_and_done_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut parts = parts(3, 4, 8, Dtype::BFloat16);
    let folder = publish_folder(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    assert_eq!(names(&folder), ["aux_0.pt", "aux_1.pt", "aux_2.pt", "done", "final.pt", "meta.json"]);
    assert_eq!(fs::metadata(folder.join("done")).unwrap().len(), 0);
    let meta: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("meta.json")).unwrap()).unwrap();
    assert_eq!(meta["request_id"], parts.metadata.request_id.to_string());
    assert_eq!(meta["num_tokens"], 3);
    assert_eq!(meta["token_ids"], serde_json::json!(parts.token_ids));
    assert_eq!(meta["points"], serde_json::json!(["R0", "R1", "R2", "N"]));
    assert_eq!(meta["final"], "post_norm");
    assert_eq!(meta["token_hash"], parts.metadata.token_hash.to_string());

    parts.metadata.request_id = tether_dump::RequestId::new();
    parts.metadata.final_state = FinalState::None;
    let folder = publish_folder(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    assert_eq!(names(&folder), ["aux_0.pt", "aux_1.pt", "aux_2.pt", "aux_3.pt", "done", "meta.json"]);
}

#[test]
fn a_folder_is_never_replaced_and_a_withdrawn_or_bad_one_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut parts = parts(2, 2, 4, Dtype::Float32);
    let withdrawn = publish_folder(dir.path(), &parts.dump(), false, &|| true);
    assert!(matches!(withdrawn, Err(PublishError::Cancelled)), "{withdrawn:?}");
    assert_eq!(names(dir.path()), [""; 0]);
    let folder = publish_folder(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    let again = publish_folder(dir.path(), &parts.dump(), false, NEVER);
    assert!(matches!(again, Err(PublishError::AlreadyPublished { id }) if id == parts.metadata.request_id));
    assert_eq!(names(dir.path()).len(), 1);
    DumpFile::open(&folder).unwrap().verify().unwrap();

    parts.metadata.request_id = tether_dump::RequestId::new();
    let at = (2 * 4 + 4 + 1) * 4;
    parts.hidden_states[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let error = publish_folder(dir.path(), &parts.dump(), false, NEVER).unwrap_err();
    assert_eq!(error.to_string(), "hidden state is not finite at token 1, N, channel 1");
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn a_folder_without_done_is_no_dump_and_deleting_takes_done_first() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(2, 2, 4, Dtype::Float16);
    let id = parts.metadata.request_id;
    assert_eq!(DumpLayout::find(dir.path(), id), None);
    let folder = DumpLayout::Directory.publish(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    assert_eq!(DumpLayout::find(dir.path(), id), Some(folder.clone()));
    fs::remove_file(folder.join("done")).unwrap();
    let error = DumpFile::open(&folder).unwrap_err().to_string();
    assert!(error.contains("has no `done`"), "{error}");
    DumpLayout::remove(&folder).unwrap();
    assert_eq!(names(dir.path()), [""; 0]);
    assert_eq!(DumpLayout::remove(&folder).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let file = DumpLayout::File.publish(dir.path(), &parts.dump(), false, NEVER).unwrap().path;
    DumpLayout::remove(&file).unwrap();
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn what_a_killed_writer_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let id = tether_dump::RequestId::new();
    let stale = dir.path().join(format!(".req_{id}.abc123.tmp"));
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("aux_0.pt"), b"x").unwrap();
    fs::create_dir(dir.path().join("kept")).unwrap();
    assert_eq!(remove_stale_temporaries(dir.path()).unwrap(), 1);
    assert_eq!(names(dir.path()), ["kept"]);
}
