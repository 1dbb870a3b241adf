"""Tokenizers beside Hugging Face's weights: written, and read back as the same ids."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data import gpt2
from barellm.data.bpe import BytePairs, trained_bpe
from barellm.data.kinds import load_tokenizer
from barellm.data.shards import write_shard
from barellm.errors import UserError
from barellm.interop import vocabulary
from tests.data.llama import llama_json
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
    assert found.prompt("to be") == bpe.prompt("to be") and bpe.prompt("to be")[0] == bpe.eot, "which transformers adds too"


def test_without_files_50257_ids_are_gpt2_s(tmp_path, monkeypatch):
    assert isinstance(vocabulary.read(tmp_path, 50257), gpt2.Gpt2)
    assert vocabulary.read(tmp_path, 50258) is None
    monkeypatch.setattr(gpt2, "find_vocabulary", lambda: (_ for _ in ()).throw(UserError("not here")))
    assert vocabulary.files(gpt2.Gpt2(), 1024) == {}


WRONG = {
    "no end of text": (lambda ids: {name: i for name, i in ids.items() if i < 299}, "is not a BPE of bytes with <.endoftext.>"),
    "a gap": (lambda ids: ids | {"<|endoftext|>": 300}, "has gaps in its ids up to 300, expected 300 without gaps"),
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


@pytest.mark.parametrize("change", [{"model": {"type": "Unigram"}}, {"model": 3}, {"added_tokens": [3]}])
def test_one_file_that_is_none(tmp_path, bpe, change):
    (tmp_path / "tokenizer.json").write_text(json.dumps(one_file(bpe) | change))
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer that the library tokenizers wrote"):
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


def test_rows_and_ids_may_differ_but_not_by_half(tmp_path, bpe):
    for name, content in vocabulary.files(bpe, 20).items():
        (tmp_path / name).write_bytes(content)
    assert vocabulary.read(tmp_path, 320).rows == 320
    for rows in (299, 601):
        with pytest.raises(UserError, match=f"has 300 ids, the model {rows}: it is of another model"):
            vocabulary.read(tmp_path, rows)


@pytest.mark.parametrize("two_files", [False, True])
def test_the_end_of_text_may_be_the_first_id(tmp_path, two_files):
    """What the library makes where it trains with one special token."""
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer()
    library.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    if two_files:
        library.save_model(str(tmp_path))
    else:
        library.save(str(tmp_path / "tokenizer.json"))
    found = vocabulary.read(tmp_path, library.get_vocab_size())
    assert isinstance(found, BytePairs) and found.eot == 0 and found.tokens[0] == b""
    for sample in (TEXT, "never seen: Übermut \t\n  x", "<|endoftext|>"):
        assert found.decode(found.encode(sample)) == sample and 0 not in found.encode(sample)
    assert found.encode(TEXT).tolist() == library.encode(TEXT).ids
    (tmp_path / "made").mkdir()
    found.save(tmp_path / "made")
    again = load_tokenizer(tmp_path / "made")
    assert (again.eot, again.hash) == (0, found.hash)
    (tmp_path / "back").mkdir()
    for name, content in vocabulary.files(found, 20).items():
        (tmp_path / "back" / name).write_bytes(content)
    assert vocabulary.read(tmp_path / "back", found.vocab_size).hash == found.hash


def test_two_files_that_lack_bytes_are_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=90, special_tokens=["<|endoftext|>"]))
    library.model.save(str(tmp_path))
    with pytest.raises(UserError, match="it lacks some of the 256 bytes"):
        vocabulary.read(tmp_path, 90)


def test_llama_s_file_goes_there_and_back_as_it_is(tmp_path, capsys):
    content = llama_json(TEXT, vocab=300)
    model = replace(TINY, vocab_size=300 + 8, padded_vocab=0)
    source = hugging_face(tmp_path / "hf", model, their_tensors(random_arrays(model)))
    (source / "tokenizer.json").write_bytes(content)
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    assert "tokenizer huggingface" in capsys.readouterr().out
    step = tmp_path / "run/checkpoints/step-000000"
    assert (step / "tokenizer.json").read_bytes() == content and load_tokenizer(step).name == "huggingface"
    words = ["--prompt", "to be", "--max-new-tokens", "5", "--json", "--device", "reference"]
    assert main(["sample", str(tmp_path / "run"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "to be"
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 0
    assert "without a tokenizer" not in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == content
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] == 300


def test_a_tokenizer_must_fit(tmp_path, refused, bpe):
    source = hugging_face(tmp_path / "hf", TINY, their_tensors(random_arrays(TINY)))
    command = ("import", source, "--out", tmp_path / "run")
    assert "tokenizer gpt2 has 50257 ids, the model 256: it is of another model" in refused(*command, "--tokenizer", "gpt2")
    assert "unknown tokenizer 'byts', did you mean 'bytes'?" in refused(*command, "--tokenizer", "byts")
    assert "a tokenizer 'chars' is made from a text" in refused(*command, "--tokenizer", "chars")
    bpe.save(tmp_path)
    assert f"tokenizer {tmp_path} has 300 ids, " in refused(*command, "--tokenizer", tmp_path)
    assert not (tmp_path / "run").exists()


def test_weights_without_a_tokenizer_come_train_on_shards_and_go(tmp_path, refused, capsys):
    source = hugging_face(tmp_path / "hf", TINY, their_tensors(random_arrays(TINY)))
    assert main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    assert "no tokenizer: it trains on shards of its ids" in capsys.readouterr().out
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shard(shards / "a.bin", [np.arange(3000) % 256], magic=20240520)
    words = ["--steps", "2", "--batch", "2", "--seq", "16", "--optim.warmup", "1", "--out", str(tmp_path / "tuned")]
    assert main(["train", "gpt2-124m", "--init-from", str(tmp_path / "run"), "--data", str(shards), *words]) == 0
    assert "no samples, no bits per byte: the model has no tokenizer" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "tuned"), "--format", "huggingface", "--out", str(out)]) == 0
    assert not (out / "tokenizer.json").exists()
    missing = "the model has 256 ids and no tokenizer, so there is no text"
    assert missing in refused("sample", tmp_path / "tuned", "--prompt", "a")
    (tmp_path / "text").write_text("a text to train on " * 99)
    assert missing in refused("train", "gpt2-124m", "--init-from", source, "--data", tmp_path / "text", *words[:-1], tmp_path / "x")
    write_shard(shards / "a.bin", [np.arange(3000) % 257], magic=20240520)
    assert "has token id 256" in refused("train", "--init-from", source, "--data", shards, *words[:-1], tmp_path / "x")


def test_one_of_two_files_is_not_enough(tmp_path, bpe):
    """Where vocab.json or merges.txt lies alone, tokenizer.json is what counts."""
    files = vocabulary.files(bpe, 20)
    (tmp_path / "tokenizer.json").write_text(json.dumps(one_file(bpe)))
    for alone in ("vocab.json", "merges.txt"):
        (tmp_path / alone).write_bytes(files[alone])
        assert vocabulary.read(tmp_path, 300).hash == bpe.hash
        (tmp_path / alone).unlink()


def test_marks_and_line_ends_of_editors_are_no_part_of_the_merges(tmp_path, bpe):
    files = vocabulary.files(bpe, 20)
    (tmp_path / "vocab.json").write_bytes(b"\xef\xbb\xbf" + files["vocab.json"])
    (tmp_path / "merges.txt").write_bytes(b"\xef\xbb\xbf" + files["merges.txt"].replace(b"\n", b"\r\n"))
    assert vocabulary.read(tmp_path, 300).hash == bpe.hash
