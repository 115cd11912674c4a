"""The dashboards, rules and provisioning files by themselves: current, valid by Grafana's and Prometheus' own rules, whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import fastjsonschema
import pytest
import yaml
from watched import GRAFANA, ROOT, program

sys.path.insert(0, str(GRAFANA / "source"))
import build  # noqa: E402

DASHBOARDS = {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
PROMETHEUS = GRAFANA / "prometheus"
ALERTS = [rule for group in yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text())["groups"]
          for rule in group["rules"]]


@pytest.fixture(scope="module")
def valid():
    """Grafana's own types, as a check of each."""
    schemas = json.loads((GRAFANA / "schema" / "dashboard.json").read_text())
    return {name: fastjsonschema.compile(schema) for name, schema in schemas.items() if not name.startswith("$")}


def charts(board: dict) -> list[dict]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def named(value, name: str):
    """Everything called `name` in JSON."""
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == name)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from named(inner, name)


def test_the_committed_dashboards_are_what_their_source_makes():
    made = build.texts()
    assert set(made) == set(DASHBOARDS)
    for name, text in made.items():
        assert (GRAFANA / "dashboards" / name).read_text(encoding="utf-8") == text, \
            f"{name} is not current; `cargo xtask dashboards` writes it"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_by_grafanas_own_schema(valid, name):
    board = DASHBOARDS[name]
    valid["GrafanaDashboard"](board)
    for panel in charts(board):
        kind = {"timeseries": "TimeSeriesOptions", "stat": "StatOptions"}[panel["type"]]
        valid[kind](panel["options"])
        if panel["type"] == "timeseries":
            valid["TimeSeriesFieldConfig"](panel["fieldConfig"]["defaults"]["custom"])


def test_the_schema_refuses_what_grafana_does_not_know(valid):
    board = json.loads(json.dumps(DASHBOARDS["tether-proxy.json"]))
    charts(board)[0]["gridPos"]["h"] = "tall"
    with pytest.raises(fastjsonschema.JsonSchemaException):
        valid["GrafanaDashboard"](board)
    with pytest.raises(fastjsonschema.JsonSchemaException):
        valid["StatOptions"]({**charts(DASHBOARDS["tether-proxy.json"])[0]["options"], "graphMode": "hologram"})


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_dashboard_names_a_data_source(name):
    board = DASHBOARDS[name]
    sources = list(named(board, "datasource"))
    assert len(sources) > len(charts(board))
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    first = board["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert "DS_PROMETHEUS" not in json.dumps(board) and board["uid"] == Path(name).stem


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_a_unit_a_description_and_queries_and_stands_alone(name):
    board = DASHBOARDS[name]
    taken = set()
    variables = {v["name"] for v in board["templating"]["list"]}
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    for panel in charts(board):
        assert panel["title"] and panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"] and panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables, f"{panel['title']}: {used - variables}"
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, f"{panel['title']} lies on another"
        taken |= cells


def test_dashboards_link_to_each_other_and_keep_what_was_chosen():
    for board in DASHBOARDS.values():
        assert board["links"][0]["tags"] == board["tags"] == ["tether"]
        assert board["links"][0]["keepTime"] and board["links"][0]["includeVars"]
    # A variable means the same everywhere, as a link carries it along.
    meaning = {}
    for board in DASHBOARDS.values():
        for variable in board["templating"]["list"][1:]:
            assert meaning.setdefault(variable["name"], variable["query"]) == variable["query"]
    assert set(meaning) == {"extract", "proxy", "server"}


def run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_accepts_the_configuration_and_the_rules():
    assert "9 rules found" in run(program("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")
    run(program("promtool"), "check", "rules", *sorted((PROMETHEUS / "rules").glob("*.yml")))


def test_each_alert_fires_and_resolves():
    run(program("promtool"), "test", "rules", PROMETHEUS / "tests" / "alerts.yml")
    tested = (PROMETHEUS / "tests" / "alerts.yml").read_text()
    for alert in ALERTS:
        name = alert["alert"]
        assert re.search(rf"alertname: {name}, exp_alerts: \[\]", tested), f"{name} is not seen to be silent"
        assert re.search(rf"alertname: {name}\n        exp_alerts:\n          - ", tested), f"{name} is not seen to fire"


def test_each_alert_has_its_page_in_the_runbook():
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    headings = set(re.findall(r"^## (\w+)$", runbook, re.M))
    assert headings == {alert["alert"] for alert in ALERTS} and len(ALERTS) == 9
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical") and alert["annotations"]["summary"]
    titles = {panel["title"] for board in DASHBOARDS.values() for panel in board["panels"]}
    titles |= {board["title"].removeprefix("Tether: ") for board in DASHBOARDS.values()}
    titles |= {t["legendFormat"].capitalize() for b in DASHBOARDS.values() for p in charts(b) for t in p["targets"]}
    named_there = {" ".join(words.split()) for words in re.findall(r"\*([A-Z][^*]+)\*", runbook)}
    unknown = {words for words in named_there if words not in titles and words != "Tether: extraction run"}
    assert len(named_there) > 10 and not unknown


def test_what_compose_mounts_is_there():
    compose = yaml.safe_load((GRAFANA / "compose.yml").read_text())
    mounted = {}
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), "pinned to a version"
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (GRAFANA / source).exists(), source
                mounted[target] = GRAFANA / source
            else:
                assert source in compose["volumes"]
    # What the mounted files name is mounted where they look for it.
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/tether.yml").read_text())["providers"][0]
    assert mounted[provider["options"]["path"]] == GRAFANA / "./dashboards"
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (mounted[str(Path(home).parent)] / Path(home).name).is_file()
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    for name in config["rule_files"] + [f for job in config["scrape_configs"] for sd in job["file_sd_configs"] for f in sd["files"]]:
        assert (PROMETHEUS / name).is_file()
        assert f"/etc/prometheus/{Path(name).parent}" in mounted
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["isDefault"]
    assert source["url"].removeprefix("http://") in " ".join(compose["services"]["prometheus"]["command"])
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
