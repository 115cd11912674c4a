#!/usr/bin/env python3
"""Trains the demo's tokenizer on its conversations: a byte-level BPE laid out as DeepSeek-V3's.

Run by maintainers after a change of conversations.jsonl that alters what there is to learn, with the Python of
`cargo xtask setup`; then run tokenise.py. Writes tokenizer.json and tokenizer_config.json beside this file.

    .tether/venv/bin/python xtask/demo/train_tokenizer.py
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent
VOCABULARY = 4096  # as `vocab_size` in xtask/src/demo/model.rs

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
# In the order of their IDs: 0, 1, 2, ...
SPECIAL = [BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT]

# Numbers in groups of three; runs of Chinese and Japanese; then words, punctuation and space.
SPLITS = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '" + USER + "' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def texts() -> list[str]:
    lines = (FOLDER / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [message["content"] for line in lines for message in json.loads(line)["messages"]]


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    # Plain text gets the BOS token in front, as DeepSeek's tokenizers do.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 4096,
        "pad_token": SPECIAL[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (FOLDER / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
