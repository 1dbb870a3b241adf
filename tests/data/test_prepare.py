import fcntl
import gzip
import io
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from barellm.cli import prepare as command
from barellm.cli.parsing.options import Parser
from barellm.config import DataConfig
from barellm.data.shards import open_shard
from barellm.data.sources import prepare
from barellm.data.staging_dir import StagingDir
from barellm.data.writing import ShardWriter
from barellm.errors import UserError

TEXT = "a text of some words\n" * 50


def run(*arguments) -> int:
    parser = Parser(prog="barellm prepare")
    command.configure(parser)
    return command.run(parser.parse([str(argument) for argument in arguments]))


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
    (tmp_path / "other.txt").write_text(TEXT)
    more = ["--tokenizer", "bytes", "--val-fraction", 0.5, "--json"]
    run(text, tmp_path / "other.txt", tmp_path / "t*.txt", "--out", tmp_path / "out", *more)
    result = json.loads(capsys.readouterr().out)
    assert (result["train_tokens"], result["val_tokens"], result["shards"]) == (len(TEXT), len(TEXT), 2)
    assert (result["tokenizer"], result["vocab_size"]) == ("bytes", 256)


def test_the_same_command_again_finds_its_work_done(text, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert run(text, "--out", out, "--tokenizer", "bytes") == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run(text, "--out", out, "--tokenizer", "bytes") == 0
    assert "was made by this command" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    for changed in (["--val-fraction", 0.2], ["--shard-tokens", 9], ["--val-tokens", 9], ["--separator", "x"]):
        with pytest.raises(UserError, match="out is there and not an empty folder"):
            run(text, "--out", out, "--tokenizer", "bytes", *changed)
    text.write_text(TEXT + "!")
    with pytest.raises(UserError, match="out is there and not an empty folder"):
        run(text, "--out", out, "--tokenizer", "bytes")
    with pytest.raises(UserError, match=r"text.txt is there and not an empty folder"):
        run(text, "--out", text, "--tokenizer", "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_training_refuses_shards_that_are_not_those_that_were_made(text, tmp_path):
    out = tmp_path / "out"
    run(text, "--out", out, "--tokenizer", "bytes")
    config = DataConfig(source=str(out), tokenizer="bytes")
    train, manifest = out / "out_train_000001.bin", out / "shards.json"
    whole, listed = train.read_bytes(), manifest.read_text()
    for content, message in (
        (whole[:-2] + b"a\0", "train_000001.bin is damaged: its tokens have xxh3_128"),
        (whole[:8] + (len(TEXT) // 10).to_bytes(4, "little") + whole[12 : 1024 + len(TEXT) // 5], "tokens, shards.json lists"),
    ):
        train.write_bytes(content)
        with pytest.raises(UserError, match=message):
            prepare(config)
    train.write_bytes(whole)
    prepare(config)
    (out / "more_train_000002.bin").write_bytes(whole)
    with pytest.raises(UserError, match=r"more_train_000002.bin is no shard that shards.json beside it lists"):
        prepare(config)
    (out / "more_train_000002.bin").unlink()
    content = json.loads(listed)
    for key, value, message in (
        ("format", 1, "has format 1, this version reads 2"),
        ("shards", 3, "shards.json is damaged"),
        ("shards", {name: one | {"tokens": 1.5} for name, one in content["shards"].items()}, "shards.json is damaged"),
        ("shards", {name: one | {"xxh3_128": 3} for name, one in content["shards"].items()}, "shards.json is damaged"),
        ("tokenizer", {"hash": 3}, "shards.json is damaged"),
        ("tokenizer", {"hash": "abc"}, "lists a tokenizer with hash abc, used is bytes"),
    ):
        manifest.write_text(json.dumps(content | {key: value}))
        with pytest.raises(UserError, match=message):
            prepare(config)
    manifest.write_text(listed)
    train.unlink()
    with pytest.raises(UserError, match=r"out lacks out_train_000001.bin, which its shards.json lists"):
        prepare(config)


RECORDS = [f"story {i}: " + "words of it " * (i % 7) for i in range(60)] + ["", "last — 好"]


def ids(out) -> bytes:
    """The tokens of all shards, and what the manifest says of them."""
    shards = [open_shard(path).tobytes() for path in sorted(out.glob("*.bin"))]
    return b"|".join(shards) + str({k: v for k, v in manifest(out).items() if k in ("documents", "tokens")}).encode()


def manifest(out) -> dict:
    return json.loads((out / "shards.json").read_bytes())


def jsonl(records, field="text") -> bytes:
    return "".join(json.dumps({"id": 3, field: text}) + "\n" for text in records).encode()


def test_every_form_of_the_same_records_gives_the_same_shards(tmp_path, monkeypatch):
    """JSON lines as they are, in gzip, in two files of a pattern and of a folder, from standard input with another field, plain
    text with separators, an array, and a packed table."""
    lines = jsonl(RECORDS)
    half = len(jsonl(RECORDS[:30]))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "1.ndjson").write_bytes(lines[:half])
    (tmp_path / "parts" / "deep" / "2.jsonl").write_bytes(lines[half:])
    (tmp_path / "b.txt").write_text("<|end|>".join(RECORDS))
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in RECORDS]), encoding="utf-8-sig")
    rows = "".join(f'{i}\t"{text}"\n' for i, text in enumerate(RECORDS))
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(f"id\ttext\n{rows}".encode()))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(jsonl(RECORDS, "story"))))
    common = ["--tokenizer", "bpe", "--vocab", 300, "--shard-tokens", 200]
    for name, words in {
        "plain": [tmp_path / "a.jsonl"],
        "gzip": [tmp_path / "a.jsonl.gz"],
        "pattern": [tmp_path / "parts" / "**" / "*.*j*"],
        "folder": [tmp_path / "parts"],
        "stdin": ["-", "--format", "jsonl", "--field", "story"],
        "separated": [tmp_path / "b.txt", "--separator", r"<\x7cend\u007c>"],
        "array": [tmp_path / "a.json"],
        "table": [tmp_path / "a.tsv.gz"],
    }.items():
        assert run(*words, "--out", tmp_path / "out" / name, *common) == 0
    results = {ids(path) for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert len(results) == 1
    out = tmp_path / "out" / "plain"
    found = manifest(out)
    assert (found["documents"], found["empty_documents"]) == (61, 1)
    assert found["inputs"] == [
        {"path": str(tmp_path / "a.jsonl"), "bytes": len(lines), "xxh3_128": xxhash.xxh3_128_hexdigest(lines)}
    ]
    data = prepare(DataConfig(source=str(out), tokenizer="bpe"))
    tokens = np.concatenate([data.train.array(0, len(data.train)), data.val.array(0, len(data.val))])
    documents = np.split(tokens, np.flatnonzero(tokens == data.tokenizer.eot))[1:]
    assert [data.tokenizer.decode(one[1:]) for one in documents] == [text for text in RECORDS if text]
    val = b"".join(text.encode() for text in RECORDS)[-data.tokenizer.byte_lengths[data.val.array(0, len(data.val))].sum() :]
    assert data.val.array(0, 1)[0] == data.tokenizer.eot and len(val) <= found["text_bytes"] / 10


def test_kept_separators_and_first_tokens_give_llmcs_shakespeare(shared, tmp_path, monkeypatch):
    """llm.c's tiny_shakespeare_{train,val}.bin have 305,260 and 32,768 tokens, an end of text before each section."""
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(shared))
    options = ["--separator", r"\n\n", "--keep-separator", "--val-tokens", 32768]
    assert run(shared / "tinyshakespeare.txt", "--out", tmp_path / "out", *options) == 0
    assert manifest(tmp_path / "out")["tokens"] == {"val": 32_768, "train": 305_260}
    first = open_shard(tmp_path / "out" / "out_val_000000.bin")
    assert first[:6].tolist() == [50256, 5962, 22307, 25, 198, 8421] and first.tolist().count(50256) > 500


@pytest.mark.parametrize("kind", ["gz", "jsonl", "json"])
@pytest.mark.extended
def test_a_preparation_killed_anywhere_ends_with_the_same_bytes(kind, tmp_path):
    """kill -9 before the Nth write, sync or rename, each time further on, until one comes to the end."""
    source = tmp_path / f"a.{kind}"
    forms = {"jsonl": jsonl(RECORDS), "json": json.dumps([{"text": text} for text in RECORDS]).encode()}
    content = forms.get(kind, " ".join(RECORDS).encode())
    source.write_bytes(gzip.compress(content) if kind == "gz" else content)
    script = (
        "import os, signal, sys\n"
        "from barellm.data import encoding, reading, staging_dir, writing\n"
        "from barellm.cli.main import main\n"
        "reading.BLOCK, encoding.GROUP, writing.SYNC_S = 60, 100, 0.0\n"
        "left = int(sys.argv[1])\n"
        "def deadly(real):\n"
        "    def call(*args, **more):\n"
        "        global left\n"
        "        left -= 1\n"
        "        if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return real(*args, **more)\n"
        "    return call\n"
        "for name in ('fsync', 'rename', 'replace', 'truncate'): setattr(os, name, deadly(getattr(os, name)))\n"
        "writing.ShardWriter.write = deadly(writing.ShardWriter.write)\n"
        "sys.exit(main(sys.argv[2:]))"
    )
    options = ["--tokenizer", "bpe", "--vocab", "270", "--shard-tokens", "170"]

    def prepared(calls: int) -> int:
        command = [sys.executable, "-c", script, str(calls), "prepare", str(source), "--out", "out", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    assert prepared(0) == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(whole) > 5
    (tmp_path / "out").rename(tmp_path / "whole")
    (tmp_path / "out.part" / "shards").mkdir(parents=True)
    (tmp_path / "out.part" / "shards" / ".tokenizer.json.1.ab.tmp").write_text("half")
    for calls in (7, 23, 31, 12, 40, 17, 3000):
        if prepared(calls) == 0:
            break
        assert not (tmp_path / "out").exists() or not (tmp_path / "out.part" / "shards").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    assert not (tmp_path / "out.part").exists()


def test_ctrl_c_keeps_what_was_done_and_another_command_is_refused_there(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("barellm.data.encoding.GROUP", 100)
    monkeypatch.setattr("barellm.data.reading.BLOCK", 100)
    text.write_text(TEXT * 10)
    out, seen = tmp_path / "out", []

    def interrupted(done, total):
        seen.append(done)
        if len(seen) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("barellm.training.console.Console.megabytes", lambda self, doing: interrupted)
        run(text, "--out", out, "--tokenizer", "bytes")
    assert "the same command resumes from" in capsys.readouterr().out and not out.exists()
    with pytest.raises(UserError, match=r"out.part was begun with another text, tokenizer or options"):
        run(text, "--out", out, "--tokenizer", "chars")
    again = []
    monkeypatch.setattr("barellm.training.console.Console.megabytes", lambda self, doing: lambda done, total: again.append(done))
    assert run(text, "--out", out, "--tokenizer", "bytes") == 0
    assert again[0] > seen[-2] and not (tmp_path / "out.part").exists()
    state = tmp_path / "out2.part" / "state.json"
    state.parent.mkdir()
    for content in ("{}", "[" * 100_000, '{"identity": "x", "at": 1.5}', '{"identity": "x", "train": true}'):
        state.write_text(content)
        with pytest.raises(UserError, match=r"state.json is damaged: remove .*out2.part and begin again"):
            run(text, "--out", tmp_path / "out2", "--tokenizer", "bytes")


def test_two_processes_do_not_prepare_the_same_folder(text, tmp_path):
    with StagingDir(tmp_path / "out"), pytest.raises(UserError, match=r"another barellm process is preparing .*out"):
        run(text, "--out", tmp_path / "out", "--tokenizer", "bytes")


def test_a_lock_on_a_folder_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """The other process ended, and removed its folder, between our look at it and our lock."""
    real, taken = fcntl.flock, []

    def flock(lock, how):
        taken.append(how)
        if len(taken) == 1:
            (tmp_path / "out.part").rmdir()
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with StagingDir(tmp_path / "out") as work:
        assert len(taken) == 2 and work.folder.is_dir()
        with pytest.raises(UserError, match="another barellm process is preparing"), StagingDir(tmp_path / "out"):
            pass
        assert work.folder.is_dir()
    assert not work.folder.exists()


def test_shards_of_a_name_with_brackets_that_are_too_many_are_removed(tmp_path):
    (tmp_path / "a[1]_train_000007.bin").write_bytes(b"left over")
    ShardWriter(tmp_path, "a[1]", magic=20240520, shard_tokens=10, counts={"val": 0, "train": 0})
    assert not list(tmp_path.iterdir())


def test_mistakes_are_named(text, tmp_path):
    out = tmp_path / "out"
    for arguments, message in (
        (["--tokenizer", "gpt3"], "unknown tokenizer 'gpt3', did you mean 'gpt2'"),
        (["--tokenizer", "bytes", "--val-fraction", 0], "data.val_fraction is 0.0"),
        (["--tokenizer", "bytes", "--shard-tokens", 0], "--shard-tokens is 0, expected 1 to 2147483647"),
        (["stdlib", "--tokenizer", "bytes"], "source 'stdlib' stands alone"),
        ([tmp_path / "no", "--tokenizer", "bytes"], "no such file or folder"),
        (["--tokenizer", "bytes", "--val-tokens", 5, "--val-fraction", 0.1], "exclude each other"),
        (["--tokenizer", "bytes", "--val-tokens", len(TEXT)], "has no text for the part 'train': it has 1050 tokens"),
        (["--tokenizer", "bytes", "--val-tokens", -1], "--val-tokens is -1, expected at least 0"),
        (["--tokenizer", "bytes", "--format", "jsonn"], "--format is 'jsonn', did you mean 'json'"),
        (["--tokenizer", "bytes", "--keep-separator"], "--keep-separator needs --separator"),
        (["--tokenizer", "bytes", "--separator", "\\x1"], "in the middle of an escape"),
        (["--tokenizer", "bytes", "--separator", "zz"], "has no text for the part 'val': it has 1 documents"),
        (["-", "-", "--tokenizer", "bytes"], "named twice"),
    ):
        with pytest.raises(UserError, match=message):
            run(text, *arguments, "--out", out)
    assert not out.exists() and not (tmp_path / "out.part").exists()
    run(text, "--out", out, "--tokenizer", "bytes")
    with pytest.raises(UserError, match="holds token shards already"):
        run(out, "--out", tmp_path / "again", "--tokenizer", "bytes")


def test_a_vocabulary_that_is_nowhere_leaves_nothing_begun(text, tmp_path, monkeypatch, capsys):
    import tiktoken.load

    def offline(*_):
        raise ConnectionError

    monkeypatch.setattr(tiktoken.load, "read_file_cached", offline)
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="GPT-2's vocabulary is not on this machine"):
        run(text, "--out", tmp_path / "out", "--tokenizer", "gpt2")
    assert not list(tmp_path.glob("out*")) and capsys.readouterr().err.count("downloading") == 1


def test_a_long_text_says_how_far_it_is(text, tmp_path, monkeypatch, capsys):
    """Bytes done of all bytes of both parts, the validation part first; a short text says nothing."""
    monkeypatch.setattr("barellm.data.encoding.GROUP", 100)
    monkeypatch.setattr("barellm.data.reading.BLOCK", 100)
    text.write_text("é words\n" * 500)
    assert run(text, "--out", tmp_path / "a", "--tokenizer", "bytes") == 0
    assert "tokenizing: " not in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(
        "barellm.training.console.Console.megabytes",
        lambda self, doing: (lambda *done: seen.append(done)) if doing == "tokenizing" else lambda *done: None,
    )
    assert run(text, "--out", tmp_path / "b", "--tokenizer", "bytes") == 0
    done = [nbytes for nbytes, _ in seen]
    assert {total for _, total in seen} == {4500} and done[-1] == 4500 and len(done) > 20
    assert done == sorted(done) and done[0] < 450


def test_files_behind_a_link_in_place_of_the_unfinished_folder_stay(text, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ".draft.tmp").write_text("own")
    (tmp_path / "out.part").symlink_to(tmp_path / "own")
    with pytest.raises(UserError, match=r"out.part is a link, expected the folder of an unfinished prepare"):
        run(text, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert (tmp_path / "own" / ".draft.tmp").exists()


TALK = [
    {"role": "user", "content": "What is it?\x1b[2J " + "word " * 20},
    {"role": "assistant", "content": "No.", "weight": 0},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "A naïve\nfaçade"},
]


def test_examples_are_shown_with_what_is_trained(tmp_path, capsys, monkeypatch):
    """In brackets, or in a terminal in colour and the rest dim, without NO_COLOR; in 80 columns, and no code of a stranger's."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    shown = [path, "--tokenizer", "bpe", "--vocab", 300, "--show", 5]
    assert run(*shown) == 0
    plain = capsys.readouterr().out
    assert "example 2 of 2" in plain and "  | <|endoftext|>1+1=[2<|endoftext|>]" in plain and "a.jsonl: 2 examples" in plain
    assert "Assistant: No.<|endoftext|>User: Sure?\n  | Assistant:[ A naïve\n  | façade<|endoftext|>]" in plain and "\\x1b" in plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run(*shown) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[2m<|endoftext|>1+1=\x1b[0m\x1b[1;32m2<|endoftext|>\x1b[0m" in coloured and "\x1b[2J" not in coloured
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured.splitlines()]
    assert lines[:3] == plain.splitlines()[:3] and lines[4] == "  | Assistant: A naïve"
    assert max(len(line) for line in [*lines, *plain.splitlines()] if line.startswith("  |")) == 80
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*shown) == 0 and capsys.readouterr().out.count("[2<") == 1
    assert run(*shown, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row["tokens"]) for row in rows] == [len(row["trained"]) for row in rows] and sum(rows[1]["trained"]) == 2
    with pytest.raises(UserError, match="is a text: all of its tokens are trained"):
        (tmp_path / "b.txt").write_text(TEXT)
        run(tmp_path / "b.txt", "--show", 1)
    with pytest.raises(UserError, match="--out DIR is missing"):
        run(path)


@pytest.mark.parametrize("place", ["a.jsonl", "folder", "folder/*.jsonl"])
def test_records_that_are_neither_text_nor_examples_are_named(tmp_path, place):
    file = tmp_path / ("a.jsonl" if place == "a.jsonl" else "folder/a.jsonl")
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"question": "1+1", "response": "2"}\n' * 9)
    expected = (
        r"a.jsonl, line 1 has no text in a field 'text', it has: question, response; expected text, or prompt and answer .*messages"
    )
    with pytest.raises(UserError, match=expected):
        run(tmp_path / place, "--show", 1)
    with pytest.raises(UserError, match=expected):
        prepare(DataConfig(source=str(tmp_path / place), tokenizer="bytes"))
