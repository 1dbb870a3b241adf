"""Ids, texts and conversations of six families beside transformers', with TRL's copies of their templates."""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

import numpy as np
import pytest

from barellm.data import examples, forms
from barellm.data.kinds import load_tokenizer
from tests.chat import families
from tests.oracle import chats

pytestmark = [pytest.mark.oracle, pytest.mark.extended]
TEMPLATES = {
    "qwen": "qwen3", "llama3": "llama3_2", "gemma": "gemma3", "phi3": "phi3", "gpt_neox": "qwen2_5", "llama2": "llama2",
}  # fmt: skip


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("families") / request.param
    try:
        families.folder(folder, request.param, template=chats.template(TEMPLATES[request.param]))
    except LookupError as error:
        pytest.skip(str(error))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder), request.param


def test_ids_of_ten_thousand_strings(both):
    ours, theirs, _ = both
    chats.check_ids(ours, theirs, 10_000)


def test_texts_and_ids_of_two_hundred_conversations(both):
    ours, theirs, family = both
    chats.check_chats(ours, theirs, 200, system=family != "llama2")


def test_what_people_say_is_letters_as_with_sanitize_control_tokens(both):
    """Of what an assistant says barellm takes its thinking as tokens, and transformers as letters."""
    ours, theirs, family = both
    for messages in chats.conversations(200, chats.PARTS + chats.CONTROL, system=family != "llama2"):
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].replace("think", "")
        wanted = theirs.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
        assert ours.chat(messages, add_generation_prompt=False).tolist() == wanted


MARKED = {"qwen": "qwen3_training", "llama3": "llama3_training", "gemma": "gemma3_training", "phi3": "phi3_training"}


@pytest.mark.parametrize("family", MARKED)
def test_what_a_template_marks_is_trained_and_nothing_else(family, tmp_path):
    """Token for token transformers' assistant mask, where answers begin and end with a word."""
    from transformers import AutoTokenizer

    try:
        families.folder(tmp_path, family, template=chats.template(MARKED[family]))
    except LookupError as error:
        pytest.skip(str(error))
    ours, theirs, trained = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), 0
    talks = [talk for talk in chats.conversations(120, chats.PARTS) if talk[-1]["role"] == "assistant"]
    talks = [[{**m, "content": f"a {m['content']} b"} for m in talk] for talk in talks]
    found = examples.encode_examples([forms.example({"messages": talk}, "here") for talk in talks], ours)
    for i, messages in enumerate(talks):
        wanted = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        one, mask = found.slice(i, i + 1), [bool(n) for n in wanted["assistant_masks"]]
        assert one.tokens.tolist() == wanted["input_ids"] and one.answer.tolist() == mask, messages
        trained += sum(mask)
    assert trained > 300


@pytest.mark.parametrize("family", TEMPLATES)
def test_without_marks_the_answer_and_its_end_are_trained(family, tmp_path):
    """The ids are those of the whole conversation; what is trained is each answer and the token that ends it."""
    from transformers import AutoTokenizer

    if family == "gpt_neox":
        pytest.skip("its tokenizer has no token for the end of a turn, so that is text: tests/chat/test_models.py")
    try:
        families.folder(tmp_path, family, template=chats.template(TEMPLATES[family]))
    except LookupError as error:
        pytest.skip(str(error))
    ours, theirs, count = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), 0
    pieces = family in ("gemma", "phi3", "llama2")  # to whose tokenizers ▁ is a space

    def wanted(text: str) -> str:
        return normalize("NFC", text) if family == "qwen" else text.replace("▁", " ") if pieces else text

    for messages in chats.conversations(60, chats.PARTS, system=family != "llama2"):
        messages: list[dict[str, Any]] = [{**m, "content": f"a {m['content']} b"} for m in messages]
        answers = [m for m in messages if m["role"] == "assistant"]
        if messages[-1]["role"] != "assistant":
            continue
        answers[0]["weight"] = weight = count % 2
        if not weight and len(answers) == 1:
            continue
        found = examples.encode_examples([forms.example({"messages": messages}, "here")], ours)
        assert found.tokens.tolist() == theirs.apply_chat_template(messages, return_dict=False), messages
        cuts = np.flatnonzero(np.diff(found.answer, prepend=False, append=False))
        runs = [found.tokens[first:last].tolist() for first, last in zip(cuts[::2], cuts[1::2], strict=True)]
        assert len(runs) == len(answers) - (not weight)
        for run, answer in zip(runs, answers[not weight :], strict=True):
            assert ours.decode(run[:-1]).strip().removeprefix("<think>\n\n</think>\n\n") == wanted(answer["content"])
            assert run[-1] in ours.special.values()
        count += 1
    assert count > 10
