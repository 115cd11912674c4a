"""PyTorch reads the folders of `--dump-layout directory`, and they hold what the safetensors file does.

The client is one of the old kind: it talks to the server itself, scans the dump directory for whole folders, and loads
them with torch.load.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "target" / "release" / "tether-server"
MODEL = ROOT / ".tether" / "golden" / "tiny-v3"


class Server:
    """A server of its own dump directory, that dumps every request."""

    def __init__(self, dumps: Path, layout: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = "http://127.0.0.1:%d" % probe.getsockname()[1]
        self.dumps = dumps
        self.process = subprocess.Popen(
            [SERVER, "--model", MODEL, "--listen", self.address.removeprefix("http://"), "--dump-dir", dumps,
             "--dump-layout", layout, "--capture", "all", "--dtype", "bfloat16"],
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
        body = {"input_ids": ids, "capture": capture or True, "sampling_params": {"max_new_tokens": 0}}
        request = urllib.request.Request(self.address + "/generate", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return Path(json.load(reply)["meta_info"]["capture"]["path"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folders, files = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("files")
    with Server(folders, "directory") as old, Server(files, "file") as new:
        yield old, new


@pytest.mark.parametrize("final", ["pre_norm", "post_norm", "both", "none"])
def test_torch_loads_each_plane_as_the_safetensors_file_has_it(servers, final):
    old, new = servers
    ids = [7, 3, 300, 12, 511, 3, 0, 44]
    folder, file = old.generate(ids, final=final), new.generate(ids, final=final)
    # What a client of the old kind looks for.
    assert folder in {path.parent for path in old.dumps.glob("req_*/done")}
    meta = json.loads((folder / "meta.json").read_text())
    assert folder.name == "req_" + meta["request_id"]
    assert (meta["num_tokens"], meta["token_ids"], meta["final"]) == (len(ids), ids, final)
    with safe_open(file, "pt") as dump:
        states, about = dump.get_tensor("hidden_states"), dump.metadata()
    assert meta["points"] == json.loads(about["points"])
    assert meta["token_hash"] == about["token_hash"]
    count = len(meta["points"])
    names = [f"aux_{plane}.pt" for plane in range(count)]
    if final != "none":
        names[-1] = "final.pt"
    assert {path.name for path in folder.iterdir()} == {*names, "meta.json", "done"}
    for plane, name in enumerate(names):
        for mmap in (False, True):
            tensor = torch.load(folder / name, weights_only=True, mmap=mmap)
            assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (len(ids), states.shape[2]))
            assert torch.equal(tensor, states[:, plane]), (name, mmap)
