#!/usr/bin/env python3
"""Writes transformers' greedy continuations beside the models of make_models.py.

Each model gets generations.safetensors with the prompts as in golden.safetensors and `tokens` int64 [prompts, 64]: what
follows the first of them, in float32, each alone, with transformers' own cache. An end-of-sequence token does not end a text.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NAMES = ["tiny-v2", "tiny-v2-group", "tiny-v3"]
NEW_TOKENS = 64
# Longer prompts would leave the context.
PROMPTS = 14


@torch.no_grad()
def build(out):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    golden = load_file(out / "golden.safetensors")
    prompts = golden["token_ids"].split(golden["lengths"].tolist())[:PROMPTS]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    rows = [model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False,
                           max_new_tokens=NEW_TOKENS)[0, len(prompt):] for prompt in prompts]
    tokens = torch.stack(rows)
    print(f"{out.name}: {len(rows)} continuations, {len(tokens.unique())} tokens used")
    prompts = dict(token_ids=golden["token_ids"], lengths=golden["lengths"])
    save_file(dict(prompts, tokens=tokens.contiguous()), out / "generations.safetensors", metadata={"margin": "0"})


def build_all(root):
    for name in NAMES:
        build(root / name)


if __name__ == "__main__":
    torch.set_num_threads(2)
    build_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / ".tether" / "golden")
