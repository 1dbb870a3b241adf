"""llm.c's model files, byte by byte."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import barellm
from barellm.checkpoint import storage, tensorfile
from barellm.cli.main import main
from barellm.data.bpe import BytePairs, trained_bpe
from barellm.data.gpt2 import Gpt2, _from_merges
from barellm.data.huggingface import HuggingFace
from barellm.errors import UserError
from barellm.interop import llmc_tokenizer
from barellm.interop.sources import open_weights
from barellm.models.gpt2 import Config as ModelConfig
from tests.data.llama import llama_json
from tests.interop.models import ODD, TINY, checkpoint_of, llmc_file, random_arrays

ARRAYS = random_arrays(TINY)
DTYPES = {"fp32": 3, "bf16": 5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model, padded", [(TINY, 256), (ODD, 128)], ids=["whole", "padded"])
def test_an_export_is_the_documented_file(tmp_path, monkeypatch, model, padded, dtype):
    monkeypatch.setattr(tensorfile, "PIECE", 1000)
    arrays = random_arrays(model)
    checkpoint_of(tmp_path / "run", model, arrays)
    out = tmp_path / "new" / "gpt2.bin"
    assert main(["export", str(tmp_path / "run"), "--format", "llmc", "--dtype", dtype, "--out", str(out)]) == 0
    expected = llmc_file(tmp_path / "expected.bin", model, arrays, version=DTYPES[dtype], padded=padded)
    assert out.read_bytes() == expected.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["gpt2.bin"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_folder_of_hugging_face_becomes_the_same_file(tmp_path, dtype):
    """Its matrices are transposed: rows of ours are no rows of memory there."""
    step = checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    assert main(["export", str(step), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    for source in ("run", "hf"):
        out = tmp_path / f"{source}.bin"
        assert main(["export", str(tmp_path / source), "--format", "llmc", "--dtype", dtype, "--out", str(out)]) == 0
    assert (tmp_path / "hf.bin").read_bytes() == (tmp_path / "run.bin").read_bytes()


def test_a_disk_without_room_keeps_nothing_of_an_export(tmp_path, monkeypatch, refused):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)

    class Full:
        def __getattr__(self, name):
            return self.reserve if name == "posix_fallocate" else getattr(os, name)

        def reserve(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "system", Full())
    out = tmp_path / "new" / "gpt2.bin"
    assert "No space left" in refused("export", tmp_path / "run", "--format", "llmc", "--out", out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("version, padded", [(3, 256), (3, 384), (5, 257)])
def test_an_import_has_the_file_s_weights(tmp_path, version, padded):
    source = llmc_file(tmp_path / "gpt2.bin", TINY, ARRAYS, version=version, padded=padded)
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    found = load_file(tmp_path / "run/checkpoints/step-000000/weights.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        # Of bf16 the upper half of the bits, rounded to the nearest even one.
        bits = array.view(np.uint32).astype(np.uint64)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(found[name], array if version == 3 else nearest, name)


def test_fp32_there_and_back_is_the_same_file(tmp_path):
    step = checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    assert main(["export", str(step), "--format", "llmc", "--out", str(tmp_path / "gpt2.bin")]) == 0
    assert main(["import", str(tmp_path / "gpt2.bin"), "--out", str(tmp_path / "back"), "--tokenizer", "bytes"]) == 0
    back = tmp_path / "back/checkpoints/step-000000"
    assert (back / "weights.safetensors").read_bytes() == (step / "weights.safetensors").read_bytes()


WRONG = {
    "another magic": ({"w0": 20240520}, "is not a model of llm.c: it begins with 20240520, expected 20240326"),
    "another version": ({"w1": 2}, "has version 2, expected 3 (fp32) or 5 (bf16)"),
    "another size": ({"w4": 3}, " bytes, expected "),
    "no layers": ({"w4": 0}, "gpt2.bin: model.layers is 0, expected at least 1"),
    "a padding that cuts": ({"w7": 255}, "its padded vocabulary is 255, expected at least 256"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_header_is_refused(tmp_path, refused, wrong):
    words, message = WRONG[wrong]
    path = llmc_file(tmp_path / "gpt2.bin", TINY, ARRAYS, version=3, padded=256, **words)
    assert message in refused("import", path, "--out", tmp_path / "run", "--tokenizer", "bytes")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_cut_or_none(tmp_path, refused):
    path = llmc_file(tmp_path / "gpt2.bin", TINY, ARRAYS, version=3, padded=256)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert f"has {size - 1} bytes, expected {size} by its header" in refused("import", path, "--out", tmp_path / "run")
    path.write_bytes(b"")
    assert "it begins with 0, expected 20240326" in refused("import", path, "--out", tmp_path / "run")


@pytest.mark.parametrize("name, content", [("m.bin", b"PK\x03\x04zip"), ("m.bin", b"\x80\x02}q"), ("m.pt", b"anything")])
def test_a_pickle_is_never_read(tmp_path, refused, name, content):
    (tmp_path / name).write_bytes(content)
    said = refused("import", tmp_path / name, "--out", tmp_path / "run")
    assert said.startswith(f"{tmp_path / name} is a pickle of torch.save, which is never read")


def tokenizer_file(path, tokens: list[bytes], *, eot: int, version: int = 2, count: int | None = None):
    """As write_tokenizer of llm.c's train_gpt2.py."""
    header = np.zeros(256, "<i4")
    header[:4] = [20240328, version, len(tokens) if count is None else count, eot]
    path.write_bytes(header.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens))
    return path


def test_a_tokenizer_goes_to_llm_c_and_back(tmp_path):
    bpe = trained_bpe(lambda: ["To be, or not to be: that's the question. " * 20], vocab=300)
    model = ModelConfig(layers=1, heads=1, d_model=8, vocab_size=bpe.vocab_size, max_seq=16)
    checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)
    out = tmp_path / "tokenizer.bin"
    assert main(["export", str(tmp_path / "run"), "--format", "llmc-tokenizer", "--out", str(out)]) == 0
    tokens = [b"<|endoftext|>" if i == bpe.eot else token for i, token in enumerate(bpe.tokens)]
    assert out.read_bytes() == tokenizer_file(tmp_path / "expected.bin", tokens, eot=bpe.eot).read_bytes()
    source = llmc_file(tmp_path / "m.bin", model, random_arrays(model), version=3, padded=384)
    assert main(["import", str(source), "--out", str(tmp_path / "again"), "--tokenizer", str(out)]) == 0
    assert open_weights(tmp_path / "again").tokenizer.hash == bpe.hash


def test_gpt2_s_own_tokenizer_is_known(tmp_path, shared):
    tokens = _from_merges((shared / "gpt2_vocab.bpe").read_bytes())
    tokens[-1] = b"<|endoftext|>"
    for version, eot in ((2, 50256), (1, 0)):
        found = llmc_tokenizer.read(tokenizer_file(tmp_path / "t.bin", tokens, eot=eot, version=version))
        assert isinstance(found, Gpt2) and found.tokens[-1] == b""


BYTES = [bytes([i]) for i in range(256)]


@pytest.mark.parametrize("tokens, words, said", [
    (BYTES, {"eot": 3}, "lacks some of the 256 bytes"), ([*BYTES, b"", b"e"], {"eot": 257}, "or has empty tokens"),
    ([*BYTES, b"e"], {"eot": 257}, "has 257 tokens"), ([*BYTES, b"e"], {"eot": 256, "count": 258}, "expected 258 whole ones"),
    ([*BYTES, b"e"], {"eot": 256, "version": 3}, "begins with [20240328, 3]"),
])  # fmt: skip
def test_another_tokenizer_is_refused(tmp_path, tokens, words, said):
    with pytest.raises(UserError, match=re.escape(said)):
        llmc_tokenizer.read(tokenizer_file(tmp_path / "t.bin", tokens, **words))


def test_a_missing_tokenizer_is_named(tmp_path):
    source = llmc_file(tmp_path / "m.bin", TINY, ARRAYS, version=3, padded=256)
    with pytest.raises(UserError, match=r"cannot read .*t\.bin: No such file"):
        barellm.load(source, tokenizer=tmp_path / "t.bin")


def test_a_tokenizer_that_llm_c_cannot_hold_is_refused(tmp_path, refused):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    command = ("export", tmp_path / "run", "--format", "llmc-tokenizer", "--out", tmp_path / "t.bin")
    assert "have an end of text" in refused(*command)
    with pytest.raises(UserError, match="token 256 has 256 bytes"):
        llmc_tokenizer.content(BytePairs([*BYTES, b"e" * 256, b""]))
    assert "has no place for it" in refused(*command, "--license", "mit")


def test_no_token_of_llm_c_is_empty():
    """Its reader takes that for a damaged file. Special ids have their names there, ids that nobody has say so."""
    library = json.loads(llama_json("To be, or not to be: that's the question. " * 20, vocab=280))
    library["added_tokens"][3]["id"] += 5
    tokenizer = HuggingFace(json.dumps(library).encode(), path=Path("made"))
    body, tokens = llmc_tokenizer.content(tokenizer)[1024:], []
    while body:
        tokens.append(body[1 : 1 + body[0]])
        body = body[1 + body[0] :]
    assert len(tokens) == tokenizer.vocab_size and all(tokens)
    assert (tokens[tokenizer.eot], tokens[281], tokens[283]) == (b"<|endoftext|>", b"<|end_of_text|>", b"[UNUSED283]")
