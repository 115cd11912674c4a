#!/usr/bin/env python3
"""Writes a grid of tiny checkpoints, one for each way in which configs of the family differ, and what the references make
of them: `.tether/golden/grid/<name>/`, in the format of make_models.py, and `grid.json` with their names.

usage: make_grid.py [OUT_DIR]        (default: .tether/golden beside this checkout's Cargo.toml)

Each model differs in a few settings from one of two plain ones. transformers is a reference wherever its classes
implement the setting; the float64 reference knows them all. Prompts are longer than the context YaRN stretches.
"""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import make_models as models  # noqa: E402

SEED = 211
LENGTHS = [1, 3, 12, 45]
SMALL = dict(
    hidden_size=64, intermediate_size=80, kv_lora_rank=24, moe_intermediate_size=24, n_routed_experts=8,
    num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, num_hidden_layers=4, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=12, vocab_size=96, max_position_embeddings=64,
)
YARN = dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=16)
V2 = dict(models.V2, **SMALL, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0,
          rope_scaling=None)
V3 = dict(models.V3, **SMALL, rope_scaling=None)
V3.update(q_lora_rank=40, n_group=4, topk_group=2, first_k_dense_replace=1, num_nextn_predict_layers=0)
GROUPS = dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)


def yarn(**more):
    return dict(rope_scaling=dict(YARN, **more))


def one_large(rng, experts):
    bias = 0.1 * rng.normal(size=experts)
    bias[3] = 5
    return bias


def negative(rng, experts):
    return -2 + 0.1 * rng.normal(size=experts)


OURS = "float64 only"  # transformers' classes do not implement it, or otherwise than the authors
# name: what differs; the base is in the name. Dtypes take turns.
GRID = {
    # softmax: greedy and in groups, normalised or not, scaled or not
    "softmax-v2-greedy": {},
    "softmax-v2-greedy-scaled": dict(routed_scaling_factor=16.0),
    "softmax-v2-greedy-normalised": dict(norm_topk_prob=True, by=OURS),
    "softmax-v2-greedy-normalised-scaled": dict(norm_topk_prob=True, routed_scaling_factor=16.0, by=OURS),
    "softmax-v2-groups": dict(GROUPS),
    "softmax-v2-groups-scaled": dict(GROUPS, routed_scaling_factor=16.0),
    "softmax-v2-groups-normalised-scaled": dict(GROUPS, norm_topk_prob=True, routed_scaling_factor=16.0, by=OURS),
    "softmax-v2-one-of-two-groups": dict(GROUPS, n_group=2, topk_group=1, routed_scaling_factor=4.0),
    # sigmoid: with and without groups, three biases, normalised or not, scaled or not
    "sigmoid-v3-groups": {},
    "sigmoid-v3-one-group": dict(n_group=1, topk_group=1, routed_scaling_factor=2.827),
    "sigmoid-v3-unnormalised": dict(norm_topk_prob=False),
    "sigmoid-v3-unnormalised-unscaled": dict(norm_topk_prob=False, routed_scaling_factor=1.0),
    "sigmoid-v3-unscaled": dict(routed_scaling_factor=1.0),
    "sigmoid-v3-large-bias": dict(bias=one_large),
    "sigmoid-v3-large-bias-one-group": dict(n_group=1, topk_group=1, bias=one_large),
    "sigmoid-v3-negative-bias": dict(n_group=2, topk_group=1, bias=negative),
    # YaRN: both magnitudes, equal or not, one, none, one given outright, other ramps and bases
    "yarn-v2-both-equal": yarn(mscale=0.707, mscale_all_dim=0.707),
    "yarn-v2-both-different": yarn(mscale=0.5, mscale_all_dim=1.0),
    "yarn-v2-neither": yarn(),
    "yarn-v2-only-mscale": dict(yarn(mscale=0.5), by=OURS),
    "yarn-v2-only-all-dim": dict(yarn(mscale_all_dim=0.707), by=OURS),
    "yarn-v2-attention-factor": dict(yarn(attention_factor=1.25, mscale_all_dim=1.0), by=OURS),
    "yarn-v3-both-one": yarn(factor=40, mscale=1.0, mscale_all_dim=1.0),
    "yarn-v3-kimi": dict(yarn(factor=64, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0), rope_theta=50000.0, n_group=1,
                         topk_group=1, routed_scaling_factor=2.827),
    "yarn-v3-neither": yarn(factor=8),
    "yarn-v3-large-base": dict(rope_theta=5e6),
    # shapes: queries, shared experts, dense layers, heads, biases, epsilon
    "shape-v2-low-rank-queries": dict(q_lora_rank=40),
    "shape-v3-direct-queries": dict(q_lora_rank=None),
    "shape-v2-nothing-shared-nothing-dense": dict(n_shared_experts=None, first_k_dense_replace=0, by=OURS),
    "shape-v3-nothing-shared": dict(n_shared_experts=0, by=OURS),
    "shape-v3-two-shared-nothing-dense": dict(n_shared_experts=2, first_k_dense_replace=0),
    "shape-v3-three-dense-tied": dict(first_k_dense_replace=3, tie_word_embeddings=True),
    "shape-v2-tied": dict(tie_word_embeddings=True),
    "shape-v3-all-dense": dict(first_k_dense_replace=4),
    "shape-v2-every-other-layer": dict(moe_layer_freq=2, by=OURS),
    "shape-v3-biases-and-epsilon": dict(attention_bias=True, rms_norm_eps=1e-5),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def build_all(root):
    out = root / "grid"
    models.fresh(out)
    torch.set_num_threads(1)  # products this small gain nothing from more
    listed = {}
    for index, (name, differs) in enumerate(GRID.items()):
        config = dict(V2 if "-v2-" in name else V3, **differs)
        bias_of = config.pop("bias", models.small_bias)
        by_transformers = config.pop("by", None) is None
        here = out / name
        models.fresh(here)
        tensors = models.weights(config, SEED + index, False, bias_of=bias_of)
        models.save(here, config, tensors, DTYPES[index % 3], 1 + index % 2)
        prompts = models.prompts_for(config, SEED + 1000 + index, LENGTHS)
        plain = here if by_transformers else None
        models.write_golden(here, name, config, models.stored_in(here), prompts, plain)
        listed[name] = dict(transformers=by_transformers)
    # Written last: without it the grid is not whole.
    (out / "grid.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[2] / ".tether" / "golden"
    build_all(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
