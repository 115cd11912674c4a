"""Writes v1.safetensors with the safetensors and xxhash packages, from FORMAT.md alone: a check of this crate's reader by
code that is not ours. Run once, when the format was fixed; kept to show how the file came about.

usage: python make_v1.py v1.safetensors    (needs torch, safetensors, xxhash)"""
import json, sys
import numpy as np, torch, xxhash

ids = np.array([3, 10, 17], dtype="<i8")
states = (torch.arange(24, dtype=torch.float32) - 8).bfloat16().reshape(3, 2, 4)
data = ids.tobytes() + states.view(torch.int16).numpy().tobytes()
header = {
    "__metadata__": {
        "tether_format": "1", "request_id": "019adb10-0000-7000-8000-000000000001",
        "call_id": "019adb10-0000-7000-8000-000000000001", "client_rid": "sample-1", "model": "tiny-v3",
        "config_hash": "00" * 32, "num_layers": "8", "points": json.dumps(["R2", "N"]), "final": "post_norm",
        "rows": "prompt", "prompt_tokens": "3", "dtype": "bfloat16",
        "token_hash": xxhash.xxh3_128_hexdigest(ids.tobytes()), "data_hash": xxhash.xxh3_128_hexdigest(data),
        "server": "make_v1.py", "created": "2026-12-01T00:00:00Z",
    },
    "token_ids": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]},
    "hidden_states": {"dtype": "BF16", "shape": [3, 2, 4], "data_offsets": [24, 72]},
}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
open(sys.argv[1], "wb").write(len(text).to_bytes(8, "little") + text + data)
