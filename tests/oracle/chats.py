"""Tokenizers and chat templates beside transformers': drawn texts and conversations, and what must be equal of each.

Templates are read from the installed wheel of TRL, which has copies of published ones; none is part of the project. Of families
whose own template TRL lacks, PAIRS names one for the same special tokens.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from barellm.data.tokenizers import Tokenizer

LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
PAIRS = {  # a model's family -> the pipelines of tokenizers that models of it have, and a template for each
    "llama": (("llama3", "llama3_2"), ("llama2", "llama2"), ("starcoder", "qwen2_5")),  # Llama 3; Llama 2; SmolLM2
    "mistral": (("llama2", "llama2"),),
    "qwen2": (("qwen", "qwen2_5"),),
    "qwen3": (("qwen", "qwen3"), ("qwen", "qwen3_instruct_2507")),
    "smollm3": (("smollm3", "qwen3"),),
    "olmo2": (("cl100k", "phi3"),),
    "olmo3": (("cl100k", "phi3"),),
    "gemma2": (("gemma", "gemma3"),),
    "gemma3_text": (("gemma", "gemma3"),),
    "phi3": (("phi3", "phi3"),),
    "granite": (("starcoder", "deepseekv3"),),
    "arcee": (("smollm3", "qwen2_5"),),
    "stablelm": (("cl100k", "qwen2_5"), ("gpt_neox", "phi3")),
    "gpt_neox": (("gpt_neox", "qwen2_5"),),
}
PARTS = [
    "a", " ", " b", "\n", "é", "e\u0301", "你好", "🙂", "<b>", "▁", "  ", "\t", "12", "'s", "!", " The", "\n\n", "\0",
    "ſ", "\u00a0",
]  # fmt: skip
CONTROL = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<think>", "</think>", "<|im_", "start|>"]


def template(name: str) -> str:
    """TRL's template of that name. LookupError where TRL is not installed."""
    if name == "llama2":
        return LLAMA2
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise LookupError("the templates are TRL's: pip install --no-deps trl")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def drawn(rng: random.Random, parts: list[str]) -> str:
    def one() -> str:
        if rng.random() < 0.8:
            return rng.choice(parts)
        return chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x400, 0x3000), rng.randrange(0x1F300, 0x1F600)]))

    return "".join(one() for _ in range(rng.randrange(1, 20)))


def conversations(count: int, parts: list[str], *, system: bool = True) -> list[list[dict[str, str]]]:
    rng, found = random.Random(2), []
    for _ in range(count):
        messages = [{"role": "system", "content": drawn(rng, parts)}] * (rng.random() < 0.5 and system)
        for _ in range(rng.randrange(1, 4)):
            messages += [{"role": role, "content": drawn(rng, parts)} for role in ("user", "assistant")]
        found.append(messages[: len(messages) - (rng.random() < 0.7)])
    return found


def check_ids(ours: Tokenizer, theirs: Any, count: int) -> None:
    """Of drawn strings, plain; of a fifth of them also with special tokens, with what stands before a prompt, and back."""
    rng = random.Random(1)
    texts = [drawn(rng, PARTS + CONTROL) for _ in range(count)]
    plain = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    assert [ids.tolist() for ids in ours.encode_many(texts)] == plain
    some = texts[: count // 5]
    marked = theirs(some, add_special_tokens=False, split_special_tokens=False).input_ids
    assert [ours.encode(text, special=True).tolist() for text in some] == marked
    assert [ours.prompt(text) for text in some] == theirs(some, split_special_tokens=True).input_ids
    decoded = [theirs.decode(ids, clean_up_tokenization_spaces=False) for ids in plain[: len(some)]]
    assert [ours.decode(ids) for ids in plain[: len(some)]] == decoded


def check_chats(ours: Tokenizer, theirs: Any, count: int, *, system: bool = True) -> None:
    """Text and ids of drawn conversations, every second one with the head of an answer."""
    for i, messages in enumerate(conversations(count, PARTS, system=system)):
        how = {"add_generation_prompt": i % 2 == 0}
        assert ours.chat_text(messages, **how) == theirs.apply_chat_template(messages, tokenize=False, **how), messages
        assert ours.chat(messages, **how).tolist() == theirs.apply_chat_template(messages, return_dict=False, **how), messages
