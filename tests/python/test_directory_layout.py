"""PyTorch reads the folders of `--dump-layout directory`, and they hold what the safetensors file does.

The client is one of the old kind: it talks to the server itself, scans the dump directory for whole folders, and loads
them with torch.load.
"""

import json

import pytest
import torch
from one_server import Server
from places import ROOT
from safetensors import safe_open

MODEL = ROOT / ".tether" / "golden" / "tiny-v3"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folders, files = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("files")
    flags = ["--dtype", "bfloat16", "--dump-layout"]
    with Server(MODEL, folders, *flags, "directory") as old, Server(MODEL, files, *flags, "file") as new:
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
