import argparse
import json

import pytest

from barellm.cli import prepare as command
from barellm.config import DataConfig
from barellm.data.shards import open_shard
from barellm.data.sources import prepare
from barellm.errors import UserError

TEXT = "a text of some words\n" * 50


def run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_prepared_shards_are_what_training_on_the_text_would_see(kind, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(text, "--out", out, "--tokenizer", kind, "--vocab", 280, "--shard-tokens", 100) == 0
    assert "validation tokens" in capsys.readouterr().out
    names = sorted(path.name for path in out.iterdir())
    assert names[:2] == ["out_train_000001.bin", "out_train_000002.bin"]
    assert {"out_val_000000.bin", "tokenizer.json", "shards.json"} <= set(names)
    assert len(open_shard(out / names[0])) == 100
    direct = prepare(DataConfig(source=str(text), tokenizer=kind, bpe_vocab=280))
    shards = prepare(DataConfig(source=str(out), tokenizer=kind))
    assert shards.tokenizer.hash == direct.tokenizer.hash
    for a, b in ((direct.train, shards.train), (direct.val, shards.val)):
        assert a.array(0, len(a)).tolist() == b.array(0, len(b)).tolist()


def test_json_is_one_object(text, tmp_path, capsys):
    run(text, text, "--out", tmp_path / "out", "--tokenizer", "bytes", "--val-fraction", 0.5, "--json")
    result = json.loads(capsys.readouterr().out)
    assert (result["train_tokens"], result["val_tokens"], result["shards"]) == (len(TEXT), len(TEXT), 2)
    assert (result["tokenizer"], result["vocab_size"]) == ("bytes", 256)


def test_an_interrupted_run_leaves_no_folder(text, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("barellm.data.tokenizers.Bytes.save", interrupted)
        run(text, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert run(text, "--out", tmp_path / "out", "--tokenizer", "bytes") == 0


def test_an_empty_folder_may_be_there_a_full_one_not(text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert run(text, "--out", out, "--tokenizer", "bytes") == 0
    with pytest.raises(UserError, match="out is there and not an empty folder"):
        run(text, "--out", out, "--tokenizer", "bytes")
    with pytest.raises(UserError, match=r"text.txt is there and not an empty folder"):
        run(text, "--out", text, "--tokenizer", "bytes")
    (out / "out_train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"out lacks out_train_000001.bin, which its shards.json lists"):
        prepare(DataConfig(source=str(out), tokenizer="bytes"))


def test_mistakes_are_named(text, tmp_path):
    out = tmp_path / "out"
    for arguments, message in (
        (["--tokenizer", "gpt3"], "unknown tokenizer 'gpt3', did you mean 'gpt2'"),
        (["--tokenizer", "bytes", "--val-fraction", 0], "data.val_fraction is 0.0"),
        (["--tokenizer", "bytes", "--shard-tokens", 0], "--shard-tokens is 0, expected 1 to 2147483647"),
        (["stdlib", "--tokenizer", "bytes"], "source 'stdlib' stands alone"),
        ([tmp_path / "no", "--tokenizer", "bytes"], "no such file or folder"),
    ):
        with pytest.raises(UserError, match=message):
            run(text, *arguments, "--out", out)
    assert not out.exists()
    run(text, "--out", out, "--tokenizer", "bytes")
    with pytest.raises(UserError, match="holds token shards already"):
        run(out, "--out", tmp_path / "again", "--tokenizer", "bytes")


def test_a_long_text_says_how_far_it_is(text, tmp_path, monkeypatch, capsys):
    """Bytes done of all bytes of both parts, the validation part first; a short text says nothing."""
    monkeypatch.setattr("barellm.data.sources.GROUP", 100)
    monkeypatch.setattr("barellm.data.corpus.BLOCK", 100)
    text.write_text("é words\n" * 500)
    assert run(text, "--out", tmp_path / "a", "--tokenizer", "bytes") == 0
    assert "tokenizing: " not in capsys.readouterr().out
    seen = []
    monkeypatch.setattr("barellm.training.console.Console.tokenizing", lambda self: lambda *done: seen.append(done))
    assert run(text, "--out", tmp_path / "b", "--tokenizer", "bytes") == 0
    done = [nbytes for nbytes, _ in seen]
    assert {total for _, total in seen} == {4500} and done[-1] == 4500 and len(done) > 20
    assert done == sorted(done) and done[0] < 450
