"""Writes docs/metrics.md from what the running binaries export. A test proves that the page is current."""

import re
import tempfile
from pathlib import Path

from watched import ROOT, Stack, get

TABLE = ROOT / "docs" / "metrics.md"

HEAD = """# Metrics

Every series that Tether's three programs export, as they describe them themselves. This page is written from running
binaries; a test compares it with them.

- `tether-proxy` serves `/metrics` on `--metrics-addr`, or on `--listen` without it.
- `tether-server` serves `/metrics` on `--listen`.
- `tether-extract` serves `/metrics` on `--metrics-addr` while a run goes on. With `--metrics-textfile FILE.prom` it also
  writes its own series to a file every five seconds and at the end, for node_exporter's textfile collector.

All series are there from the start, at zero, so that the first event of a kind is seen as an increase. Labels are closed
sets: an ID, a path or a model's name that a client chose is never one. `upstream` is the URL of each `--upstream`.
Histograms have the series `_bucket`, `_sum` and `_count`.
"""

PROGRAMS = [("tether-extract", "tether_extract_"), ("tether-proxy", "tether_proxy_"), ("tether-server", "tether_server_")]
# Labels whose values are not part of the code.
OPEN = {"upstream": "each `--upstream`", "version": "the program's version"}


def families(text: str) -> dict[str, dict]:
    """Name to help, type and labels with their values, in the order of the text."""
    found: dict[str, dict] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, text_of = line.split(" ", 3)
            found[name] = {"help": text_of.rstrip("."), "labels": {}}
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            found[name]["type"] = kind
        elif line:
            name = line.partition("{")[0].split(" ")[0]
            name = name if name in found else re.sub(r"_(bucket|sum|count)$", "", name)
            for key, value in re.findall(r'(\w+)="([^"]*)"', line):
                if key != "le" and value not in (values := found[name]["labels"].setdefault(key, [])):
                    values.append(value)
    return found


def labels(labels: dict[str, list[str]]) -> str:
    return "; ".join(
        f"`{key}`: " + (OPEN.get(key) or ", ".join(f"`{value}`" for value in sorted(values)))
        for key, values in sorted(labels.items()))


def table(found: dict[str, dict]) -> str:
    lines = ["| series | type | labels | |", "| --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {f['type']} | {labels(f['labels'])} | {f['help']} |" for name, f in found.items()]
    return "\n".join(lines) + "\n"


def page(texts: dict[str, str]) -> str:
    """The page, from each program's text."""
    parts, common = [HEAD], {}
    for program, prefix in PROGRAMS:
        found = families(texts[program])
        parts.append(f"## {program}\n\n" + table({n: f for n, f in found.items() if n.startswith(prefix)}))
        common.update({n: f for n, f in found.items() if not n.startswith(prefix)})
    parts.append("## All three\n\n" + table(common))
    return "\n".join(parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            stack.start_server()
            stack.start_proxy()
            stack.start_extraction(20_000)
            texts = {"tether-server": get(stack.server), "tether-proxy": get(stack.proxy_metrics),
                     "tether-extract": get(stack.extract_metrics)}
        finally:
            stack.end()
    TABLE.write_text(page(texts), encoding="utf-8")
    print(TABLE)


if __name__ == "__main__":
    main()
