"""Ids, texts and conversations of six families beside transformers', with TRL's copies of their templates."""

from __future__ import annotations

import pytest

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
