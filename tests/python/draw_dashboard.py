"""Draws a dashboard's panels from real data for the docs: a run under load, Prometheus' answers to the panels' own queries, and
Chromium as the renderer. It is not a picture of Grafana, and says so.

    draw_dashboard.py DASHBOARD.json PICTURE.png STATUS_PAGE.png

The second picture is of the proxy's own status page at the same time.
"""

import html
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from browser import Browser
from watched import Load, Stack

COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d"]
NAMED = {"green": "#1a7f37", "yellow": "#8a6100", "red": "#b3202a", "text": "#22252b"}
CELL, ROW = 50, 38
STYLE = """body{margin:0;background:#111217;color:#d8d9da;font:12px system-ui,sans-serif;position:relative}
div{position:absolute;overflow:hidden;border-radius:3px}
.panel{background:#181b1f;border:1px solid #2c3235;padding:6px 8px}.row{font-size:15px;padding:8px 2px}
b{font-weight:600}.value{font-size:22px;text-align:center;position:static;padding-top:18px;line-height:1.6}
.legend{bottom:3px;left:8px;right:8px;color:#9fa7b3;font-size:11px;max-height:28px}
svg text{fill:#9fa7b3;font:10px system-ui,sans-serif}"""


def words(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "–"
    if unit == "dateTimeAsIso":
        return datetime.fromtimestamp(value / 1000, timezone.utc).strftime("%H:%M:%S")
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit in ("s", "dtdurations"):
        return f"{value * 1000:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"
    suffix = {"bytes": "B", "Bps": "B/s", "reqps": "/s", "cps": "/s"}.get(unit, "")
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{suffix}"
    return f"{value:.3g} {suffix}".strip()


def series(stack: Stack, target: dict, start: float, end: float):
    """(name, points) of one query."""
    query = re.sub(r"\$(extract|proxy|server)\b", ".*", target["expr"].replace("$__rate_interval", "5s"))
    for found in stack.api("query_range", query=query, start=start, end=end, step="1s")["result"]:
        name = re.sub(r"\{\{(\w+)\}\}", lambda m: found["metric"].get(m.group(1), ""), target["legendFormat"])
        yield name, [(float(at), float(value)) for at, value in found["values"]]


def graph(panel: dict, curves, start: float, end: float, width: int, height: int) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    if stacked:
        total: dict[float, float] = {}
        lines = []
        for name, points in curves:
            for at, value in points:
                total[at] = total.get(at, 0) + value
            lines.append((name, [(at, total[at]) for at, _ in points]))
        curves = lines
    values = [value for _, points in curves for _, value in points if math.isfinite(value)]
    low = 0 if unit != "dateTimeAsIso" else min(values, default=0)
    high = max(max(values, default=1), low + 1e-9)
    left, top, foot = 62, 8, 42
    x = lambda at: left + (width - left - 8) * (at - start) / (end - start)
    y = lambda value: top + (height - top - foot) * (1 - (value - low) / (high - low))
    parts = []
    for share in (0, 0.5, 1):
        value = low + share * (high - low)
        parts.append(f'<line x1="{left}" x2="{width - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#2c3235"/>'
                     f'<text x="{left - 5}" y="{y(value) + 3:.1f}" text-anchor="end">{words(value, unit)}</text>')
    for index, (_, points) in enumerate(curves):
        line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points if math.isfinite(value))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.3"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'


def draw(stack: Stack, board: dict, start: float, end: float) -> str:
    parts, bottom = [], 0
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] * CELL + 8, place["y"] * ROW + 40
        width, height = place["w"] * CELL - 8, place["h"] * ROW - 8
        bottom = max(bottom, top + height)
        box = f'left:{left}px;top:{top}px;width:{width}px;height:{height}px;box-sizing:border-box'
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{box}">{title}</div>')
            continue
        curves = [found for target in panel["targets"] for found in series(stack, target, start, end)]
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            last = [(name, points[-1][1]) for name, points in curves if end - points[-1][0] < 2] or [("–", math.nan)]
            name, value = last[0]
            colour = [s["color"] for s in defaults["thresholds"]["steps"] if s["value"] is None or value >= s["value"]]
            shown = name if panel["options"]["textMode"] == "name" else words(value, defaults["unit"])
            parts.append(f'<div class="panel" style="{box};background:{NAMED[(colour or ["text"])[-1]]}"><b>{title}</b>'
                         f'<div class="value">{html.escape(shown)}</div></div>')
        else:
            legend = "  ".join(f'<span style="color:{COLOURS[i % len(COLOURS)]}">━</span> {html.escape(name)}'
                               for i, (name, _) in enumerate(curves))
            parts.append(f'<div class="panel" style="{box}"><b>{title}</b>{graph(panel, curves, start, end, width - 18, height - 24)}'
                         f'<div class="legend">{legend}</div></div>')
    note = (f'<div style="left:10px;top:10px;font-size:15px"><b>{html.escape(board["title"])}</b> &nbsp; <span style="color:#9fa7b3">'
            "drawn by tests/python/draw_dashboard.py from Prometheus' answers to the panels' queries; not a picture of Grafana</span></div>")
    return (f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><body style="width:{24 * CELL + 8}px;height:{bottom + 10}px">'
            f'{note}{"".join(parts)}')


def main(board: Path, picture: Path, page_picture: Path, seconds: float = 100) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tether-", dir="/dev/shm"))
    stack = Stack(folder)
    try:
        stack.start_server()
        stack.start_proxy()
        extraction = stack.start_extraction(20_000)
        stack.start_prometheus()
        start = time.time()
        load = Load(stack.proxy, "")
        load.start(1, 0.1)
        # A server that stands still for a while, as an operator would see it.
        server = next(p for p in stack.processes if p.name == "server").child
        time.sleep(seconds / 2)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(seconds / 10)
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(seconds / 2)
        end = time.time() - 1
        page = folder / "page.html"
        page.write_text(draw(stack, json.loads(board.read_text()), start, end), encoding="utf-8")
        assert extraction.child.poll() is None, "the run ended too early"
        with Browser(folder / "browser") as browser:
            browser.screen(1000, 800, "light")
            browser.open(f"http://{stack.proxy}/tether/")
            time.sleep(5)
            browser.picture(page_picture)
            browser.screen(1208, 900, "dark")
            browser.open(page.as_uri())
            browser.picture(picture)
        load.stop()
    finally:
        stack.end()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
