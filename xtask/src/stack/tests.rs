use super::*;

fn service(script: &str, logs: &Path) -> Service {
    let mut command = process::command("sh");
    command.args(["-c", script]);
    let address = free_addresses().unwrap().0;
    Service::start("tether-test", command, address, logs).unwrap()
}

fn never() -> Interrupt {
    Interrupt(Arc::new(AtomicBool::new(false)))
}

fn alive(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid).is_ok()
}

#[test]
fn a_service_that_ends_by_itself_is_an_error_with_its_last_words() {
    let logs = tempfile::tempdir().unwrap();
    let mut service =
        service("for i in $(seq 40); do echo line $i; done; echo no such model >&2; exit 2", logs.path());
    let error = service.wait_for("/health", &never()).unwrap_err().to_string();
    assert!(error.contains("tether-test ended by itself: exit status: 2"), "{error}");
    assert!(error.contains("no such model") && error.contains("line 40"), "{error}");
    assert!(!error.contains("line 20"), "the tail should be short: {error}");
}

#[test]
fn an_interrupt_ends_the_waiting_and_stops_the_child() {
    let logs = tempfile::tempdir().unwrap();
    let mut service = service("exec sleep 600", logs.path());
    let pid = Pid::from_child(&service.running.child);
    let interrupt = Interrupt(Arc::new(AtomicBool::new(true)));
    assert_eq!(service.wait_for("/health", &interrupt).unwrap_err().to_string(), "interrupted");
    assert!(alive(pid));
    drop(service);
    assert!(!alive(pid));
}

#[test]
fn a_child_whose_owner_is_killed_ends_with_it() {
    // To the kernel the owner is the thread. This one ends without a word to its child.
    let start = || Running::spawn(process::command("sleep").arg("600")).unwrap();
    let mut orphan = thread::spawn(start).join().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match orphan.poll().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < deadline, "it lives on"),
        }
        thread::sleep(POLL);
    };
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(Signal::KILL.as_raw()));
}

#[test]
fn a_service_is_asked_to_stop_and_its_exit_code_counts() {
    let logs = tempfile::tempdir().unwrap();
    for (code, good) in [(0, true), (3, false)] {
        let script = format!("trap 'exit {code}' TERM; echo up; while :; do sleep 0.01; done");
        let mut service = service(&script, logs.path());
        let deadline = Instant::now() + Duration::from_secs(60);
        while !service.tail().contains("up") {
            assert!(Instant::now() < deadline, "{}", service.tail());
            thread::sleep(POLL);
        }
        let result = service.stop();
        assert_eq!(result.is_ok(), good, "{result:?}");
    }
}

#[test]
fn metrics_are_summed_over_labels_and_a_missing_one_is_an_error() {
    let metrics = Metrics(
        "# HELP a_total Things.\n# TYPE a_total counter\na_total{kind=\"x\",way=\"in\"} 2\n\
         a_total{kind=\"y\",way=\"in\"} 3\na_total_other 100\nplain 7\n"
            .to_owned(),
    );
    assert_eq!(metrics.sum("a_total", &[]).unwrap(), 5);
    assert_eq!(metrics.sum("a_total", &["kind=\"y\""]).unwrap(), 3);
    assert_eq!(metrics.sum("plain", &[]).unwrap(), 7);
    assert!(metrics.sum("a_total", &["kind=\"z\""]).is_err());
    assert!(metrics.sum("a_tota", &[]).is_err());
}

#[test]
fn a_folder_is_made_or_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b");
    fresh_dir(&path).unwrap();
    fs::write(path.join("old"), "").unwrap();
    fresh_dir(&path).unwrap();
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}
