"""One tether-server that dumps every request, for tests that talk to it directly."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from places import binary


class Server:
    """A server of `model` with a dump directory of its own. Used as a context; ends with it."""

    def __init__(self, model: Path, dumps: Path, *flags: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = "http://127.0.0.1:%d" % probe.getsockname()[1]
        self.dumps = dumps
        self.process = subprocess.Popen(
            [binary("tether-server"), "--model", model, "--listen", self.address.removeprefix("http://"),
             "--dump-dir", dumps, "--capture", "all", *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.address + "/health", timeout=5).read()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start: {self.process.communicate()[1]}")

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def generate(self, ids: list[int], **capture) -> Path:
        """The path of the prompt's dump."""
        body = {"input_ids": ids, "capture": capture or True, "sampling_params": {"max_new_tokens": 0}}
        request = urllib.request.Request(self.address + "/generate", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return Path(json.load(reply)["meta_info"]["capture"]["path"])
