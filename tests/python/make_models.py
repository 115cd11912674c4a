#!/usr/bin/env python3
"""Writes tiny seeded DeepSeek-V2/V3 checkpoints and what the references make of them.

usage: make_models.py [OUT_DIR]        (default: .tether/golden beside this checkout's Cargo.toml)

Each model gets a folder: config.json in the published style, safetensors with one tensor per expert (single or sharded,
bfloat16 or float32), and golden.safetensors:

    token_ids        int64 [tokens]          sixteen prompts, packed
    lengths          int64 [prompts]
    planes_f64       f64 [tokens, n + 2, hidden]   R[0] … R[n], N by the float64 reference (exactness_reference.py)
    logits_f64       f64 [tokens, vocab]
    planes_f32/_bf16, logits_f32/_bf16       transformers' float32 and bfloat16 runs, as f32
    experts          int64 [layers with experts, tokens, top_k]   by the float64 reference

Its metadata holds `margin`, the smallest by which a chosen expert or group beat the next one, over all tokens and layers.
Near-ties flip under bfloat16's rounding and then everything after differs, so the models' gates read a part of the
residual stream that says which of sixteen classes a token belongs to and that no layer writes much to: every class has
its own clear order of experts in every layer. `tiny-v3-ties` has ordinary random gates instead; its bfloat16 run takes
the experts of the float64 reference.
"""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import exactness_reference as reference  # noqa: E402

SEED = 101
CLASSES = 16
LENGTHS = [1, 2, 3, 7, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 150, 200]
YARN = dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=64)
COMMON = dict(
    attention_bias=False, attention_dropout=0.0, bos_token_id=0, eos_token_id=1, hidden_act="silu", hidden_size=128,
    intermediate_size=192, kv_lora_rank=32, max_position_embeddings=256, moe_intermediate_size=48, moe_layer_freq=1,
    n_routed_experts=16, num_attention_heads=4, num_experts_per_tok=4, num_hidden_layers=8, num_key_value_heads=4,
    qk_nope_head_dim=16, qk_rope_head_dim=8, rms_norm_eps=1e-6, rope_theta=10000, tie_word_embeddings=False,
    use_cache=True, v_head_dim=16, vocab_size=512,
)
V2 = dict(COMMON, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", scoring_func="softmax",
          n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=False)
V3 = dict(COMMON, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", scoring_func="sigmoid",
          topk_method="noaux_tc", n_shared_experts=1, first_k_dense_replace=2, norm_topk_prob=True, q_lora_rank=48,
          routed_scaling_factor=2.5, n_group=4, topk_group=2, num_nextn_predict_layers=1,
          rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=1.0))

# name: config, dtype stored, shards, whether transformers is a reference, whether gates have near-ties
MODELS = {
    "tiny-v2": (dict(V2, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0,
                     rope_scaling=None), torch.bfloat16, 1, True, False),
    "tiny-v2-group": (dict(V2, q_lora_rank=48, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                           routed_scaling_factor=4.0, rope_scaling=dict(YARN, mscale=0.707, mscale_all_dim=0.707)),
                      torch.float32, 3, True, False),
    "tiny-v3": (V3, torch.bfloat16, 3, True, False),
    "tiny-v3-ties": (V3, torch.bfloat16, 1, True, True),
    # What transformers' classes leave out or do otherwise: only the float64 reference knows it.
    "tiny-v2-author": (dict(V2, q_lora_rank=48, topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=True,
                            routed_scaling_factor=1.5, moe_layer_freq=2, attention_bias=True, tie_word_embeddings=True,
                            rms_norm_eps=1e-5, rope_scaling=dict(YARN, mscale_all_dim=0.707)),
                       torch.bfloat16, 1, False, False),
}


def ladders(rng, config, bias):
    """Logits `[experts, classes]`: for each class a clear order of experts, whatever the norm makes of their size."""
    best = config["num_experts_per_tok"]
    rungs = np.concatenate([np.linspace(1.6, 1.0, best), np.linspace(0.2, -1.2, config["n_routed_experts"] - best)])
    columns = []
    for _ in range(2000 * CLASSES):
        column = rng.permutation(rungs)
        if all(reference.route(size * column, bias, config)[2] > 0.014 for size in np.geomspace(0.6, 1.7, 24)):
            columns.append(column)
        if len(columns) == CLASSES:
            break
    assert len(columns) == CLASSES, f"only {len(columns)} clear orders of experts were found"
    return np.stack(columns, 1)


def small_bias(rng, experts):
    return 0.1 * rng.normal(size=experts)


def weights(config, seed, ties, sizes=None, bias_of=small_bias):
    """A checkpoint's tensors, by their published names, as float64. `sizes` is how large the class's part of the normed
    stream is in each layer; measured on a first draft when not given. `bias_of` draws a gate's correction bias."""
    if sizes is None:
        draft = weights(config, seed, ties, [3.0] * 99, bias_of)
        tokens = np.arange(2, 2 + 4 * CLASSES)
        planes = reference.forward(tokens, draft, config)[0]
        sizes = 4 / np.sqrt((planes**2).mean(-1)).mean(0)
    rng = np.random.default_rng(seed)
    hidden, heads, w = config["hidden_size"], config["num_attention_heads"], {}

    def linear(name, out, inp, size=1.0, bias=False):
        w[f"{name}.weight"] = rng.normal(size=(out, inp)) * size / inp**0.5
        if bias:
            w[f"{name}.bias"] = 0.1 * rng.normal(size=out)

    def writes(name, inp, size, bias=False):
        """A projection back into the residual stream: hardly touches what says a token's class."""
        linear(name, hidden, inp, size, bias)
        for part in (".weight", ".bias"):
            if name + part in w:
                w[name + part][:CLASSES] *= 0.01

    def norm(name, size):
        w[f"{name}.weight"] = np.clip(1 + 0.2 * rng.normal(size=size), 0.6, 1.4)

    def mlp(name, inner, size):
        linear(f"{name}.gate_proj", inner, hidden, 1.5)
        linear(f"{name}.up_proj", inner, hidden, 1.5)
        writes(f"{name}.down_proj", inner, size)

    embed = rng.normal(size=(config["vocab_size"], hidden))
    embed[:, :CLASSES] = 0.02 * embed[:, :CLASSES] + 4 * np.eye(CLASSES)[np.arange(len(embed)) % CLASSES]
    w["model.embed_tokens.weight"] = embed
    # One more layer than the config counts where the model has one for multi-token prediction: it must be skipped.
    for layer in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        name = f"model.layers.{layer}"
        attn = f"{name}.self_attn"
        norm(f"{name}.input_layernorm", hidden)
        norm(f"{name}.post_attention_layernorm", hidden)
        queries, bias = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]), config["attention_bias"]
        # Sharp queries: attention far from uniform, so that its scale and positions show.
        if config["q_lora_rank"] is None:
            linear(f"{attn}.q_proj", queries, hidden, 2.0)
        else:
            linear(f"{attn}.q_a_proj", config["q_lora_rank"], hidden, 1.0, bias)
            norm(f"{attn}.q_a_layernorm", config["q_lora_rank"])
            linear(f"{attn}.q_b_proj", queries, config["q_lora_rank"], 2.0)
        linear(f"{attn}.kv_a_proj_with_mqa", config["kv_lora_rank"] + config["qk_rope_head_dim"], hidden, 1.0, bias)
        norm(f"{attn}.kv_a_layernorm", config["kv_lora_rank"])
        linear(f"{attn}.kv_b_proj", heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), config["kv_lora_rank"])
        writes(f"{attn}.o_proj", heads * config["v_head_dim"], 0.6, bias)
        if not reference.is_moe(layer, config):
            mlp(f"{name}.mlp", config["intermediate_size"], 0.5)
            continue
        experts = config["n_routed_experts"]
        gate_bias = None
        if config["topk_method"] == "noaux_tc":
            gate_bias = np.float64(np.float32(bias_of(rng, experts)))
            w[f"{name}.mlp.gate.e_score_correction_bias"] = gate_bias
        linear(f"{name}.mlp.gate", experts, hidden)
        if not ties:
            w[f"{name}.mlp.gate.weight"] *= 0.008
            w[f"{name}.mlp.gate.weight"][:, :CLASSES] = ladders(rng, config, gate_bias) / (
                sizes[layer] * w[f"{name}.post_attention_layernorm.weight"][:CLASSES])
        for expert in range(experts):
            mlp(f"{name}.mlp.experts.{expert}", config["moe_intermediate_size"], 0.8 / config["routed_scaling_factor"])
        if config["n_shared_experts"]:
            mlp(f"{name}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"], 0.4)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    return w


def save(out, config, w, dtype, shards):
    fp32 = lambda name: name.endswith("e_score_correction_bias")
    tensors = {n: torch.from_numpy(t).to(torch.float32 if fp32(n) else dtype).contiguous() for n, t in w.items()}
    (out / "config.json").write_text(json.dumps(dict(config, torch_dtype=str(dtype).split(".")[1]), indent=2) + "\n")
    save_shards(out, tensors, shards)


def save_shards(out, tensors, shards):
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return
    names, index = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[shard::shards]}
        save_file(part, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))


@torch.no_grad()
def transformers_run(out, config, dtype, prompts, forced):
    """Planes and logits by transformers. With `forced`, tokens go to these experts, by layer."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    classes = dict(deepseek_v2=DeepseekV2ForCausalLM, deepseek_v3=DeepseekV3ForCausalLM)
    model = classes[config["model_type"]].from_pretrained(out, dtype=dtype).eval()
    assert not any(p.isnan().any() for p in model.parameters())
    layers, streams, first = model.model.layers, {}, [0]
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: streams.__setitem__(i, args[0][0].float()))
    layers[-1].register_forward_hook(lambda _, args, y: streams.__setitem__(len(layers), (y[0] if isinstance(y, tuple) else y)[0].float()))
    if forced is not None:
        gates = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
        for gate, experts in zip(gates, forced, strict=True):
            def take(gate, x, experts=torch.from_numpy(experts)):
                logits = torch.nn.functional.linear(x.view(-1, gate.hidden_dim).float(), gate.weight.float())
                index = experts[first[0]: first[0] + len(logits)]
                weight = logits.sigmoid().gather(1, index)
                return logits, weight / (weight.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor, index
            gate.forward = take.__get__(gate)
    planes, logits = [], []
    for prompt in prompts:
        y = model.model(torch.from_numpy(prompt)[None], use_cache=False).last_hidden_state
        planes.append(torch.stack([streams[i] for i in range(len(layers) + 1)] + [y[0].float()], 1))
        logits.append(model.lm_head(y)[0].float())
        first[0] += len(prompt)
    return torch.cat(planes), torch.cat(logits)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def fresh(out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def stored_in(out):
    """A plain checkpoint's tensors, from the files, so that rounding to the stored dtype is part of the model."""
    stored = {}
    for file in sorted(out.glob("model*.safetensors")):
        stored.update({n: t.double().numpy() for n, t in load_file(file).items()})
    return stored


def prompts_for(config, seed, lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, config["vocab_size"], n) for n in lengths]


def build(root, name, seed):
    config, dtype, shards, by_transformers, ties = MODELS[name]
    out = root / name
    fresh(out)
    save(out, config, weights(config, seed, ties), dtype, shards)
    prompts = prompts_for(config, seed + 1, LENGTHS)
    prompts[5][:] = prompts[4][0]  # one token over and over: positions alone tell its rows apart
    write_golden(out, name, config, stored_in(out), prompts, out if by_transformers else None, ties)


def write_golden(out, name, config, stored, prompts, plain, ties=False):
    """What the references make of `prompts`: float64 of the tensors in `stored`, and transformers of the checkpoint in
    `plain`, if it is one."""
    runs = [reference.forward(prompt, stored, config) for prompt in prompts]
    margin = min(run[3] for run in runs)
    experts = [np.concatenate(parts) for parts in zip(*(run[2] for run in runs))]
    golden = dict(
        token_ids=torch.from_numpy(np.concatenate(prompts)), lengths=torch.tensor([len(prompt) for prompt in prompts]),
        planes_f64=torch.from_numpy(np.concatenate([run[0] for run in runs])),
        logits_f64=torch.from_numpy(np.concatenate([run[1] for run in runs])),
        experts=torch.from_numpy(np.stack(experts) if experts else np.zeros((0, 0, 0), np.int64)),
    )
    used = len(golden["experts"].unique())
    print(f"{name}: smallest margin {margin:.2e}, {used} of {config['n_routed_experts']} experts used", end="", flush=True)
    if not ties and margin <= 5e-3:
        raise SystemExit(f"\n{name}: its seed has a near-tie (margin {margin:.1e}); choose another")
    if plain:
        for kind, torch_dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            forced = experts if ties else None
            planes, logits = transformers_run(plain, config, torch_dtype, prompts, forced)
            golden[f"planes_{kind}"], golden[f"logits_{kind}"] = planes, logits
            errors = [relative(planes[:, p], golden["planes_f64"][:, p]) for p in range(planes.shape[1])]
            print(f"; transformers {kind} off by {max(errors):.1e}, logits {relative(logits, golden['logits_f64']):.1e}", end="")
    print()
    save_file({n: t.contiguous() for n, t in golden.items()}, out / "golden.safetensors", metadata={"margin": repr(float(margin))})


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / ".tether" / "golden"
    torch.set_num_threads(2)
    for name in MODELS:
        build(root, name, SEED)
    # Not imported above: they need this module.
    import make_generations
    import make_grid
    import make_quantised
    import make_texts
    make_generations.build_all(root)
    make_texts.build_all(root / "texts")
    make_grid.build_all(root)
    make_quantised.build_all(root)
    # Written last: a run that was cut short is not taken for a whole one.
    (root / "complete").write_text("made by tests/python/make_models.py\n")
