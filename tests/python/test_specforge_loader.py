"""SpecForge's own loader reads what tether-extract writes.

The test serves dumps of random states out of this process, laid out from dump/FORMAT.md without Tether's code, and has
the built tether-extract make files of them. With TETHER_SPECFORGE_DIR it checks that directory too, the output of any
run; then TETHER_SPECFORGE_DATA may name the data set it was made from. `cargo xtask test` names the demo's.
"""

import json
import os
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import xxhash
from places import binary
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader, list_feature_files
from specforge.training.vocab_mapping import count_effective_feature_tokens

HIDDEN = 32
POINTS = ["R2", "R4", "R5", "N"]
KEYS = {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state", "tether_request_id"}


def hex_hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def long_bytes(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(8, "little") for token in ids)


def uuid_v7() -> str:
    random = int.from_bytes(os.urandom(10), "big")
    value = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | (random >> 68) << 64 | 2 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=value))


def write_dump(path: Path, request_id: str, ids: list[int], states: torch.Tensor) -> None:
    """A dump, byte by byte as dump/FORMAT.md gives it."""
    data = long_bytes(ids) + states.view(torch.uint8).numpy().tobytes()
    about = {
        "tether_format": "1",
        "request_id": request_id,
        "model": "random",
        "config_hash": "0" * 64,
        "num_layers": "8",
        "points": json.dumps(POINTS),
        "final": "post_norm",
        "rows": "prompt",
        "prompt_tokens": str(len(ids)),
        "dtype": "bfloat16",
        "token_hash": hex_hash(long_bytes(ids)),
        "data_hash": hex_hash(data),
        "server": "test_specforge_loader.py",
        "created": "2026-01-01T00:00:00Z",
    }
    end = 8 * len(ids)
    header = {
        "__metadata__": about,
        "token_ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [0, end]},
        "hidden_states": {"dtype": "BF16", "shape": list(states.shape), "data_offsets": [end, len(data)]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Server(ThreadingHTTPServer):
    """Answers /generate with a dump of random states, and remembers them by request."""

    def __init__(self, dumps: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.dumps = dumps
        self.states: dict[str, torch.Tensor] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, body: dict, **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"ready": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/generate" and body["capture"] == {"final": "post_norm", "rows": "prompt"}
        ids, request_id = body["input_ids"], uuid_v7()
        states = torch.randn(len(ids), len(POINTS), HIDDEN).to(torch.bfloat16)
        self.server.states[request_id] = states
        path = self.server.dumps / f"{request_id}.safetensors"
        write_dump(path, request_id, ids, states)
        self.reply({"text": "", "meta_info": {"id": request_id}}, x_hidden_states_path=str(path))


@dataclass
class Extracted:
    """A directory of files, and what is known about how they must be."""

    directory: Path
    rows: list[dict] | None = None
    states: dict[str, torch.Tensor] | None = None


SOURCES = ["random", "given"] if os.environ.get("TETHER_SPECFORGE_DIR") else ["random"]


@pytest.fixture(scope="module", params=SOURCES)
def extracted(request, tmp_path_factory) -> Extracted:
    if request.param == "given":
        data = os.environ.get("TETHER_SPECFORGE_DATA")
        # Only a line feed ends a line of JSON; splitlines() knows other ends.
        rows = [json.loads(line) for line in Path(data).read_text().split("\n") if line.strip()] if data else None
        return Extracted(Path(os.environ["TETHER_SPECFORGE_DIR"]).resolve(), rows)
    folder = tmp_path_factory.mktemp("specforge")
    rows = [{"input_ids": [7 * row + place for place in range(2 + row * row % 23)]} for row in range(40)]
    for row in rows[::2]:
        row["loss_mask"] = [place % 3 and 1 for place in range(len(row["input_ids"]))]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (dumps := folder / "dumps").mkdir()
    server = Server(dumps)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    command = [binary("tether-extract"), "run", "--proxy", address, "--data", data, "--out", folder / "out", "--format", "specforge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    server.shutdown()
    assert done.returncode == 0, done.stderr + done.stdout
    assert not list(dumps.iterdir()), "every dump is deleted once its file is there"
    return Extracted(folder / "out", rows, server.states)


@pytest.fixture(scope="module")
def files(extracted: Extracted) -> list[str]:
    return list_feature_files(str(extracted.directory))


def row_of(path: str) -> int:
    return int(Path(path).stem.removeprefix("data_"))


def test_every_row_has_one_file(extracted, files):
    assert files
    if extracted.rows is not None:
        assert sorted(map(row_of, files)) == list(range(len(extracted.rows)))
    for path in files:
        group = row_of(path) // 2000 * 2000
        assert Path(path).relative_to(extracted.directory).parts[0] == f"rows_{group}-{group + 2000}"


def test_the_manifest_reader_accepts_every_file(extracted, files):
    refs = OfflineManifestReader(str(extracted.directory), validate_files=True).read()
    assert len(refs) == len(files)
    for ref, path in zip(refs, files):
        specs, tokens = ref.feature_specs, ref.num_tokens
        hidden = specs["hidden_state"].shape[-1]
        assert ref.feature_store_uri == f"file://{path}"
        assert (specs["input_ids"].shape, specs["input_ids"].dtype) == ((tokens,), "int64")
        assert (specs["loss_mask"].shape, specs["loss_mask"].dtype) == ((tokens,), "int64")
        assert (specs["hidden_state"].shape, specs["hidden_state"].dtype) == ((1, tokens, hidden), "bfloat16")
        assert specs["aux_hidden_state"].shape == (1, tokens, 3 * hidden)
        assert specs["aux_hidden_state"].dtype == "bfloat16"


def test_files_load_without_trust_and_hold_what_was_dumped(extracted, files):
    for path in files:
        raw = torch.load(path, weights_only=True)
        mapped = torch.load(path, weights_only=False, mmap=True)
        assert set(raw) == KEYS == set(mapped)
        for key in KEYS - {"tether_request_id"}:
            assert torch.equal(raw[key], mapped[key]) and raw[key].isfinite().all(), (path, key)
        assert uuid.UUID(raw["tether_request_id"]).version == 7
        if extracted.rows is not None:
            row = extracted.rows[row_of(path)]
            assert raw["input_ids"].tolist() == row["input_ids"]
            assert raw["loss_mask"].tolist() == row.get("loss_mask", [1] * len(row["input_ids"]))
        if extracted.states is not None:
            states = extracted.states[raw["tether_request_id"]]
            assert torch.equal(raw["hidden_state"][0], states[:, POINTS.index("N")])
            aux = [states[:, POINTS.index(point)] for point in ("R2", "R4", "R5")]
            assert torch.equal(raw["aux_hidden_state"][0], torch.cat(aux, dim=-1))


def test_no_two_files_are_of_one_request(files):
    ids = [torch.load(path, weights_only=True)["tether_request_id"] for path in files]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_trainers_loader_yields_the_files_tensors(extracted, files, batch_size):
    max_len = 1 << 20
    refs = list(build_offline_reader(str(extracted.directory), run_id="test", ttt_length=7, max_len=max_len))
    refs = refs[: len(refs) // batch_size * batch_size]
    assert refs
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        batch_size=batch_size,
        collate_fn=build_offline_collator(),
        per_sample_transform=build_offline_normalizer(max_len),
        strategy="eagle3",
    )
    seen = 0
    for batch in loader:
        tensors = batch.tensors
        for at in range(batch_size):
            raw = torch.load(files[seen], weights_only=True)
            tokens = raw["input_ids"].numel()
            mask = raw["loss_mask"].clone()
            mask[-1] = 0
            assert torch.equal(tensors["input_ids"][at, :tokens], raw["input_ids"])
            assert torch.equal(tensors["loss_mask"][at, :tokens], mask)
            assert tensors["attention_mask"][at].sum() == tokens
            assert torch.equal(tensors["target"][at, :tokens], raw["hidden_state"][0])
            assert torch.equal(tensors["hidden_state"][at, :tokens], raw["aux_hidden_state"][0])
            seen += 1
    assert seen == len(refs)


def test_the_supervised_tokens_are_those_of_the_masks(extracted, files):
    expected = {}
    for path in files:
        raw = torch.load(path, weights_only=True)
        for token, bit in zip(raw["input_ids"].tolist(), raw["loss_mask"].tolist()):
            if bit:
                expected[token] = expected.get(token, 0) + 1
    counted = count_effective_feature_tokens(str(extracted.directory))
    # SpecForge leaves out tokens that its own shift can never supervise; none may be counted that the masks do not have.
    assert counted and all(count <= expected[token] for token, count in counted.items())
