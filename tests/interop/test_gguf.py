"""Files of llama.cpp, out and in. What llama.cpp makes of ours: tests/oracle/test_gguf.py; what comes in: test_gguf_in.py there."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.bpe import trained_bpe
from barellm.data.huggingface import HuggingFace
from barellm.errors import UserError
from barellm.interop import gguf_reader, gguf_tokenizer, gguf_writer
from barellm.interop.sources import open_weights
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
    ([WORDS | {"pattern": {"Regex": PATTERN.replace("{1,3}", "")}}, AS_IT_IS], "qwen2"),
    ([{"type": "Digits", "individual_digits": True}, PLAIN], "smollm"),
])  # fmt: skip
def test_a_rule_for_words_has_llama_cpp_s_name(steps, rule):
    assert gguf_writer._of(tokenizer(*steps))["rule"] == rule


@pytest.mark.parametrize("steps", [
    [AS_IT_IS], [WORDS, PLAIN], [WORDS | {"invert": True}, AS_IT_IS], [WORDS | {"behavior": "MergedWithNext"}, AS_IT_IS],
    [WORDS | {"pattern": {"Regex": PATTERN.removesuffix(r"|\s+")}}, AS_IT_IS], [{"type": "Digits"}, PLAIN],
    [WORDS | {"pattern": {"Regex": PATTERN.replace("{1,3}", "{1,2}")}}, AS_IT_IS],
])  # fmt: skip
def test_a_rule_that_is_only_like_one_is_refused(steps):
    with pytest.raises(UserError, match="not that of GPT-2"):
        gguf_writer._of(tokenizer(*steps))


def test_added_tokens_are_cut_out_of_a_text_and_special_ones_are_not():
    own = {"id": 289, "content": "<tool>", "special": False, "lstrip": False, "rstrip": False}
    made = gguf_writer._of(tokenizer(PLAIN, added=(own,)))
    found = dict(zip(made["tokens"], made["kinds"], strict=True))
    assert (found["a"], found["<|begin_of_text|>"], found["<tool>"], found["[UNUSED288]"]) == (1, 3, 4, 5)


def test_a_file_has_the_run_s_name_and_licence(tmp_path):
    package = pytest.importorskip("gguf")
    step, out = checkpoint_of(tmp_path / "poems", TINY, random_arrays(TINY)), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--license", "mit", "--out", str(out)]) == 0
    fields = package.GGUFReader(out).fields
    assert [fields[f"general.{name}"].contents() for name in ("name", "license")] == ["poems", "mit"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["m.gguf"]


def text(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def head(*keys: bytes, tensors: bytes = b"", count: int = 0, version: int = 3, keys_said: int | None = None) -> bytes:
    said = len(keys) if keys_said is None else keys_said
    return b"GGUF" + struct.pack("<IQQ", version, count, said) + b"".join(keys) + tensors


def strings(name: str, count: int, *items: str) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, 8, count) + b"".join(map(text, items))


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
TENSOR = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)
HOSTILE = {
    "another version": (head(LLAMA, version=1), "its version is 1, expected 2 or 3"),
    "big-endian": (head(LLAMA, version=3 << 24), "in little-endian order"),
    "keys that are not there": (head(LLAMA, keys_said=2**62), "it ends at byte"),
    "tensors that are not there": (head(LLAMA, count=2**62), "it ends at byte"),
    "a long text": (head(struct.pack("<Q", 2**62)), "it ends at byte"),
    "a long array of strings": (head(strings("tokens", 2**60)), "array of 1152921504606846976 strings, and 0 bytes are left"),
    "a long array of numbers": (head(text("x") + struct.pack("<IIQ", 9, 0, 2**62)), "it ends at byte"),
    "arrays of arrays": (head(text("x") + struct.pack("<IIQ", 9, 9, 2)), "an array of type 9, expected numbers or strings"),
    "an unknown type": (head(text("x") + struct.pack("<I", 99)), "a value of type 99"),
    "a key twice": (head(LLAMA, LLAMA), "the key 'general.architecture' twice"),
    "a tensor twice": (head(LLAMA, tensors=TENSOR * 2, count=2), "the tensor 'token_embd.weight' twice"),
    "no UTF-8": (head(struct.pack("<Q", 1) + b"\xff"), "can't decode byte"),
    "an alignment of 3": (
        head(text("general.alignment") + struct.pack("<II", 4, 3)),
        "general.alignment is 3, expected a power of two",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_says_more_than_the_file_has_is_refused(tmp_path, name):
    """And asks for no memory."""
    content, says = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=re.escape(says)):
        gguf_reader.header(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_that_ends_anywhere_is_refused(tmp_path):
    whole = head(LLAMA, strings("tokens", 2, "a", "b"), tensors=TENSOR, count=1)
    path = tmp_path / "m.gguf"
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"is no GGUF file: it ends at byte|bytes are left"):
            gguf_reader.header(path)
    path.write_bytes(whole)
    found = gguf_reader.header(path)
    assert found.values["tokens"] == ["a", "b"] and found.infos == {"token_embd.weight": ((4, 32), 0, 0)}
    assert found.data % 32 == 0 and 0 <= found.data - len(whole) < 32


@pytest.mark.parametrize("shape, kind, offset, says", [
    ((32, 4), 0, 32, "which is not within the file"), ((32, 4), 0, 8, "is not within"), ((32, 5), 0, 0, "not within the file"),
    ((2**40, 2**40), 0, 0, "not within the file"), ((16, 4), 8, 0, "not within the file"), ((32, 4), 99, 0, "of type 99"),
    ((32, 0), 0, 0, "not within the file"),
])  # fmt: skip
def test_a_tensor_outside_of_its_file_is_refused(tmp_path, shape, kind, offset, says):
    pytest.importorskip("gguf")
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, *shape, kind, offset)
    content = head(LLAMA, tensors=tensor, count=1)
    (tmp_path / "m.gguf").write_bytes(content + bytes(-len(content) % 32 + 512))
    with pytest.raises(UserError, match=says):
        open_weights(tmp_path / "m.gguf")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_file_comes_back_as_the_run_that_it_was_made_of(tmp_path, dtype):
    pytest.importorskip("gguf")
    model = replace(TINY, vocab_size=288, padded_vocab=0)
    arrays = {name: x.astype(np.float16).astype(np.float32) for name, x in random_arrays(model).items()}
    step, out = checkpoint_of(tmp_path / "run", model, arrays, tokenizer(PLAIN)), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--dtype", dtype, "--out", str(out)]) == 0
    found, expected = open_weights(out), open_weights(step)
    assert found.model == expected.model
    for name, t in expected.tensors.items():
        assert np.array_equal(*(each.read_rows(name, 0, int(t.shape[0])) for each in (found, expected))), name
    assert found.tokenizer and expected.tokenizer
    assert found.tokenizer.encode(TEXT).tolist() == expected.tokenizer.encode(TEXT).tolist()
    assert main(["import", str(out), "--out", str(tmp_path / "again")]) == 0


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "smollm"])
def test_special_tokens_keep_their_ids_wherever_they_stand(tmp_path, rule):
    """Those of SmolLM2 are the first of its ids, Llama 3's the last."""
    pytest.importorskip("gguf")
    steps = {"gpt-2": [PLAIN], "llama-bpe": [WORDS, AS_IT_IS], "smollm": [{"type": "Digits", "individual_digits": True}, PLAIN]}
    content = json.loads(tokenizer(*steps[rule]).content)
    names = [token["content"] for token in sorted(content["added_tokens"], key=lambda token: token["id"])]
    first = dict(zip(names, range(len(names)), strict=True))
    content["model"]["vocab"] = first | {name: i + len(names) for name, i in content["model"]["vocab"].items()}
    content["model"]["ignore_merges"] = rule == "llama-bpe"
    content["added_tokens"] = [token | {"id": first[token["content"]]} for token in content["added_tokens"]]
    content["post_processor"] = None
    made = HuggingFace(json.dumps(content).encode(), path=Path("made"))
    model = replace(TINY, vocab_size=made.vocab_size, padded_vocab=0)
    step, out = checkpoint_of(tmp_path / "run", model, random_arrays(model), made), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--out", str(out)]) == 0
    found = open_weights(out).tokenizer
    assert found and found.special == made.special == first
    for text in (f"To be{names[0]} or {names[-1]}", "".join(names), TEXT):
        assert found.encode(text).tolist() == made.encode(text).tolist()
        assert found.encode(text, special=True).tolist() == made.encode(text, special=True).tolist()
    assert found.encode(names[-1], special=True).tolist() == [len(names) - 1]


def test_a_prompt_begins_in_a_file_as_in_the_run(tmp_path):
    """Prompts of a run that was trained here begin with the id between its texts: llama.cpp has to put it there too."""
    package = pytest.importorskip("gguf")
    bpe = trained_bpe(lambda: [TEXT], vocab=288)
    model = replace(TINY, vocab_size=bpe.vocab_size, padded_vocab=0)
    step, out = checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--out", str(out)]) == 0
    found, expected = open_weights(out).tokenizer, open_weights(step).tokenizer
    assert found and expected and found.prompt("or not") == expected.prompt("or not")
    assert package.GGUFReader(out).fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert expected.prompt("or not")[0] == bpe.eot


def test_a_file_in_parts_is_read_with_all_of_them(tmp_path):
    package = pytest.importorskip("gguf")
    step, out = checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY)), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--out", str(out)]) == 0
    whole = package.GGUFReader(out)
    writer = package.GGUFWriter(tmp_path / "parts.gguf", "gpt2", split_max_tensors=7)
    for field in whole.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 2
    found, expected = open_weights(parts[0]), open_weights(step)
    for name, t in expected.tensors.items():
        assert np.array_equal(*(each.read_rows(name, 0, int(t.shape[0])) for each in (found, expected))), name
    parts[1].unlink()
    with pytest.raises(UserError, match=f"expected all in its folder: {parts[1].name} is missing"):
        open_weights(parts[0])


@pytest.mark.parametrize("kind, form, value", [
    (0, "B", 200), (1, "b", -100), (2, "H", 60_000), (3, "h", -30_000), (4, "I", 1 << 31), (5, "i", -(1 << 31)), (6, "f", 0.5),
    (7, "?", True),
    (10, "Q", 1 << 63), (11, "q", -(1 << 63)), (12, "d", 1e300),
])  # fmt: skip
def test_a_number_of_every_type_is_read_alone_and_in_an_array(tmp_path, kind, form, value):
    one = text("a") + struct.pack(f"<I{form}", kind, value)
    several = text("b") + struct.pack(f"<IIQ{form}{form}", 9, kind, 2, value, value)
    (tmp_path / "m.gguf").write_bytes(head(one, several))
    found = gguf_reader.header(tmp_path / "m.gguf").values
    assert found["a"] == value and type(found["a"]) is type(value) and found["b"].tolist() == [value, value]


@pytest.mark.parametrize(
    "architecture, layers, scalar", [("gemma2", 26, 256), ("gemma2", 46, 96), ("gemma3", 26, 256), ("gemma3", 62, 96)]
)
def test_the_scale_of_gemmas_largest_models_is_by_their_width(architecture, layers, scalar):
    """As llama.cpp has it in code: no file says it."""
    keys = {"block_count": layers, "attention.head_count": 8, "embedding_length": 768, "attention.key_length": 256}
    values = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}
    embedding = gguf_reader.Quantized(np.zeros((5, 768), np.float32), (5, 768), lambda rows: rows)
    found = gguf_reader.config_of(gguf_reader.Header(Path("m"), np.zeros(0, np.uint8), values), {"token_embd.weight": embedding})
    assert found["query_pre_attn_scalar"] == scalar and found["tie_word_embeddings"]


def test_rows_of_vectors_and_matrices_are_taken_from_anywhere(tmp_path):
    pytest.importorskip("gguf")
    step, out = checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY)), tmp_path / "m.gguf"
    assert main(["export", str(step), "--format", "gguf", "--out", str(out)]) == 0
    found, expected = open_weights(out), open_weights(step)
    for name in ("h.1.ln_1.bias", "h.0.mlp.c_fc.weight"):
        assert np.array_equal(found.read_rows(name, 3, 7), expected.read_rows(name, 3, 7))


def test_a_model_of_one_head_and_templates_by_name(tmp_path):
    package = pytest.importorskip("gguf")
    from tests.test_readers import gguf_model

    whole = package.GGUFReader(gguf_model(tmp_path))
    writer = package.GGUFWriter(tmp_path / "b.gguf", "llama")
    for field in whole.fields.values():
        if (
            not field.name.startswith(("GGUF.", "general.architecture", "tokenizer.ggml.token_type"))
            and "head_count" not in field.name
        ):
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    writer.add_head_count(1)
    writer.add_key_length(4)
    writer.add_head_count_kv(1)
    writer.add_chat_template([{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}])
    for tensor in whole.tensors:
        shape = {"attn_q": (4, 8), "attn_output": (8, 4)}.get(tensor.name.split(".")[-2])
        writer.add_tensor(tensor.name, tensor.data if shape is None else np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_weights(tmp_path / "b.gguf")
    assert (found.model.heads, found.model.head_size) == (1, 4)  # pyright: ignore[reportAttributeAccessIssue]
    assert found.tokenizer and found.tokenizer.conventions.templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert found.tokenizer.vocab_size == 258


def test_an_unknown_rule_for_words_is_refused_in_one_line():
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "own",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UserError) as error:
        gguf_tokenizer.read(Path("m.gguf"), values, 1)
    said = str(error.value)
    assert said.startswith("m.gguf: tokenizer.ggml.pre is 'own', expected llama-bpe or ") and said.count("--tokenizer") == 1
