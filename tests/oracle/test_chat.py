"""Ids, texts and conversations of six families beside transformers', with TRL's copies of their templates."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from barellm.data.kinds import load_tokenizer
from tests.chat import families

pytestmark = [pytest.mark.oracle, pytest.mark.extended]
TEMPLATES = {"qwen": "qwen3", "llama3": "llama3_2", "gemma": "gemma3", "phi3": "phi3", "gpt_neox": "qwen2_5"}
LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
PARTS = [
    "a",
    " ",
    " b",
    "\n",
    "é",
    "e\u0301",
    "你好",
    "🙂",
    "<b>",
    "▁",
    "  ",
    "\t",
    "12",
    "'s",
    "!",
    " The",
    "\n\n",
    "\0",
    "ſ",
    "\u00a0",
]
CONTROL = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<think>", "</think>", "<|im_", "start|>"]


def template(family: str) -> str:
    if family == "llama2":
        return LLAMA2
    if find_spec("trl") is None:
        pytest.skip("the templates are TRL's")
    found = find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{TEMPLATES[family]}.jinja").read_text()


@pytest.fixture(scope="module", params=list(families.SPECIAL))
def both(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("families") / request.param
    families.folder(folder, request.param, template=template(request.param))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder), request.param


def drawn(rng: random.Random, parts: list[str]) -> str:
    def one() -> str:
        if rng.random() < 0.8:
            return rng.choice(parts)
        return chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x400, 0x3000), rng.randrange(0x1F300, 0x1F600)]))

    return "".join(one() for _ in range(rng.randrange(1, 20)))


def test_ids_of_ten_thousand_strings(both):
    ours, theirs, _ = both
    rng = random.Random(1)
    texts = [drawn(rng, PARTS + CONTROL) for _ in range(10_000)]
    plain = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    assert [ids.tolist() for ids in ours.encode_many(texts)] == plain
    some = texts[:2000]
    marked = theirs(some, add_special_tokens=False, split_special_tokens=False).input_ids
    assert [ours.encode(text, special=True).tolist() for text in some] == marked
    assert [ours.prompt(text) for text in some] == theirs(some, split_special_tokens=True).input_ids
    decoded = [theirs.decode(ids, clean_up_tokenization_spaces=False) for ids in plain[:2000]]
    assert [ours.decode(ids) for ids in plain[:2000]] == decoded


def conversations(family: str, parts: list[str]) -> list[list[dict[str, str]]]:
    rng, found = random.Random(2), []
    for _ in range(200):
        messages = [{"role": "system", "content": drawn(rng, parts)}] * (rng.random() < 0.5 and family != "llama2")
        for _ in range(rng.randrange(1, 4)):
            messages += [{"role": role, "content": drawn(rng, parts)} for role in ("user", "assistant")]
        found.append(messages[: len(messages) - (rng.random() < 0.7)])
    return found


def test_texts_and_ids_of_two_hundred_conversations(both):
    ours, theirs, family = both
    for i, messages in enumerate(conversations(family, PARTS)):
        how = {"add_generation_prompt": i % 2 == 0}
        assert ours.chat_text(messages, **how) == theirs.apply_chat_template(messages, tokenize=False, **how)
        assert ours.chat(messages, **how).tolist() == theirs.apply_chat_template(messages, return_dict=False, **how)


def test_what_people_say_is_letters_as_with_sanitize_control_tokens(both):
    """Of what an assistant says barellm takes its thinking as tokens, and transformers as letters."""
    ours, theirs, family = both
    for messages in conversations(family, PARTS + CONTROL):
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].replace("think", "")
        wanted = theirs.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
        assert ours.chat(messages, add_generation_prompt=False).tolist() == wanted
