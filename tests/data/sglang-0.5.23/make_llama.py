#!/usr/bin/env python3
"""Makes the model that SGLang was recorded with.   usage: make_llama.py OUT_DIR   (run from the checkout's root)"""
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

tokenizer = Path("xtask/demo")
vocab = json.loads((tokenizer / "tokenizer.json").read_text())
ids = [*vocab["model"]["vocab"].values(), *(token["id"] for token in vocab["added_tokens"])]
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
                     num_key_value_heads=4, vocab_size=max(ids) + 1, max_position_embeddings=2048,
                     bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tokenizer / name, sys.argv[1])
