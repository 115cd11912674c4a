#!/usr/bin/env python3
"""Tokenises the demo's conversations: one sample for each reply, with everything before it as context.

Writes samples.jsonl beside this file, one `{"id", "input_ids", "loss_mask"}` a line. The mask is 1 on the tokens of
that reply and on the token that ends it, so each reply is learnt from once. Run by maintainers after a change of
conversations.jsonl or of the tokenizer, with the Python of `cargo xtask setup`; tests/python/test_demo_data.py fails
when samples.jsonl is out of date.

    .tether/venv/bin/python xtask/demo/tokenise.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

FOLDER = Path(__file__).parent

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
BEFORE = {"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"}


def samples(conversations: list[dict], tokenizer: Tokenizer) -> Iterator[dict]:
    """The samples of all conversations, in order; IDs are `<conversation>.<number of the reply, from 1>`."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    for conversation in conversations:
        # Special tokens stand between the parts, and no token reaches across one, so parts can be encoded alone.
        context = encode(BOS)
        replies = 0
        for message in conversation["messages"]:
            content = encode(message["content"])
            context += encode(BEFORE[message["role"]])
            if message["role"] != "assistant":
                context += content
                continue
            reply = content + encode(EOS)
            replies += 1
            yield {
                "id": f"{conversation['id']}.{replies}",
                "input_ids": context + reply,
                "loss_mask": [0] * len(context) + [1] * len(reply),
            }
            context += reply


def render() -> str:
    """What samples.jsonl must hold."""
    lines = (FOLDER / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    rows = samples([json.loads(line) for line in lines], tokenizer)
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def main() -> None:
    text = render()
    (FOLDER / "samples.jsonl").write_text(text, encoding="utf-8")
    lengths = [len(json.loads(line)["input_ids"]) for line in text.splitlines()]
    print(f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")


if __name__ == "__main__":
    main()
