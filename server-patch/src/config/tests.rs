use std::ffi::OsString;

use super::*;

fn args(flags: &str) -> Result<Args, tether_settings::SettingsError> {
    let flags = format!("tether-server --model m --dump-dir d {flags}");
    let flags: Vec<OsString> = flags.split_whitespace().map(OsString::from).collect();
    tether_settings::from_sources("TETHER_SERVER_", flags, std::iter::empty())
}

#[test]
fn the_documented_command_line_is_accepted() {
    let args = args(
        "--listen 127.0.0.1:30000 --capture-layers 2,30,58 --final post_norm --capture all --dtype float32 --dump-dtype bfloat16 \
         --device cuda:0 --max-batch-tokens 100 --dump-budget 64GiB --fsync --threads 2 --queue-timeout 30s --max-queued-requests 5 \
         --writers 3 --dump-ttl 1h --served-model-name x --drain-timeout 10 --log-level debug --log-json --write-buffer 1MiB",
    )
    .unwrap();
    assert_eq!(args.capture_layers, Some(vec![2, 30, 58]));
    assert_eq!((args.final_state, args.capture), (FinalState::PostNorm, Capture::All));
    assert_eq!(args.device, Place(Device::Cuda(0)));
    assert_eq!(args.places(), [Place(Device::Cuda(0))]);
    assert_eq!(args.dump_budget, ByteSize(64 << 30));
    assert_eq!((args.compute(), args.stored()), (DtypeChoice::Float32, Some(Dtype::BFloat16)));
    assert_eq!(args.compute_threads(), 2);
}

#[test]
fn a_device_map_takes_the_place_of_the_device() {
    let places = |flags: &str| args(flags).unwrap().places().to_vec();
    assert_eq!(places(""), [Place(Device::Cpu)]);
    let map = places("--device-map cuda:1,cpu,cuda");
    assert_eq!(map, [Place(Device::Cuda(1)), Place(Device::Cpu), Place(Device::Cuda(0))]);
    assert_eq!(map.iter().map(ToString::to_string).collect::<Vec<_>>(), ["cuda:1", "cpu", "cuda:0"]);
}

#[test]
fn a_bad_value_is_refused_with_what_is_accepted() {
    for (flags, parts) in [
        ("--final prenorm", ["prenorm", "`pre_norm`, `post_norm`, `both` or `none`"]),
        ("--device gpu", ["gpu", "cpu, cuda or cuda:N"]),
        ("--device cuda:x", ["cuda:x", "cpu, cuda or cuda:N"]),
        ("--device-map cpu,gpu", ["gpu", "cpu, cuda or cuda:N"]),
        ("--device-map cpu --device cpu", ["--device-map", "--device"]),
        ("--dump-budget 1.5G", ["1.5G", "64GiB"]),
        ("--queue-timeout soon", ["soon", "30s"]),
        ("--threads 0", ["0", "1..=4096"]),
        ("--max-batch-tokens 0", ["0", "1.."]),
        ("--capture some", ["some", "tagged, all"]),
    ] {
        let text = args(flags).map(drop).unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{flags}: {text}");
    }
}

#[test]
fn default_points_are_those_of_eagle3_or_asked_for() {
    let defaults = args("").unwrap().capture_defaults(61).unwrap();
    assert_eq!(defaults.points, [2, 30, 58]);
    let text = args("").unwrap().capture_defaults(4).map(drop).unwrap_err().to_string();
    assert!(text.starts_with("--capture-layers is needed, from 0 to 4 on the input axis"), "{text}");
}

#[test]
fn a_layer_the_model_does_not_have_is_refused_with_the_range() {
    for (layers, part) in [
        ("2,99", "point 99 does not exist"),
        ("-1", "point -1 does not exist"),
        ("2,2", "point 2 is listed twice"),
    ] {
        let args = args(&format!("--capture-layers {layers}")).unwrap();
        let error = anyhow::Error::from(args.capture_defaults(8).map(drop).unwrap_err());
        let text = format!("{error:#}");
        assert!(text.starts_with("--capture-layers cannot be captured: ") && text.contains(part), "{text}");
    }
}

#[test]
fn the_dump_directory_is_made_and_cleared_of_what_a_killed_server_left() {
    let dir = tempfile::tempdir().unwrap();
    let dumps = dir.path().join("a/b/c");
    assert_eq!(prepare_dump_dir(&dumps).unwrap(), fs::canonicalize(&dumps).unwrap());
    let stale = dumps.join(format!(".{}.x1y2z3.tmp", tether_dump::RequestId::new()));
    fs::write(&stale, "half").unwrap();
    fs::write(dumps.join("kept"), "").unwrap();
    prepare_dump_dir(&dumps).unwrap();
    assert!(!stale.exists() && dumps.join("kept").exists());
    let error = prepare_dump_dir(&dumps.join("kept")).unwrap_err().to_string();
    assert!(error.starts_with("--dump-dir ") && error.contains("kept"), "{error}");
}

#[test]
fn a_model_directory_without_a_config_is_refused_before_anything_else() {
    let error = args("").unwrap().model_info().unwrap_err();
    assert!(error.to_string().contains("--model m"), "{error}");
}

#[test]
fn texts_end_with_the_tokens_of_both_configs() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ends(dir.path(), vec![1]).unwrap(), [1], "the file may be absent");
    let file = dir.path().join("generation_config.json");
    for (text, expected) in [
        (r#"{"eos_token_id":163586,"temperature":0.6}"#, vec![163_585, 163_586]),
        (r#"{"eos_token_id":[163585,7]}"#, vec![163_585, 7]),
        (r#"{"eos_token_id":null}"#, vec![163_585]),
        ("{}", vec![163_585]),
    ] {
        fs::write(&file, text).unwrap();
        assert_eq!(ends(dir.path(), vec![163_585]).unwrap(), expected, "{text}");
    }
    for broken in ["", "[]", r#"{"eos_token_id":"</s>"}"#] {
        fs::write(&file, broken).unwrap();
        let error = ends(dir.path(), vec![1]).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("a list of them"), "{error}");
    }
}

#[test]
fn a_launch_line_of_sglang_is_accepted_and_what_has_no_meaning_is_named() {
    let flags: Vec<OsString> = "tether-server --model-path m --dump-dir d --host 0.0.0.0 --port 30001 --served-model-name x --api-key k --admin-api-key a \
        --disable-radix-cache --trust-remote-code --tp 1 --mem-fraction-static 0.85 --context-length 4096 --chunked-prefill-size 2048 \
        --max-running-requests 16 --log-level info"
        .split_whitespace()
        .map(OsString::from)
        .collect();
    let args: Args = tether_settings::from_sources("TETHER_SERVER_", flags, std::iter::empty()).unwrap();
    assert_eq!((args.address().as_str(), args.batch_tokens()), ("0.0.0.0:30001", 2048));
    assert_eq!(args.model, Path::new("m"));
    let ignored = ["--tp", "--mem-fraction-static", "--disable-radix-cache", "--trust-remote-code"];
    assert_eq!(args.sglang.without_effect(), ignored);
    let keys = args.sglang.keys().unwrap();
    assert!(keys.api.is_some() && keys.admin.is_some());
    assert!(!format!("{args:?}").contains("Key(\"k"), "a key is not printed");
    assert_eq!(args.context(163_840).unwrap(), 4096);
    let error = args.context(2048).unwrap_err().to_string();
    assert!(error.contains("4096") && error.contains("2048"), "{error}");
}

#[test]
fn sglang_s_flags_mean_what_they_say_or_are_refused() {
    assert_eq!(args("").unwrap().address(), "127.0.0.1:30000");
    assert_eq!(args("--port 8").unwrap().address(), "127.0.0.1:8");
    assert_eq!(args("--host ::1").unwrap().address(), "[::1]:30000");
    let whole = args("--chunked-prefill-size -1").unwrap();
    assert_eq!((whole.batch_tokens(), whole.sglang.without_effect()), (8192, vec!["--chunked-prefill-size"]));
    for (flags, parts) in [
        ("--tp 2", ["2", "1..=1"]),
        ("--listen 127.0.0.1:1 --port 2", ["--listen", "--port"]),
        ("--chunked-prefill-size 5 --max-batch-tokens 6", ["--chunked-prefill-size", "--max-batch-tokens"]),
        ("--enable-torch-compile", ["--enable-torch-compile", "unexpected"]),
    ] {
        let text = args(flags).map(drop).unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{flags}: {text}");
    }
}
