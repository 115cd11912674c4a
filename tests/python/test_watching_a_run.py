"""A real Prometheus scrapes the real binaries under a load with faults. Every expression of every dashboard and rule is
evaluated over its API, and what the counters say is what the load generator counted."""

import http.client
import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import metrics_doc
import pytest
import yaml
from watched import GRAFANA, SCRAPE, Load, Stack, eventually, free_port, get, hang_up, program, samples

# Expressions that may be without data in this test, and why.
EMPTY = {
    'sum by (alertname) (ALERTS{alertname=~"Tether.*", alertstate="firing"})': "no alert fires in a healthy run",
    "tether:extract_end_time:seconds": "recorded from the sixth minute of a run on",
    **{name: "an alert that does not fire is empty; promtool's tests show each firing and resolving" for name in (
        "TetherMismatch", "TetherNoProgress", "TetherSlow", "TetherEtaGrown", "TetherDiskWillFill", "TetherUpstreamDown",
        "TetherErrorRatio", "TetherQueueSaturated", "TetherPublishSlow")},
}
LONG_ENOUGH = 14.0


class Watched:
    """What the module's tests look at, after one run."""

    stack: Stack
    load: Load
    began: float
    # While everything was up and busy.
    busy: float
    before: dict[str, str]
    texts: dict[str, str]
    hang_ups = 5


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    run, stack = Watched(), Stack(tmp_path_factory.mktemp("watched"))
    run.stack = stack
    try:
        stack.start_server()
        stack.start_proxy()
        stack.start_doubter()
        run.before = {job: get(address) for job, address in
                      [("tether-server", stack.server), ("tether-proxy", stack.proxy_metrics)]}
        extraction = stack.start_extraction(20_000)
        stack.start_prometheus()
        eventually("three jobs are scraped", lambda: stack.api("query", query="count(up == 1)")["result"]
                   and stack.value("count(up == 1)") == 4)
        run.load = Load(stack.proxy, stack.doubter)
        run.began = time.time()
        hang_up(stack, run.hang_ups)
        run.load.start()
        time.sleep(LONG_ENOUGH)
        run.busy = time.time()
        run.texts = {"tether-server": get(stack.server), "tether-proxy": get(stack.proxy_metrics),
                     "tether-extract": get(stack.extract_metrics)}
        time.sleep(4 * SCRAPE)
        run.load.stop()
        os.kill(extraction.child.pid, signal.SIGTERM)
        run.extract_code = extraction.child.wait()
        eventually("the proxy is idle", lambda: samples(get(stack.proxy_metrics))[
            "tether_proxy_requests_in_flight", frozenset()] == 0)
        # Until what is true now has been scraped.
        still = time.time()
        eventually("the last state is scraped", lambda: min(
            float(s["value"][1]) for s in stack.api("query", query="timestamp(up)")["result"]) > still)
        yield run
    finally:
        stack.end()


def expressions():
    """(where, expression, whether over time) of all panels and rules."""
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}", target["expr"], target["range"]
    for path in ("recording", "alerts"):
        for group in yaml.safe_load((GRAFANA / "prometheus" / "rules" / f"{path}.yml").read_text())["groups"]:
            for rule in group["rules"]:
                yield rule.get("record") or rule["alert"], rule["expr"], False


def runnable(expr: str) -> str:
    """As Grafana sends it, with every instance chosen."""
    return re.sub(r"\$(extract|proxy|server)\b", ".*", expr.replace("$__rate_interval", "5s"))


def test_every_expression_of_every_dashboard_and_rule_has_data(watched):
    stack, empty, seen = watched.stack, [], 0
    for where, expr, over_time in expressions():
        query, seen = runnable(expr), seen + 1
        assert "$" not in query, f"{where}: an unknown variable in {expr}"
        if over_time:
            data = stack.api("query_range", query=query, start=watched.began, end=watched.busy, step="1s")
            values = [float(v) for series in data["result"] for _, v in series["values"]]
        else:
            values = [float(s["value"][1]) for s in stack.api("query", query=query, time=watched.busy)["result"]]
        if not any(map(math.isfinite, values)) and expr not in EMPTY and where not in EMPTY:
            empty.append(f"{where}: {expr}")
    assert not empty, "\n".join(empty)
    assert seen > 150
    everything = {part for where, expr, _ in expressions() for part in (where, expr)}
    assert set(EMPTY) <= everything, "an exception for what is not there"


def test_no_expression_names_an_unknown_series_or_label(watched):
    stack, wrong = watched.stack, []
    labels: dict[str, set[str]] = {}
    for series in stack.api("series", **{"match[]": '{__name__=~"(tether|process).*|ALERTS"}', "start": watched.began,
                                         "end": time.time()}):
        labels.setdefault(series["__name__"], set()).update(series)
    # Made up of series above, and without data here for the reason in EMPTY.
    labels.setdefault("tether:extract_end_time:seconds", {"job", "instance"})
    for where, expr, _ in expressions():
        for name, matchers in re.findall(r"\b((?:tether|process)[\w:]*|ALERTS)\b(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', expr)):
            if name not in labels:
                wrong.append(f"{where}: no series {name}")
                continue
            wrong += [f"{where}: {name} has no label {label}" for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
                      if label not in labels[name]]
        known = set().union(*labels.values()) | {"le"}
        for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expr):
            wrong += [f"{where}: no label {label}" for label in re.findall(r"\w+", group) if label not in known]
    assert not wrong, "\n".join(wrong)


def test_counters_are_what_the_load_generator_counted(watched):
    stack, load = watched.stack, watched.load
    one = f'instance="{stack.proxy_metrics}"'
    written = len(list(stack.out.glob("rows_*/data_*.ckpt")))
    textfile = samples(stack.textfile.read_text())
    extracted = textfile["tether_extract_samples_written_total", frozenset()]
    assert written > 20 and extracted == written
    # What the extraction asked for beside, and the clients that left.
    asked = sum(textfile["tether_extract_request_seconds_count", frozenset({("result", r)})] for r in ("ok", "failed"))
    assert asked == written, "no request of the extraction failed"
    sent = sum(load.statuses.values())
    assert set(load.statuses) == {200, 400} and load.statuses[200] > 100, load.statuses
    good, dumps = load.statuses[200] + asked, load.prompts + asked
    expected = {
        f'sum(tether_proxy_requests_received_total{{{one}, route="generate"}})': sent + asked + watched.hang_ups,
        f'sum(tether_proxy_requests_answered_total{{{one}, class="4xx"}})': load.statuses[400],
        f'sum(tether_proxy_requests_answered_total{{{one}, route="generate", class="2xx"}})': good,
        f'sum(tether_proxy_refused_total{{{one}, reason="invalid_body"}})': load.statuses[400],
        f'sum(tether_proxy_refused_total{{{one}, reason!="invalid_body"}})': 0,
        f'sum(tether_proxy_gate_total{{{one}, result="matched"}})': dumps,
        f'sum(tether_proxy_mismatches_total{{{one}}})': 0,
        f'sum(tether_proxy_client_gone_total{{{one}}})': watched.hang_ups,
        f'sum(tether_proxy_requests_in_flight{{{one}}})': 0,
        f'sum(tether_proxy_requests_received_total{{instance="{stack.doubter}"}})': load.doubted,
        f'sum(tether_proxy_mismatches_total{{instance="{stack.doubter}", reason="missing"}})': load.doubted,
        f'sum(tether_proxy_requests_answered_total{{instance="{stack.doubter}", class="5xx"}})': load.doubted,
        'sum(tether_server_request_seconds_count{outcome=~"refused|overloaded|failed"})': 0,
        'sum(tether_server_request_seconds_count{outcome="ok"})': good,
        'sum(tether_server_dumps_total{outcome="published"})': dumps,
        "sum(tether_server_token_mismatches_total)": 0,
    }
    found = {query: stack.value(query) for query in expected}
    assert found == expected
    tokens = load.tokens + textfile["tether_extract_tokens_written_total", frozenset()]
    assert stack.value(f"sum(tether_proxy_prompt_tokens_total{{{one}}})") == tokens


def test_the_textfile_of_a_stopped_run_says_how_far_it_came(watched):
    textfile = samples(watched.stack.textfile.read_text())
    assert all(name.startswith("tether_extract_") for name, _ in textfile), "node_exporter has the others itself"
    state = {dict(labels)["state"]: v for (name, labels), v in textfile.items() if name == "tether_extract_state"}
    assert state == {s: float(s == "incomplete") for s in state} and watched.extract_code == 1
    fate = {dict(labels)["state"]: v for (name, labels), v in textfile.items() if name == "tether_extract_samples"}
    assert sum(fate.values()) == textfile["tether_extract_rows", frozenset()] == 20_001
    assert fate["failed"] == 1 and fate["left_out"] == 0
    assert fate["done"] == textfile["tether_extract_ledger_samples", frozenset()]
    assert textfile["tether_extract_ledger_dumps", frozenset()] == 0
    assert textfile["tether_extract_failures_total", frozenset({("kind", "bad_row")})] == 1


def test_rate_and_increase_agree_with_the_load_generator(watched):
    """The extraction uses the same proxy, so what is compared is what only the load generator causes: refusals."""
    stack, seconds = watched.stack, 10
    series = f'tether_proxy_requests_answered_total{{instance="{stack.proxy_metrics}", route="generate", class="4xx"}}[{seconds}s]'

    def raw(at: float):
        return [(float(t), float(v)) for t, v in stack.api("query", query=series, time=at)["result"][0]["values"]]

    # At a scrape, so that nothing is guessed beyond it.
    at = raw(watched.busy)[-1][0]
    scrapes = raw(at)
    assert len(scrapes) >= 20, f"{len(scrapes)} scrapes"
    (first, low), (last, high) = scrapes[0], scrapes[-1]
    own = sum(first < end <= last for end in watched.load.refused)
    assert own > 50 and abs((high - low) / own - 1) < 0.05, (high - low, own)
    for function, scale in (("rate", 1), ("increase", seconds)):
        found = stack.value(f"{function}({series})", at=at) / scale
        assert abs(found / (own / (last - first)) - 1) < 0.05, (function, found, own, last - first)


def test_every_series_is_there_at_zero_before_the_first_request(watched):
    now = {"tether-server": get(watched.stack.server), "tether-proxy": get(watched.stack.proxy_metrics)}
    for job, before in watched.before.items():
        first, last = samples(before), samples(now[job])
        assert set(first) == set(last), f"{job}: {set(first) ^ set(last)}"
        counters = re.findall(r"# TYPE (tether_\w+) counter", before)
        assert counters
        # A runtime is busy from its first moment on, and somebody asked whether the program is up.
        early = ("_tokio_busy_seconds_total", "_connections_accepted_total")
        rising = {name: v for (name, _), v in first.items() if name in counters and not name.endswith(early) and v != 0}
        assert not rising, f"{job}: {rising}"


def test_series_do_not_multiply_with_what_clients_send_and_a_scrape_stays_small(watched):
    stack = watched.stack
    texts = {address: get(address) for address in (stack.server, stack.proxy_metrics)}
    connection = http.client.HTTPConnection(stack.proxy, timeout=60)
    for number in range(1000):
        path = ["/generate", f"/v1/{number}", f"/path/{number}?q={number}"][number % 3]
        body = json.dumps({"input_ids": [1 + number % 100], "rid": f"job-{number}", "model": f"model-{number}",
                           "sampling_params": {"max_new_tokens": 0}})
        connection.request("POST", path, body, {"content-type": "application/json", "x-request-id": f"id-{number}"})
        connection.getresponse().read()
    for address, before in texts.items():
        after = get(address)
        assert set(samples(after)) == set(samples(before)), address
        assert len(after) < 200_000, f"{len(after)} bytes"
        assert "job-" not in after and "model-" not in after and "id-" not in after


def test_buckets_reach_as_far_as_what_they_measure(watched):
    """A request may take an hour: a percentile must not end at the last bucket before."""
    reach = {"tether_proxy_request_duration_seconds": 3600, "tether_proxy_upstream_first_byte_seconds": 3600,
             "tether_server_request_seconds": 3600, "tether_server_queue_seconds": 3600, "tether_server_step_seconds": 3600,
             "tether_extract_request_seconds": 3600, "tether_proxy_gate_wait_seconds": 30, "tether_server_publish_seconds": 30,
             "tether_extract_store_seconds": 60, "tether_proxy_request_body_bytes": 512e6}
    text = "".join(watched.texts.values())
    for name, most in reach.items():
        bounds = sorted({float(le) for le in re.findall(rf'^{name}_bucket{{.*le="([^"]+)"', text, re.M)})
        assert bounds[-1] == math.inf and bounds[-2] >= most, f"{name}: {bounds[-2]}"
        assert all(high <= 6 * low for low, high in zip(bounds[1:-2], bounds[2:-1])), f"{name}: gaps in {bounds}"


def test_a_run_that_waits_says_so_and_its_scrapes_are_small_and_cheap(watched, tmp_path):
    stack = Stack(tmp_path)
    stack.proxy = f"127.0.0.1:{free_port()}"
    try:
        process = stack.start_extraction(10)
        state = ("tether_extract_state", frozenset({("state", "waiting")}))
        eventually("it waits for the proxy", lambda: samples(get(stack.extract_metrics))[state] == 1)
        text = get(stack.extract_metrics)
        assert len(text) < 200_000
        assert set(samples(text)) == set(samples(watched.texts["tether-extract"]))
        assert cpu_of_a_scrape(process, stack.extract_metrics) <= 0.005
    finally:
        stack.end()


def cpu_of_a_scrape(process, address: str, count: int = 200) -> float:
    def used() -> float:
        fields = Path(f"/proc/{process.child.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = used()
    for _ in range(count):
        get(address)
    cost = (used() - before) / count
    print(f"{process.name}: {cost * 1000:.2f} ms of CPU a scrape")
    return cost


def test_a_scrape_costs_little_cpu(watched):
    """The bound is 5 ms; typical is a tenth of it."""
    stack = watched.stack
    for process in stack.processes:
        if address := {"server": stack.server, "proxy": stack.proxy_metrics}.get(process.name):
            assert cpu_of_a_scrape(process, address) <= 0.005


def test_promtool_finds_nothing_wrong_with_names_types_and_help(watched):
    for job, text in watched.texts.items():
        done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), job


def test_the_list_of_metrics_is_that_of_the_binaries(watched):
    assert metrics_doc.TABLE.read_text(encoding="utf-8") == metrics_doc.page(watched.texts), \
        "docs/metrics.md is not current; `cargo xtask dashboards` writes it"


def test_a_restart_of_the_server_shows_as_no_fall_and_loses_no_count(watched):
    """Last: the server's counters begin anew."""
    stack = watched.stack
    server = next(process for process in stack.processes if process.name == "server")
    counter = "sum(tether_server_prompt_tokens_total)"

    def scraped_since(moment: float) -> bool:
        found = stack.api("query", query='timestamp(tether_server_ready)')["result"]
        return bool(found) and float(found[0]["value"][1]) > moment

    def work(requests: int) -> None:
        connection = http.client.HTTPConnection(stack.proxy, timeout=60)
        for _ in range(requests):
            assert Load.post(connection, json.dumps({"input_ids": [5] * 50, "sampling_params": {"max_new_tokens": 0}})) == 200
            time.sleep(0.02)
        connection.close()
        moment = time.time()
        eventually("that was scraped", lambda: scraped_since(moment))

    began, at_first = time.time(), stack.value(counter)
    work(60)
    first_life = stack.value(counter) - at_first
    server.end()
    server.begin()
    server.up(stack.server, "/health")
    work(60)
    ended = time.time()
    assert (first_life, stack.value(counter)) == (3000, 3000), "the counter itself starts anew"
    window = f"{math.ceil(ended - began)}s"
    assert stack.value(f"sum(resets(tether_server_prompt_tokens_total[{window}]))", at=ended) == 1
    grown = stack.value(f"sum(increase(tether_server_prompt_tokens_total[{window}]))", at=ended)
    # Prometheus extends what it saw by up to a scrape's interval at each end, which is much of a window so short.
    extended = 1 + 2.2 * SCRAPE / (ended - began)
    assert 0.95 < grown / 6000 < 1.05 * extended, (grown, extended)
    # What the boards plot never falls below zero.
    for where, expr, over_time in expressions():
        if over_time and "rate(" in expr and where.startswith("tether-server"):
            found = stack.api("query_range", query=runnable(expr), start=began, end=ended, step="1s")["result"]
            low = [float(v) for series in found for _, v in series["values"] if math.isfinite(float(v))]
            assert min(low, default=0) >= 0, f"{where}: {min(low)}"
