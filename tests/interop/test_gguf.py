"""What a file of llama.cpp says of its tokenizer and its model. What llama.cpp makes of it: tests/oracle/test_gguf.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from barellm.cli.main import main
from barellm.data.huggingface import HuggingFace
from barellm.errors import UserError
from barellm.interop import gguf
from tests.data.llama import PATTERN, llama_json
from tests.interop.models import TINY, checkpoint_of, random_arrays

TEXT = "To be, or not to be: that's the question. " * 20
PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
WORDS = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
AS_IT_IS = PLAIN | {"use_regex": False}


def tokenizer(*steps: dict, added: tuple[dict, ...] = ()) -> HuggingFace:
    found = json.loads(llama_json(TEXT, vocab=280))
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    found["added_tokens"] += added
    return HuggingFace(json.dumps(found).encode(), path=Path("made"))


@pytest.mark.parametrize("steps, rule", [
    ([PLAIN], "gpt-2"), ([PLAIN | {"use_regex": True}], "gpt-2"), ([WORDS, AS_IT_IS], "llama-bpe"),
    ([{"type": "Sequence", "pretokenizers": [WORDS, AS_IT_IS]}], "llama-bpe"),
])  # fmt: skip
def test_a_rule_for_words_has_llama_cpp_s_name(steps, rule):
    assert gguf._of(tokenizer(*steps))[0] == rule


@pytest.mark.parametrize("steps", [
    [AS_IT_IS], [WORDS, PLAIN], [WORDS | {"invert": True}, AS_IT_IS], [WORDS | {"behavior": "MergedWithNext"}, AS_IT_IS],
    [WORDS | {"pattern": {"Regex": PATTERN.removesuffix(r"|\s+")}}, AS_IT_IS], [{"type": "Digits"}, PLAIN],
    [WORDS | {"pattern": {"Regex": PATTERN.replace("{1,3}", "")}}, AS_IT_IS],
])  # fmt: skip
def test_a_rule_that_is_only_like_one_is_refused(steps):
    with pytest.raises(UserError, match="neither GPT-2's nor Llama-3's"):
        gguf._of(tokenizer(*steps))


def test_added_tokens_are_cut_out_of_a_text_and_special_ones_are_not():
    own = {"id": 289, "content": "<tool>", "special": False, "lstrip": False, "rstrip": False}
    _, tokens, kinds, _ = gguf._of(tokenizer(PLAIN, added=(own,)))
    found = dict(zip(tokens, kinds, strict=True))
    assert (found["a"], found["<|begin_of_text|>"], found["<tool>"], found["[UNUSED288]"]) == (1, 3, 4, 5)


def test_a_file_has_the_run_s_name_and_licence(tmp_path):
    package = pytest.importorskip("gguf")
    step, out = checkpoint_of(tmp_path / "poems", TINY, random_arrays(TINY)), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--license", "mit", "--out", str(out)]) == 0
    fields = package.GGUFReader(out).fields
    assert [fields[f"general.{name}"].contents() for name in ("name", "license")] == ["poems", "mit"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["m.gguf"]
