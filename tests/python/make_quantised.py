#!/usr/bin/env python3
"""Writes tiny checkpoints in the forms that large ones are published in, and what the references make of them:
`.tether/golden/quantised/<name>/`.

usage: make_quantised.py [OUT_DIR]        (default: .tether/golden beside this checkout's Cargo.toml)

Each begins as a float model, like those of make_models.py. Its matrices are packed here, in plain numpy and after the
formats' descriptions, and unpacked again: the references see the unpacked matrices, which also lie in
`unpacked.safetensors`, float32, under the names of the packed modules. `golden.safetensors` is as make_models.py describes it.

    fp8-v3            every matrix but head and gates in fp8, blocks of 128x128, a layer for multi-token prediction, shards
    int4-kimi-k2.5    the wrapper's config, its prefixes and vision tensors; experts in int4
    nvfp4-modelopt    ModelOpt's names, attention left plain by a wildcard
    nvfp4-kimi-k2.5   the wrapper's config, the shorter prefix; experts in NVFP4 by compressed-tensors
    fused-v3, fused-v2   plain, as transformers 5 writes them if told to keep its own form: experts in two tensors a layer
"""
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
import make_grid as grid  # noqa: E402
import make_models as models  # noqa: E402
import make_texts  # noqa: E402

SEED = 307
LENGTHS = [1, 2, 17, 64]
# Neither is a multiple of 128, so that the last blocks are partial in both directions; both are multiples of 32.
BASE = dict(grid.V3, hidden_size=160, intermediate_size=288, moe_intermediate_size=160, kv_lora_rank=64, q_lora_rank=96,
            v_head_dim=16, max_position_embeddings=128,
            rope_scaling=dict(grid.YARN, mscale=1.0, mscale_all_dim=1.0))
# The vocabulary has room for the tokenizer that is put beside it.
KIMI = dict(BASE, vocab_size=1024, n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_theta=50000.0, model_type="kimi_k2")


def e4m3_values():
    """The numbers of the 256 codes: a sign, four bits of exponent biased by 7, three of mantissa."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3 = e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nearest(values, numbers):
    """Index of the nearest of ascending `numbers`."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    return np.searchsorted(middles, values)


def to_e4m3(x):
    magnitudes = E4M3[:127]
    return (nearest(np.minimum(np.abs(x), 448), magnitudes) + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def as_fp8(codes):
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def pack_fp8(w, block=128):
    """Tensors by the last part of their name, and the matrix they stand for."""
    rows, columns = w.shape
    scale = np.empty((-(-rows // block), -(-columns // block)), np.float32)
    codes, unpacked = np.empty(w.shape, np.uint8), np.empty(w.shape, np.float32)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            part = np.s_[r * block:(r + 1) * block, c * block:(c + 1) * block]
            scale[r, c] = np.abs(w[part]).max() / 448
            codes[part] = to_e4m3(w[part] / scale[r, c])
            unpacked[part] = E4M3[codes[part]] * scale[r, c]
    return {"weight": as_fp8(codes), "weight_scale_inv": torch.from_numpy(scale)}, unpacked


def pack_int4(w, group=32):
    rows, columns = w.shape
    grouped = w.reshape(rows, columns // group, group)
    scale = torch.from_numpy(np.abs(grouped).max(-1) / 7.5).to(torch.bfloat16)
    exact = scale.float().numpy()[..., None]
    q = np.clip(np.rint(grouped / exact), -8, 7).astype(np.int32)
    words = np.zeros((rows, columns // 8), np.uint32)
    for place in range(8):
        words |= (q.reshape(rows, -1)[:, place::8] + 8).astype(np.uint32) << np.uint32(4 * place)
    tensors = {"weight_packed": torch.from_numpy(words.view(np.int32)), "weight_scale": scale,
               "weight_shape": torch.tensor([rows, columns], dtype=torch.int32)}
    return tensors, (q.astype(np.float32) * exact).reshape(rows, columns)


def pack_nvfp4(w, of_matrix):
    """`of_matrix` names the matrix's number and says whether factors are divided by it."""
    name, divided = of_matrix
    rows, columns = w.shape
    grouped = np.float32(w).reshape(rows, columns // 16, 16)
    largest = np.abs(grouped).max(-1)
    number = np.float32(448 * 6 / largest.max()) if divided else np.float32(largest.max() / (448 * 6))
    scaled = largest / 6 * number if divided else largest / 6 / number
    scale = to_e4m3(scaled)
    exact = (E4M3[scale] / number if divided else E4M3[scale] * number).astype(np.float32)[..., None]
    relative = np.where(exact > 0, grouped / np.where(exact > 0, exact, 1), 0)
    codes = (nearest(np.minimum(np.abs(relative), 6), E2M1) + np.where(np.signbit(relative), 8, 0)).astype(np.uint8)
    unpacked = (np.where(codes < 8, E2M1[codes % 8], -E2M1[codes % 8]) * exact).reshape(rows, columns)
    flat = codes.reshape(rows, columns)
    tensors = {"weight_packed" if divided else "weight": torch.from_numpy(flat[:, 0::2] | flat[:, 1::2] << 4),
               "weight_scale": as_fp8(scale), name: torch.tensor([number]) if divided else torch.tensor(number)}
    return tensors, unpacked.astype(np.float32)


def modelopt(w):
    tensors, unpacked = pack_nvfp4(w, ("weight_scale_2", False))
    # A factor for activations, which a reader of weights leaves alone.
    return dict(tensors, input_scale=torch.tensor(0.01)), unpacked


def compressed_tensors(w):
    tensors, unpacked = pack_nvfp4(w, ("weight_global_scale", True))
    return dict(tensors, input_global_scale=torch.tensor([100.0])), unpacked


def in_group(**weights):
    """compressed-tensors' way of saying how weights are stored."""
    spec = dict(dict(actorder=None, block_structure=None, dynamic=False, observer="minmax", observer_kwargs={}, num_bits=4,
                     symmetric=True), **weights)
    return {"group_0": dict(input_activations=None, output_activations=None, targets=["Linear"], weights=spec)}


PLAIN_BUT_EXPERTS = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                     "re:vision_tower.*", "re:mm_projector.*"]
EXPERTS = r".*\.experts\.\d+\.\w+_proj\.weight$"
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
INT4 = dict(quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
            ignore=PLAIN_BUT_EXPERTS, global_compression_ratio=None,
            config_groups=in_group(type="int", strategy="group", group_size=32))
NVFP4 = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", quantization_status="compressed",
             ignore=PLAIN_BUT_EXPERTS, config_groups=in_group(type="float", strategy="tensor_group", group_size=16))
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", kv_cache_scheme=None, producer=dict(name="modelopt", version="0.29.0"),
                ignore=["lm_head", "model.layers.*.self_attn*"], config_groups=in_group(type="float", group_size=16))


def vision(rng):
    """What a text model has no use for."""
    part = lambda *shape: torch.from_numpy(rng.normal(size=shape)).to(torch.bfloat16)
    return {"vision_tower.patch_embed.proj.weight": part(32, 3, 4, 4), "vision_tower.encoder.blocks.0.wqkv.weight": part(96, 32),
            "vision_tower.encoder.final_layernorm.weight": part(32), "mm_projector.pre_norm.weight": part(32), "mm_projector.proj.0.weight": part(64, 128),
            "mm_projector.proj.0.bias": part(64)}


def wrapped(config, quantisation):
    """Kimi-K2.5's config, whose text model is one of this family."""
    text = dict(config, torch_dtype="bfloat16", quantization_config=quantisation, architectures=["DeepseekV3ForCausalLM"],
                num_beams=1, temperature=1.0, top_k=50, top_p=1.0, diversity_penalty=0.0, length_penalty=1.0, pruned_heads={})
    return dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text,
                quantization_config=quantisation, video_placeholder="<|kimi_k25_video_placeholder|>",
                vision_config=dict(hidden_size=32, num_hidden_layers=1, patch_size=4), media_placeholder_token_id=7,
                ignore_index=-100, use_unified_vision_chunk=True, tie_word_embeddings=False, dtype="bfloat16",
                bos_token_id=0, eos_token_id=1, pad_token_id=2, auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"})


# name: config of the text model, which matrices are packed, by what, the config written, prefixes of body and head, shards
PACKED = {
    "fp8-v3": (dict(BASE, num_nextn_predict_layers=1), r".*_proj(_with_mqa)?\.weight$", pack_fp8,
               lambda c: dict(c, torch_dtype="bfloat16", quantization_config=FP8), ("model.", "lm_head."), 3),
    "int4-kimi-k2.5": (KIMI, EXPERTS, pack_int4, lambda c: wrapped(c, INT4),
                       ("language_model.model.", "language_model.lm_head."), 2),
    "nvfp4-modelopt": (BASE, r".*\.mlp\..*_proj\.weight$", modelopt,
                       lambda c: dict(c, torch_dtype="bfloat16", quantization_config=MODELOPT), ("model.", "lm_head."), 1),
    "nvfp4-kimi-k2.5": (KIMI, EXPERTS, compressed_tensors, lambda c: wrapped(c, NVFP4), ("language_model.", "lm_head."), 1),
}


def build(root, name, seed):
    config, pattern, pack, write_config, (body, head), shards = PACKED[name]
    out = root / name
    models.fresh(out)
    tensors, unpacked, plain = {}, {}, {}
    for key, w in models.weights(config, seed, False).items():
        stored_name = head + key.removeprefix("lm_head.") if key.startswith("lm_head.") else body + key.removeprefix("model.")
        if re.match(pattern, key):
            packed, matrix = pack(w)
            module = stored_name.removesuffix("weight")
            tensors.update({module + part: t.contiguous() for part, t in packed.items()})
            unpacked[module.removesuffix(".")] = plain[key] = torch.from_numpy(matrix)
        else:
            fp32 = key.endswith("e_score_correction_bias")
            tensors[stored_name] = torch.from_numpy(w).to(torch.float32 if fp32 else torch.bfloat16)
            plain[key] = tensors[stored_name].float()
    written = write_config(config)
    if "text_config" in written:
        tensors.update(vision(np.random.default_rng(seed)))
    (out / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    models.save_shards(out, tensors, shards)
    save_file(unpacked, out / "unpacked.safetensors")
    if name == "int4-kimi-k2.5":
        make_texts.kimi_texts(out, make_texts.kimi_files(out), seed, 60)
    # The references see plain float32, of the family's own class.
    config = dict(config, model_type="deepseek_v3")
    with tempfile.TemporaryDirectory() as elsewhere:
        elsewhere = Path(elsewhere)
        save_file(plain, elsewhere / "model.safetensors", metadata={"format": "pt"})
        (elsewhere / "config.json").write_text(json.dumps(dict(config, torch_dtype="float32")))
        stored = {key: t.double().numpy() for key, t in plain.items()}
        models.write_golden(out, name, config, stored, models.prompts_for(config, seed + 1, LENGTHS), elsewhere)


def build_fused(root, name, config, seed):
    """As transformers 5 writes it, config included."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
    cls = dict(deepseek_v2=DeepseekV2ForCausalLM, deepseek_v3=DeepseekV3ForCausalLM)[config["model_type"]]
    out = root / name
    models.fresh(out)
    with tempfile.TemporaryDirectory() as elsewhere:
        elsewhere = Path(elsewhere)
        models.save(elsewhere, config, models.weights(config, seed, False), torch.float32, 1)
        cls.from_pretrained(elsewhere, dtype=torch.float32).save_pretrained(out, save_original_format=False)
        models.write_golden(out, name, config, models.stored_in(elsewhere), models.prompts_for(config, seed + 1, LENGTHS), elsewhere)


def build_all(root):
    out = root / "quantised"
    models.fresh(out)
    torch.set_num_threads(1)
    assert np.array_equal(as_fp8(np.arange(256, dtype=np.uint8)).float().numpy(), E4M3, equal_nan=True)
    for index, name in enumerate(PACKED):
        build(out, name, SEED + index)
    build_fused(out, "fused-v3", BASE, SEED + 10)
    build_fused(out, "fused-v2", dict(grid.V2, **grid.GROUPS), SEED + 11)
    # Written last: without it the folder is not whole.
    (out / "complete").write_text("made by tests/python/make_quantised.py\n")


if __name__ == "__main__":
    default = Path(__file__).resolve().parents[2] / ".tether" / "golden"
    build_all(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
