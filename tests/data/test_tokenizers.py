import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data import gpt2
from barellm.data.bpe import BytePairs
from barellm.data.kinds import cached_bpe, check_kind, load_tokenizer, make_tokenizer
from barellm.data.tokenizers import Bytes, Chars, StreamDecoder, vocabulary_hash
from barellm.errors import UserError

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def gpt2_tokenizer(shared):
    return gpt2.Gpt2(gpt2._read_folder(shared))


@given(text=unicode_text)
def test_any_text_comes_back_from_every_kind(text, small_bpe):
    for tokenizer in (Bytes(), Chars(text + "x"), small_bpe):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


def test_characters_are_counted_text_by_text():
    """Of a corpus that memory does not hold."""
    tracemalloc.start()
    try:
        found = make_tokenizer("chars", lambda: (chr(97 + i) * (1 << 20) for i in range(16)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.decode(range(found.vocab_size)) == "abcdefghijklmnop" and peak < 4 << 20


@given(text=unicode_text)
def test_any_text_comes_back_from_gpt2(text, gpt2_tokenizer):
    assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, 399)))
def test_streamed_text_is_the_decoded_text_for_any_ids(ids, small_bpe):
    ids = [i % small_bpe.vocab_size for i in ids]
    stream = StreamDecoder(small_bpe)
    assert "".join([*map(stream.feed, ids), stream.finish()]) == small_bpe.decode(ids)


def test_stream_holds_back_half_a_character():
    stream = StreamDecoder(Bytes())
    assert [stream.feed(byte) for byte in "a€".encode()] == ["a", "", "", "€"]
    stream.feed(0xE2)
    assert stream.finish() == "\ufffd"


def test_gpt2_ids_are_the_published_ones(gpt2_tokenizer):
    assert gpt2_tokenizer.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert (gpt2_tokenizer.vocab_size, gpt2_tokenizer.eot) == (50257, 50256)
    assert gpt2_tokenizer.byte_lengths[50256] == 0


def test_gpt2_encodes_shakespeare_as_tiktoken_does(shared, gpt2_tokenizer):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(str(shared / "gpt2_vocab.bpe"), str(shared / "gpt2_encoder.json"))
    original = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as OpenAI published it
    oracle = tiktoken.Encoding("oracle", pat_str=original, mergeable_ranks=ranks, special_tokens={})
    text = (shared / "tinyshakespeare.txt").read_text()
    ids = gpt2_tokenizer.encode(text)
    assert ids.tolist() == oracle.encode_ordinary(text)
    assert len(ids) == 301_966 + 36_059  # nanoGPT's counts of both parts


def test_special_token_names_in_a_text_are_text(gpt2_tokenizer, small_bpe):
    for tokenizer in (gpt2_tokenizer, small_bpe):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize("make", [Bytes, lambda: Chars("häß🙂\n"), lambda: None], ids=["bytes", "chars", "bpe"])
def test_saved_tokenizer_is_the_same_tokenizer(make, tmp_path, small_bpe):
    tokenizer = make() or small_bpe
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.hash == tokenizer.hash and loaded.eot == tokenizer.eot
    assert loaded.encode("hä\n").tolist() == tokenizer.encode("hä\n").tolist()


def test_saved_gpt2_needs_no_vocabulary_files(tmp_path, gpt2_tokenizer):
    gpt2_tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("Hello").tolist() == [15496]


def test_equal_hash_means_equal_vocabulary():
    assert Chars("ab").hash == Chars("ba").hash != Chars("abc").hash
    assert BytePairs([b"a", b"bc", b""]).hash != BytePairs([b"ab", b"c", b""]).hash


def test_chars_are_the_sorted_distinct_ones():
    assert Chars("banana").characters == ["a", "b", "n"]
    assert Chars("banana").encode("nab").tolist() == [2, 0, 1]


def damage(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda path: path.unlink(), "cannot read tokenizer .*: No such file"),
        (lambda path: path.write_text("{"), "is damaged"),
        (lambda path: path.write_text("[]"), "is damaged"),
        (lambda path: damage(path, format=99), "has format 99, this version reads 1"),
        (lambda path: damage(path, kind="words"), "is damaged"),
        (lambda path: damage(path, tokens=["YQ=="]), "is damaged: its tokens have hash"),
        (lambda path: damage(path, tokens=["not base64"]), "is damaged"),
    ],
)
def test_damaged_tokenizer_file_is_refused_in_one_line(harm, message, tmp_path):
    Chars("abc").save(tmp_path)
    harm(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_tokenizer_gets_the_nearest_name():
    with pytest.raises(UserError, match="unknown tokenizer 'gpt-2', did you mean 'gpt2'"):
        check_kind("gpt-2")
    with pytest.raises(UserError, match=r"unknown tokenizer '' \(known: bytes, chars, bpe, gpt2"):
        check_kind("")


def test_what_has_no_id_is_refused():
    with pytest.raises(UserError, match="character 'q' at position 2 is not among the 3 characters"):
        Chars("abc").encode("abq")
    with pytest.raises(UserError, match=re.escape(r"lone surrogate '\udcff' at position 1")):
        Bytes().encode("a\udcff")
    with pytest.raises(UserError, match=r"token id 256 is beyond the vocabulary of tokenizer bytes \(256 ids\)"):
        Bytes().decode([0, 256])
    with pytest.raises(UserError, match="token id -1"):
        Bytes().decode([-1])


def test_bpe_has_all_bytes_merges_and_an_end(small_bpe):
    assert {bytes([i]) for i in range(256)} <= set(small_bpe.tokens)
    assert 256 < small_bpe.vocab_size <= 400
    assert small_bpe.eot == small_bpe.vocab_size - 1 and small_bpe.tokens[-1] == b""


def test_bpe_is_the_same_in_every_process():
    script = "from barellm.data.bpe import trained_bpe; import inspect, argparse; text = inspect.getsource(argparse);"
    script += "print(trained_bpe(lambda: [text], vocab=900).hash)"
    hashes = set()
    for seed, parallel in (("1", "true"), ("2", "false"), ("3", "true")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel}
        hashes.add(subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True).stdout)
    assert len(hashes) == 1 and hashes.pop()


def test_trained_bpe_comes_from_the_cache_the_second_time(cache):
    trained = []

    def texts():
        trained.append(1)
        return ["some words and some more words"]

    first = cached_bpe(texts, vocab=270, key="k")
    assert cached_bpe(texts, vocab=270, key="k").hash == first.hash and len(trained) == 1
    (file,) = cache.rglob("tokenizer.json")
    file.write_text("broken")
    assert cached_bpe(texts, vocab=270, key="k").hash == first.hash and len(trained) == 2
    assert load_tokenizer(file.parent).hash == first.hash


def test_bpe_refuses_a_vocabulary_below_all_bytes():
    with pytest.raises(UserError, match=r"data.bpe_vocab is 256, expected at least 257"):
        make_tokenizer("bpe", lambda: ["text"], bpe_vocab=256)


@pytest.mark.alone
def test_interrupt_ends_bpe_training_at_once():
    script = (
        "import random; from barellm.data.bpe import trained_bpe\n"
        "r = random.Random(0); text = ' '.join(str(r.random()) for _ in range(300_000))\n"
        "def texts():\n"
        "    yield text\n"
        "    print('merging', flush=True)\n"
        "trained_bpe(texts, vocab=30_000)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout.readline() == b"merging\n"  # all text is handed over: from here no Python runs in the library
    time.sleep(0.2)
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) != 0
    assert time.monotonic() - start < 1.0


def test_gpt2_vocabulary_is_found_under_every_name(shared, tmp_path, monkeypatch):
    import base64

    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(shared))
    tokens = gpt2.Gpt2().tokens
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens[:-1])]
    merges = (shared / "gpt2_vocab.bpe").read_bytes()
    for name, content in {"gpt2.tiktoken": b"\n".join(lines), "merges.txt": merges, "vocab.bpe": merges}.items():
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(content)
        monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(folder))
        assert gpt2.Gpt2().tokens == tokens


@pytest.mark.parametrize("content", [b"#version\na b\n", b"\xff\xfe", b"", "#\nя я\n".encode()])
def test_another_vocabulary_is_not_taken_for_gpt2(content, tmp_path, monkeypatch):
    (tmp_path / "vocab.bpe").write_bytes(content)
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(tmp_path))
    with pytest.raises(UserError, match=r"vocab.bpe is not GPT-2's"):
        gpt2.Gpt2().encode("text")


def test_missing_gpt2_vocabulary_says_what_to_put_where(tmp_path, monkeypatch, cache, capsys):
    import tiktoken.load

    def offline(*_):
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(tiktoken.load, "read_file_cached", offline)
    with pytest.raises(UserError, match=r"download failed \(ConnectionError\): put vocab.bpe .* BARELLM_GPT2_VOCAB") as e:
        gpt2.Gpt2().encode_many(["text", "more", "of it"])
    assert capsys.readouterr().err.count("downloading") == 1  # not once a thread
    assert str(cache / "gpt2") in str(e.value) and "\n" not in str(e.value)
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(tmp_path))
    with pytest.raises(UserError, match=r"expected a folder with one of vocab.bpe"):
        gpt2.Gpt2().encode("text")


def test_downloaded_gpt2_vocabulary_is_kept(shared, monkeypatch, capsys):
    import tiktoken.load

    requested = []

    def download(url, checksum):
        requested.append((url, checksum))
        return (shared / "gpt2_vocab.bpe").read_bytes()

    monkeypatch.setattr(tiktoken.load, "read_file_cached", download)
    for _ in range(2):
        assert gpt2.Gpt2().encode("Hello").tolist() == [15496]
    assert requested == [(gpt2.URL, gpt2.URL_SHA256)]
    assert "downloading GPT-2's vocabulary" in capsys.readouterr().err


def test_gpt2_without_its_vocabulary_can_be_saved_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(tmp_path / "nothing"))
    tokenizer = gpt2.Gpt2()
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.hash) == (50257, 50256, gpt2.HASH)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == gpt2.HASH


@pytest.mark.parametrize("eot", [400, 1 << 27, -1, 1.5, True, "3"])
def test_an_end_of_text_beyond_the_tokens_is_damage(eot, small_bpe, tmp_path):
    small_bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_bytes())
    tokens = [base64.b64decode(token) for token in content["tokens"]]
    tokens[1] = tokens[-1] = b""  # whatever of Python's places the id names
    encoded = [base64.b64encode(token).decode() for token in tokens]
    path.write_text(json.dumps(content | {"eot": eot, "tokens": encoded, "hash": vocabulary_hash("bpe", eot, tokens)}))
    with pytest.raises(UserError, match=r"tokenizer.json is damaged: not a tokenizer"):
        load_tokenizer(tmp_path)
