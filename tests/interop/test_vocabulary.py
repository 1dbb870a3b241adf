"""Tokenizers beside Hugging Face's weights: written, and read back as the same ids."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from barellm.cli.main import main
from barellm.data import gpt2
from barellm.data.bpe import BytePairs, trained_bpe
from barellm.data.tokenizers import load_tokenizer
from barellm.errors import UserError
from barellm.interop import vocabulary
from tests.interop.models import TINY, checkpoint_of, hugging_face, random_arrays, their_tensors

TEXT = "to be or not to be, that is the question: whether 'tis nobler in the mind\n" * 9 + "naïve Übermut 12 345"


@pytest.fixture(scope="module")
def bpe() -> BytePairs:
    return trained_bpe(lambda: [TEXT], vocab=300)


def test_gpt2_s_files_are_openai_s(shared, tmp_path):
    """merges.txt is the published file byte by byte, vocab.json has the published ids."""
    tokenizer = gpt2.Gpt2(gpt2._from_merges((shared / "gpt2_vocab.bpe").read_bytes()))
    files = vocabulary.files(tokenizer, 1024)
    assert files["merges.txt"] == (shared / "gpt2_vocab.bpe").read_bytes()
    assert json.loads(files["vocab.json"]) == json.loads((shared / "gpt2_encoder.json").read_text())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = vocabulary.read(tmp_path, 50257)
    assert isinstance(found, gpt2.Gpt2) and found.tokens == tokenizer.tokens


def test_a_bpe_of_ours_goes_there_and_back(tmp_path, bpe, capsys):
    model = replace(TINY, vocab_size=bpe.vocab_size, padded_vocab=0)
    checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    assert "vocab.json, merges.txt, tokenizer_config.json" in capsys.readouterr().out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == bpe.eot
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    found = load_tokenizer(tmp_path / "back/checkpoints/step-000000")
    assert (found.name, found.hash) == ("bpe", bpe.hash)


def test_without_files_50257_ids_are_gpt2_s(tmp_path, monkeypatch):
    assert isinstance(vocabulary.read(tmp_path, 50257), gpt2.Gpt2)
    assert vocabulary.read(tmp_path, 50258) is None
    monkeypatch.setattr(gpt2, "find_vocabulary", lambda: (_ for _ in ()).throw(UserError("not here")))
    assert vocabulary.files(gpt2.Gpt2(), 1024) == {}


WRONG = {
    "no end of text": (lambda ids: {name: i for name, i in ids.items() if i < 299}, "expected ids without gaps and"),
    "a gap": (lambda ids: ids | {"<|endoftext|>": 300}, "expected ids without gaps and"),
    "no byte": (lambda ids: ids | {"\n": 298}, "is not a BPE of bytes"),
    "a list": (list, "is not a BPE of bytes"),
}


def one_file(bpe: BytePairs) -> dict:
    """As `tokenizers` writes it: <|endoftext|> among the added tokens only."""
    files = vocabulary.files(bpe, 20)
    ids = json.loads(files["vocab.json"])
    end = {"id": ids.pop("<|endoftext|>"), "content": "<|endoftext|>", "special": True}
    merges = [line.split(" ") for line in files["merges.txt"].decode().split("\n")[1:-1]]
    words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {"added_tokens": [end], "pre_tokenizer": words, "model": {"type": "BPE", "vocab": ids, "merges": merges}}


@pytest.mark.parametrize("joined", [False, True], ids=["pairs", "texts"])
def test_one_file_says_the_same(tmp_path, bpe, joined):
    whole = one_file(bpe)
    if joined:  # as older versions wrote it
        whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert vocabulary.read(tmp_path, 300).hash == bpe.hash


@pytest.mark.parametrize("change", [{"model": {"type": "Unigram"}}, {"pre_tokenizer": None}])
def test_one_file_of_another_kind(tmp_path, bpe, change):
    (tmp_path / "tokenizer.json").write_text(json.dumps(one_file(bpe) | change))
    with pytest.raises(UserError, match=r"tokenizer.json is not a BPE of bytes"):
        vocabulary.read(tmp_path, 300)


def test_a_tokenizer_of_another_kind_does_not_matter_where_one_is_named(tmp_path):
    source = hugging_face(tmp_path / "hf", TINY, their_tensors(random_arrays(TINY)))
    (source / "tokenizer.json").write_text("{}")
    assert main(["import", str(source), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0


@pytest.mark.parametrize("wrong", WRONG)
def test_other_vocabularies_are_refused(tmp_path, bpe, wrong):
    change, message = WRONG[wrong]
    files = vocabulary.files(bpe, 20)
    (tmp_path / "vocab.json").write_text(json.dumps(change(json.loads(files["vocab.json"]))))
    (tmp_path / "merges.txt").write_bytes(files["merges.txt"])
    with pytest.raises(UserError, match=message):
        vocabulary.read(tmp_path, 300)


def test_ids_and_merges_must_agree(tmp_path, bpe):
    files = vocabulary.files(bpe, 20)
    (tmp_path / "vocab.json").write_bytes(files["vocab.json"])
    lines = files["merges.txt"].decode().split("\n")
    (tmp_path / "merges.txt").write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(UserError, match="its merges are not those that its ids say"):
        vocabulary.read(tmp_path, 300)


def test_an_id_before_its_parts_is_no_merge(bpe):
    tokens = list(bpe.tokens)
    first = next(i for i, token in enumerate(tokens) if len(token) == 4)
    tokens.insert(256, tokens.pop(first))
    with pytest.raises(UserError, match="is not made of earlier ones"):
        vocabulary.files(BytePairs(tokens), 20)


def test_a_vocabulary_of_another_size_than_the_model_s(tmp_path, bpe):
    for name, content in vocabulary.files(bpe, 20).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="has 300 ids, the model 301"):
        vocabulary.read(tmp_path, 301)


def test_a_tokenizer_must_be_known_and_fit(tmp_path, refused, bpe):
    source = hugging_face(tmp_path / "hf", TINY, their_tensors(random_arrays(TINY)))
    command = ("import", source, "--out", tmp_path / "run")
    assert "has 256 ids and does not say of which tokenizer" in refused(*command)
    assert "tokenizer gpt2 has 50257 ids" in refused(*command, "--tokenizer", "gpt2")
    assert "unknown tokenizer 'byts', did you mean 'bytes'?" in refused(*command, "--tokenizer", "byts")
    assert "a tokenizer 'chars' is made from a text" in refused(*command, "--tokenizer", "chars")
    bpe.save(tmp_path)
    assert f"tokenizer {tmp_path} has 300 ids, " in refused(*command, "--tokenizer", tmp_path)
    assert not (tmp_path / "run").exists()
