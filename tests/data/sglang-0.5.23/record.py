#!/usr/bin/env python3
"""Records what a real SGLang server answers to the requests in cases.json.

usage: record.py http://127.0.0.1:30000        writes recordings.json beside this file

SGLang 0.5.23 was run on a CPU, unmodified, with a random Llama of six layers (hidden size 64, context 2,048) and this
project's demo tokenizer, as made by `make_llama.py`:

    CUDA_VISIBLE_DEVICES= python -m sglang.launch_server --model-path LLAMA --device cpu --attention-backend torch_native \\
        --sampling-backend pytorch --dtype float32 --disable-cuda-graph --enable-return-hidden-states --enable-metrics \\
        --max-total-tokens 20000

Needed beside its own dependencies: a stub module `vllm._custom_ops` with a function `rotary_embedding` (imported, never
called). Texts and numbers in the replies depend on the random model; the tests compare statuses, keys and types.
"""
import http.client
import json
import sys
import urllib.parse
from pathlib import Path

HERE = Path(__file__).parent
# Of these replies only the names of the keys matter, and they are long.
KEYS_ONLY = {"/get_server_info", "/server_info"}


def ask(url: urllib.parse.ParseResult, case: dict) -> dict:
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    body = case.get("raw")
    if body is None and "json" in case:
        body = json.dumps(case["json"])
    headers = case.get("headers", {"content-type": "application/json"} if body is not None else {})
    connection.request(case.get("method", "POST" if body is not None else "GET"), case["path"], body, headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    recorded = {"status": reply.status, "content_type": (reply.getheader("content-type") or "").split(";")[0]}
    if recorded["content_type"] == "text/event-stream":
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        recorded["events"] = [event if event == "[DONE]" else json.loads(event) for event in events]
    elif recorded["content_type"] == "application/json":
        value = json.loads(text)
        recorded["json"] = sorted(value) if case["path"] in KEYS_ONLY else value
    elif case["path"] == "/metrics":
        recorded["families"] = sorted(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    else:
        recorded["text"] = text
    return recorded


def main() -> None:
    url = urllib.parse.urlparse(sys.argv[1])
    recordings = {}
    for case in json.loads((HERE / "cases.json").read_text()):
        recordings[case["name"]] = ask(url, case)
        print(recordings[case["name"]]["status"], case["name"], flush=True)
    (HERE / "recordings.json").write_text(json.dumps(recordings, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
