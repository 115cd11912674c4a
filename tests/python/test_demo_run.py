"""What the demo extracted is what transformers makes of the demo's model and samples.

`cargo xtask test` runs the demo first and names its folder in TETHER_DEMO_DIR. The demo's own files are the server's bfloat16
run, rounded; a server in float32 over the same checkpoint shows that they are of the right model and layers.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from make_models import transformers_run
from one_server import Server
from places import ROOT
from safetensors import safe_open

DEMO = os.environ.get("TETHER_DEMO_DIR")
pytestmark = pytest.mark.skipif(not DEMO, reason="TETHER_DEMO_DIR does not name a demo's folder")

# The shortest, three of the usual length, and the longest, which goes beyond the positions that YaRN starts from. By the
# float64 reference no gate in them chooses by less than 6e-6, so float32's rounding flips no expert.
ROWS = [9, 49, 56, 105, 280]
# The layers that SpecForge's EAGLE-3 wants of ten: inputs of layers 2, n / 2 and n - 3, and the final norm.
POINTS = ["R2", "R5", "R7", "N"]
PLANES = [2, 5, 7, 11]  # of R[0] … R[10], N


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    lines = (ROOT / "xtask" / "demo" / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    return [np.array(json.loads(lines[row])["input_ids"]) for row in ROWS]


@pytest.fixture(scope="module")
def reference(prompts):
    """transformers' states of the rows by dtype, `[tokens, planes, hidden]`, all rows packed."""
    model = Path(DEMO) / "model"
    config = json.loads((model / "config.json").read_text())
    return {dtype: transformers_run(model, config, dtype, prompts, None)[0][:, PLANES]
            for dtype in (torch.float32, torch.bfloat16)}


def test_a_float32_server_gives_transformers_states_of_the_demos_samples(prompts, reference, tmp_path):
    dumped = []
    with Server(Path(DEMO) / "model", tmp_path, "--dtype", "float32") as server:
        for prompt in prompts:
            with safe_open(server.generate(prompt.tolist(), final="post_norm"), "pt") as dump:
                assert json.loads(dump.metadata()["points"]) == POINTS
                assert dump.get_tensor("token_ids").tolist() == prompt.tolist()
                dumped.append(dump.get_tensor("hidden_states"))
    ours, theirs = torch.cat(dumped).double(), reference[torch.float32].double()
    assert ours.shape == theirs.shape
    for plane, point in enumerate(POINTS):
        found, wanted = ours[:, plane], theirs[:, plane]
        # The bounds of docs/numerics.md: another order of summation, no more.
        assert (found - wanted).norm() <= 1e-4 * wanted.norm(), point
        assert ((found - wanted).abs() <= 1e-3 * wanted.abs().amax(-1, keepdim=True)).all(), point


def test_the_demos_files_are_as_near_as_bfloat16_is(prompts, reference):
    states = []
    for row, prompt in zip(ROWS, prompts):
        file = torch.load(Path(DEMO) / "out" / "rows_0-2000" / f"data_{row}.ckpt", weights_only=True)
        assert file["input_ids"].tolist() == prompt.tolist()
        aux = file["aux_hidden_state"][0].unflatten(-1, (3, -1))
        states.append(torch.cat([aux, file["hidden_state"][0][:, None]], 1).float())
    exact = reference[torch.float32]

    def error(found: torch.Tensor) -> torch.Tensor:
        """By plane, of the token in the middle: near-ties of the random gates flip experts of a few tokens in either run."""
        return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median(0).values

    ours, theirs = error(torch.cat(states)), error(reference[torch.bfloat16])
    assert (ours <= 1.25 * theirs + 2e-3).all(), (ours, theirs)
