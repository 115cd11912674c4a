use super::*;

#[test]
fn files_lie_as_specforge_lays_them() {
    for (row, path) in [
        (0, "rows_0-2000/data_0.ckpt"),
        (1999, "rows_0-2000/data_1999.ckpt"),
        (2000, "rows_2000-4000/data_2000.ckpt"),
        (37311, "rows_36000-38000/data_37311.ckpt"),
    ] {
        assert_eq!(Eagle3.path(row), Path::new(path));
    }
}

#[test]
fn exactly_three_ascending_residual_points_are_taken() {
    let points = |text: &str| -> Vec<CapturePoint> {
        text.split_whitespace().map(|name| name.parse().unwrap()).collect()
    };
    Eagle3.check_residuals(&points("R2 R30 R58")).unwrap();
    for bad in ["", "R2 R30", "R2 R30 R58 R60", "R30 R2 R58", "R2 R2 R58", "R2 R30 N"] {
        assert!(Eagle3.check_residuals(&points(bad)).is_err(), "{bad}");
    }
    assert_eq!(
        Eagle3.check_residuals(&points("R2 R30")).unwrap_err().to_string(),
        "specforge/eagle3 needs exactly three residual points beside the final state (`--points A,B,C`); the points are \
         R2, R30"
    );
}

#[test]
fn float32_is_rounded_to_the_nearest_and_ties_to_even() {
    let bits = |value: u32| -> u16 {
        let bytes = to_bf16(&value.to_le_bytes(), Dtype::Float32);
        u16::from_le_bytes([bytes[0], bytes[1]])
    };
    assert_eq!(bits(0x3f80_8000), 0x3f80, "a tie goes down to even");
    assert_eq!(bits(0x3f81_8000), 0x3f82, "a tie goes up to even");
    assert_eq!(bits(0x3f80_8001), 0x3f81);
    assert_eq!(bits(0x3f80_7fff), 0x3f80);
    assert_eq!(bits(0x8000_0000), 0x8000, "the sign of zero stays");
}

#[test]
fn a_file_that_is_no_archive_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.ckpt");
    for bytes in [&b""[..], b"zeros", &[0; 5000]] {
        std::fs::write(&path, bytes).unwrap();
        assert!(Eagle3.inspect(&path).is_err());
    }
}

fn archive(change: impl Fn(&mut TorchFile<&mut BufWriter<File>>)) -> Result<Contents, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.ckpt");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    let mut out = TorchFile::new(&mut file);
    change(&mut out);
    out.finish().unwrap();
    std::io::Write::flush(&mut file).unwrap();
    Eagle3.inspect(&path).map_err(|error| error.to_string())
}

#[test]
fn a_file_is_inspected_in_its_own_terms() {
    let id = tether_dump::RequestId::new();
    let write = |mask: &'static [i64], hidden: usize, value: u16, id: String| {
        archive(move |out| {
            let states = |count: usize| value.to_le_bytes().repeat(count);
            out.tensor("input_ids", Storage::Long, &[2], [&long_chunks(&[5, 6])[0][..]]).unwrap();
            out.tensor("loss_mask", Storage::Long, &[mask.len()], [&long_chunks(mask)[0][..]]).unwrap();
            out.tensor("hidden_state", Storage::BFloat16, &[1, 2, 4], [&states(8)[..]]).unwrap();
            let aux = states(2 * 3 * hidden);
            out.tensor("aux_hidden_state", Storage::BFloat16, &[1, 2, 3 * hidden], [&aux[..]]).unwrap();
            out.string(REQUEST_ID, &id);
        })
    };
    let good = write(&[0, 1], 4, 0x3f80, id.to_string()).unwrap();
    assert_eq!(good, Contents { request_id: id, tokens: 2, token_hash: TokenHash::of(&[5, 6]) });
    assert_eq!(write(&[0], 4, 0, id.to_string()).unwrap_err(), "`loss_mask` is [1], `input_ids` is [2]");
    assert_eq!(write(&[0, 2], 4, 0, id.to_string()).unwrap_err(), "`loss_mask` holds 2, expected 0 and 1");
    assert!(
        write(&[0, 1], 5, 0, id.to_string())
            .unwrap_err()
            .contains("`aux_hidden_state` [1, 2, 15] for 2 tokens")
    );
    assert_eq!(
        write(&[0, 1], 4, 0x7f80, id.to_string()).unwrap_err(),
        "element 0 of `hidden_state` is not finite"
    );
    assert_eq!(write(&[0, 1], 4, 0, "7".into()).unwrap_err(), "`tether_request_id` is `7`, not a request ID");
    assert_eq!(archive(|out| out.string("a", "b")).unwrap_err(), "`input_ids` is missing");
}
