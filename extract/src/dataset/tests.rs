use std::io::Write as _;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;

fn file(text: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text).unwrap();
    file
}

fn index(text: &str) -> Dataset {
    Dataset::index(file(text.as_bytes()).path(), RepeatedIds::Keep).unwrap()
}

fn reason(line: &str) -> String {
    let set = index(line);
    assert_eq!((set.rows.len(), set.bad.len()), (0, 1), "{line}");
    set.bad[0].reason.clone()
}

#[test]
fn rows_are_counted_without_blank_lines_and_bad_rows_keep_their_number() {
    let set = index("{\"input_ids\":[1,2]}\n\n  \r\nnot json\n{\"input_ids\":[3],\"id\":7}");
    assert_eq!(set.total_rows, 3);
    assert_eq!(set.total_tokens, 3);
    let places: Vec<_> = set.rows.iter().map(|row| (row.row, row.line, row.tokens)).collect();
    assert_eq!(places, [(0, 1, 2), (2, 5, 1)]);
    assert_eq!((set.bad[0].row, set.bad[0].line), (1, 4));
    let last = set.read(&set.rows[1]).unwrap();
    assert_eq!(last, Sample { id: Some("7".into()), input_ids: vec![3], loss_mask: vec![1] });
}

#[test]
fn a_bad_row_says_what_is_wrong_with_it() {
    for (line, expected) in [
        (r#"{"id":"a"}"#, "`input_ids` is missing"),
        (r#"{"input_ids":null}"#, "`input_ids` is missing"),
        (r#"{"input_ids":[]}"#, "`input_ids` is empty"),
        (r#"{"input_ids":[1,-5]}"#, "`input_ids[1]` is -5; a token ID is not negative"),
        (r#"{"input_ids":[1.5]}"#, "invalid type: floating point `1.5`, expected i64 (column 17)"),
        (r#"{"input_ids":["1"]}"#, "invalid type: string \"1\", expected i64 (column 17)"),
        (r#"{"input_ids":[[1]]}"#, "invalid type: sequence, expected i64 (column 14)"),
        (r#"{"input_ids":[1],"input_ids":[2]}"#, "duplicate field `input_ids` (column 28)"),
        (r#"{"input_ids":[1,2],"loss_mask":[1]}"#, "`loss_mask` has 1 places, `input_ids` has 2"),
        (
            r#"{"input_ids":[1],"loss_mask":[2]}"#,
            "invalid value: integer `2`, expected 0, 1, false or true in `loss_mask` (column 31)",
        ),
        (r#"{"input_ids":[1]"#, "EOF while parsing an object (column 16)"),
        (r#"{"input_ids":[1],"id":[]}"#, "`id` must be a text or a number (column 25)"),
    ] {
        assert_eq!(reason(line), expected, "{line}");
    }
    assert!(reason("{\"input_ids\":[99999999999999999999]}").starts_with("invalid"));
    assert!(reason("\u{0}\u{1}").contains("expected value"));
}

#[test]
fn a_mask_may_be_spelt_as_booleans() {
    let set = index(r#"{"input_ids":[5,6,7],"loss_mask":[true,false,1],"text":"unused","nested":{"a":[1]}}"#);
    assert_eq!(set.read(&set.rows[0]).unwrap().loss_mask, [1, 0, 1]);
}

#[test]
fn a_repeated_id_is_kept_and_counted_or_refused_on_request() {
    let text = "{\"id\":\"a\",\"input_ids\":[1]}\n{\"id\":\"a\",\"input_ids\":[2]}\n{\"input_ids\":[3]}\n";
    let file = file(text.as_bytes());
    let kept = Dataset::index(file.path(), RepeatedIds::Keep).unwrap();
    assert_eq!((kept.rows.len(), kept.bad.len(), kept.repeated_ids), (3, 0, 1));
    let refused = Dataset::index(file.path(), RepeatedIds::Fail).unwrap();
    assert_eq!((refused.rows.len(), refused.repeated_ids), (2, 0));
    assert_eq!(refused.bad[0].reason, "`id` \"a\" was already used by line 1");
    assert_eq!(refused.bad[0].id.as_deref(), Some("a"));
}

#[test]
fn a_row_that_changes_under_the_run_is_noticed() {
    let mut file = file(b"{\"input_ids\":[1,2]}\n");
    let set = Dataset::index(file.path(), RepeatedIds::Keep).unwrap();
    file.as_file_mut().set_len(0).unwrap();
    assert!(matches!(set.read(&set.rows[0]), Err(ReadRowError::Changed { line: 1 })));
    file.as_file().write_all_at(b"{\"input_ids\":[1,3]}\n", 0).unwrap();
    assert!(matches!(set.read(&set.rows[0]), Err(ReadRowError::Changed { line: 1 })));
}

#[test]
fn a_set_without_rows_or_that_is_no_file_is_refused() {
    let empty = file(b"\n \n");
    assert!(matches!(Dataset::index(empty.path(), RepeatedIds::Keep), Err(DatasetError::Empty { .. })));
    let gone = Dataset::index(Path::new("/nonexistent.jsonl"), RepeatedIds::Keep).unwrap_err();
    assert_eq!(gone.to_string(), "cannot read the data set `/nonexistent.jsonl`");
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Dataset::index(folder.path(), RepeatedIds::Keep), Err(DatasetError::Io { .. })));
}

proptest! {
    #[test]
    fn every_row_is_read_back_as_it_was_written(
        samples in prop::collection::vec(
            (prop::collection::vec((0..i64::MAX, 0..2i64), 1..30), prop::option::of("[^\u{0}]{0,8}"), 0..3usize), 1..20)
    ) {
        let mut text = String::new();
        let mut expected = Vec::new();
        for (pairs, id, blanks) in samples {
            let (input_ids, loss_mask): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let value = serde_json::json!({"loss_mask": loss_mask, "id": id, "input_ids": input_ids});
            text += &format!("{value}\n{}", "\n".repeat(blanks));
            expected.push(Sample { id, input_ids, loss_mask });
        }
        let set = index(&text);
        prop_assert!(set.bad.is_empty());
        let read: Vec<_> = set.rows.iter().map(|row| set.read(row).unwrap()).collect();
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn no_input_makes_the_reader_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let file = file(&text);
        if let Ok(set) = Dataset::index(file.path(), RepeatedIds::Fail) {
            prop_assert_eq!(set.total_rows, (set.rows.len() + set.bad.len()) as u64);
        }
    }
}
