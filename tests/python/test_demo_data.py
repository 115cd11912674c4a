"""The demo's data: its samples are what its conversations and tokenizer give, and it is the set that was promised."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

DEMO = Path(__file__).parents[2] / "xtask" / "demo"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def conversations() -> list[dict]:
    return rows("conversations.jsonl")


@pytest.fixture(scope="module")
def samples() -> list[dict]:
    return rows("samples.jsonl")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def replies(conversations: list[dict]) -> list[list[dict]]:
    """For each reply of each conversation, the messages up to and including it."""
    return [
        conversation["messages"][: end + 1]
        for conversation in conversations
        for end, message in enumerate(conversation["messages"])
        if message["role"] == "assistant"
    ]


def test_samples_are_current():
    spec = importlib.util.spec_from_file_location("tokenise", DEMO / "tokenise.py")
    tokenise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tokenise)
    current = (DEMO / "samples.jsonl").read_text(encoding="utf-8")
    assert current == tokenise.render(), "run .tether/venv/bin/python xtask/demo/tokenise.py"


def test_samples_equal_the_chat_template(conversations, samples, tokenizer):
    """An independent route: transformers renders the conversation with the template and encodes it whole."""
    prefixes = replies(conversations)
    assert len(prefixes) == len(samples)
    for messages, sample in zip(prefixes, samples):
        whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert sample["input_ids"] == whole, sample["id"]
        asked = tokenizer.apply_chat_template(
            messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert sample["loss_mask"] == [0] * len(asked) + [1] * (len(whole) - len(asked)), sample["id"]


def test_every_text_survives_the_tokenizer(conversations, tokenizer):
    for conversation in conversations:
        for message in conversation["messages"]:
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.decode(ids) == message["content"], conversation["id"]


def test_conversations_are_many_and_varied(conversations):
    assert len(conversations) >= 64
    assert len({c["id"] for c in conversations}) == len(conversations)
    languages = {c["language"] for c in conversations}
    assert languages >= {"en", "de", "fr", "es", "zh", "ja", "ru", "ar", "hi"}
    assert sum("```" in m["content"] for c in conversations for m in c["messages"]) >= 40
    for conversation in conversations:
        roles = [message["role"] for message in conversation["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert len(roles) >= 4 and roles == ["user", "assistant"] * (len(roles) // 2), conversation["id"]
    contents = [m["content"] for m in (m for c in conversations for m in c["messages"]) if len(m["content"]) > 80]
    assert len(set(contents)) == len(contents), "a long message is repeated"


def test_samples_are_several_hundred_of_many_lengths(samples):
    assert len(samples) >= 300
    assert len({sample["id"] for sample in samples}) == len(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert min(lengths) < 40 and max(lengths) > 1024  # beyond the positions that YaRN starts from
    for sample in samples:
        assert len(sample["loss_mask"]) == len(sample["input_ids"])
        assert sample["loss_mask"][0] == 0 and sample["loss_mask"][-1] == 1


def test_the_demo_stays_small():
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) < 5_000_000
