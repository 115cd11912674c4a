//! The archive as ZIP readers see it. What `torch.load` and the trainers' loaders make of it is tested in Python.
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::io::{Cursor, ErrorKind, Read};

use tether_dump::torch_file::{Storage, TorchFile};

fn write(tensors: &[(&str, Storage, &[usize], &[u8])]) -> Vec<u8> {
    let mut file = TorchFile::new(Cursor::new(Vec::new()));
    for &(key, storage, shape, bytes) in tensors {
        file.tensor(key, storage, shape, bytes.chunks(3)).unwrap();
    }
    file.string("tether_request_id", "019adb10-0000-7000-8000-000000000001");
    file.finish().unwrap().into_inner()
}

#[test]
fn every_entry_is_stored_and_every_tensor_is_aligned_for_mapping() {
    let bytes =
        write(&[("a", Storage::Long, &[2], &[1; 16]), ("b", Storage::BFloat16, &[1, 2, 3], &[2; 12])]);
    let mut zip = zip::ZipArchive::new(Cursor::new(&bytes)).unwrap();
    let mut names = vec![];
    for index in 0..zip.len() {
        let entry = zip.by_index(index).unwrap();
        assert_eq!(entry.compression(), zip::CompressionMethod::Stored);
        assert_eq!(entry.data_start().unwrap() % 64, 0, "{index}");
        names.push(entry.name().unwrap().into_owned());
    }
    assert_eq!(
        names,
        ["archive/data/0", "archive/data/1", "archive/data.pkl", "archive/byteorder", "archive/version"]
    );
    let mut contents = vec![];
    zip.by_name("archive/data/1").unwrap().read_to_end(&mut contents).unwrap();
    assert_eq!(contents, [2; 12]);
}

#[test]
fn the_same_contents_give_the_same_bytes() {
    let tensors: &[(&str, Storage, &[usize], &[u8])] = &[("a", Storage::Float, &[1], &[0, 0, 128, 63])];
    assert_eq!(write(tensors), write(tensors));
}

#[test]
fn bytes_that_do_not_fit_the_shape_are_refused() {
    let mut file = TorchFile::new(Cursor::new(Vec::new()));
    let error = file.tensor("ids", Storage::Long, &[3], [&[0; 16][..]]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(error.to_string(), "tensor `ids` of shape [3] is 24 bytes, 16 were given");
}
