"""The wheels of libtorch come through a bad connection: set-up's script goes on where an earlier try broke off."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from places import ROOT

SCRIPT = ROOT / "xtask" / "fetch_wheels.py"
NAME = "tether_test_wheel-1.0-py3-none-any.whl"
SIZE = 6_000_000


def a_wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("tether_test_wheel/data", os.urandom(SIZE))
        wheel.writestr("tether_test_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tether-test-wheel\nVersion: 1.0\n")
    return file.getvalue()


class Index(ThreadingHTTPServer):
    """A package index with one wheel. `cuts` are the numbers of bytes after which it closes a connection, one for each."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = a_wheel()
        self.hash = hashlib.sha256(self.wheel).hexdigest()
        self.cuts: list[int] = []
        self.ranges = True
        self.stall = False
        self.asked: list[str | None] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        index = self.server
        if self.path.startswith("/simple/"):
            page = f'<!DOCTYPE html><html><body><a href="/files/{NAME}#sha256={index.hash}">{NAME}</a></body></html>'.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        asked = self.headers["range"]
        index.asked.append(asked)
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and index.ranges else 0
        if first >= len(index.wheel):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("content-range", f"bytes {first}-{len(index.wheel) - 1}/{len(index.wheel)}")
        body = index.wheel[first:]
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: index.cuts.pop(0)] if index.cuts else body)
        self.wfile.flush()
        while index.stall:
            time.sleep(0.01)


@pytest.fixture
def index():
    server = Index()
    yield server
    server.stall = False
    server.shutdown()


def command(index: Index, folder: Path) -> tuple[list, dict]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1",
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}/simple"}
    return [sys.executable, SCRIPT, folder, "tether-test-wheel==1.0"], env


def fetch(index: Index, folder: Path) -> subprocess.CompletedProcess:
    args, env = command(index, folder)
    return subprocess.run(args, env=env, capture_output=True, text=True, timeout=120)


def assert_whole(index: Index, folder: Path, done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / NAME)
    assert (folder / NAME).read_bytes() == index.wheel
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_a_connection_that_breaks_off_costs_no_byte_twice(index, tmp_path):
    index.cuts = [2_000_000, 0, 1_500_000]
    assert_whole(index, tmp_path, fetch(index, tmp_path))
    assert index.asked == [None, "bytes=2000000-", "bytes=2000000-", "bytes=3500000-"]
    # And what is whole is not asked for again.
    assert_whole(index, tmp_path, fetch(index, tmp_path))
    assert len(index.asked) == 4


def test_a_set_up_that_was_killed_goes_on(index, tmp_path):
    index.cuts, index.stall = [3_000_000], True
    args, env = command(index, tmp_path)
    process = subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = tmp_path / (NAME + ".part")
    end = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    index.stall = False
    there = part.stat().st_size
    assert_whole(index, tmp_path, fetch(index, tmp_path))
    assert index.asked == [None, f"bytes={there}-"]


def test_what_is_not_the_wheel_is_fetched_anew(index, tmp_path):
    (tmp_path / (NAME + ".part")).write_bytes(b"of another file" * 10)
    done = fetch(index, tmp_path)
    assert "is not what the index states; fetching anew" in done.stderr
    assert_whole(index, tmp_path, done)
    assert index.asked == ["bytes=150-", None]


def test_an_index_that_cannot_go_on_is_asked_for_the_whole(index, tmp_path):
    index.cuts, index.ranges = [1_000_000], False
    assert_whole(index, tmp_path, fetch(index, tmp_path))
    assert index.asked == [None, "bytes=1000000-"]


def test_a_wheel_that_is_never_what_the_index_states_is_refused(index, tmp_path):
    index.hash = "0" * 64
    done = fetch(index, tmp_path)
    assert done.returncode == 1 and "its sha256 is not what the index states, twice" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_is_not_there_is_named(index, tmp_path):
    args, env = command(index, tmp_path)
    done = subprocess.run([*args[:-1], "tether-test-wheel==2.0"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "pip finds no wheel of tether-test-wheel==2.0" in done.stderr
