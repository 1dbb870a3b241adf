import gzip
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from barellm.config import DataConfig
from barellm.data import sources
from barellm.data.corpus import stdlib_corpus
from barellm.data.kinds import load_tokenizer
from barellm.data.loader import Validation
from barellm.data.shards import open_shard, write_shard
from barellm.data.sources import prepare
from barellm.data.tokenizers import Bytes, Chars
from barellm.errors import UserError

TEXT = "".join(f"line {i} of a text — with some words\n" for i in range(200))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def tokens(stream) -> list[int]:
    return stream.array(0, len(stream)).tolist()


def val_text(data) -> bytes:
    return data.tokenizer.decode_bytes(tokens(data.val))


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_text_comes_out_of_both_parts_as_it_went_in(kind, text):
    data = prepare(DataConfig(source=str(text), tokenizer=kind, bpe_vocab=300, val_fraction=0.25))
    cut = int(len(TEXT) * 0.75)
    assert data.tokenizer.name == kind
    assert data.tokenizer.decode(tokens(data.train)) == TEXT[:cut]
    assert val_text(data) == TEXT[cut:].encode()
    targets = data.tokenizer.decode_bytes(tokens(data.val)[1:])
    assert Validation(data.val, seq=16).text_bytes(data.byte_lengths) == len(targets)


def test_every_document_follows_an_end_of_text(tmp_path):
    for name in ("b", "a", "folder/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(f"text {name}. " * 10)
    data = prepare(DataConfig(source=str(tmp_path), tokenizer="bpe", bpe_vocab=270, val_fraction=0.01))
    eot = data.tokenizer.eot
    ids = tokens(data.train) + tokens(data.val)
    documents = [data.tokenizer.decode(part) for part in split(ids, eot)]
    assert documents == ["", *(f"text {name}. " * 10 for name in ("a", "b", "folder/c"))]
    assert eot not in tokens(data.val)  # it goes on where the training part stopped
    assert b"text" not in val_text(data)[:4]


def split(ids, at):
    parts = [[]]
    for i in ids:
        if i == at:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts


def test_bpe_learns_nothing_from_the_validation_part(tmp_path):
    (tmp_path / "a.txt").write_text("one two " * 500 + "three " * 100)
    data = prepare(DataConfig(source=str(tmp_path), tokenizer="bpe", bpe_vocab=400, val_fraction=600 / 4600))
    assert b" two" in data.tokenizer.tokens and b" three" not in data.tokenizer.tokens
    assert val_text(data) == b"three " * 100


def test_small_groups_give_the_same_tokens(text, monkeypatch):
    config = DataConfig(source=str(text), tokenizer="bpe", bpe_vocab=300)
    whole = prepare(config)
    monkeypatch.setattr("barellm.data.encoding.GROUP", 50)
    monkeypatch.setattr("barellm.data.reading.BLOCK", 40)
    monkeypatch.setattr(sources, "FORMAT", 99)  # another cache entry
    again = prepare(config)
    assert again.hash != whole.hash
    assert tokens(again.train) == tokens(whole.train) and tokens(again.val) == tokens(whole.val)


def test_the_second_time_comes_from_the_cache(text):
    lines = []
    config = DataConfig(source=str(text), tokenizer="bpe", bpe_vocab=300)
    first = prepare(config, report=lines.append)
    assert [line.split()[0] for line in lines] == ["training", "tokenizing"]
    second = prepare(config, report=lines.append)
    assert len(lines) == 2
    assert second.hash == first.hash and tokens(second.train) == tokens(first.train)
    text.write_text(TEXT + "!")
    assert prepare(config).hash != first.hash


def test_a_damaged_cache_entry_is_made_again(text, cache):
    config = DataConfig(source=str(text), tokenizer="bytes")
    expected = tokens(prepare(config).train)
    (shard,) = cache.rglob("*_train_*.bin")
    for content in (shard.read_bytes()[:-1], b"", np.zeros(2000, np.uint8).tobytes()):
        shard.write_bytes(content)
        assert tokens(prepare(config).train) == expected
    manifest = shard.parent / "shards.json"
    for harm in (shard.unlink, manifest.unlink, lambda: manifest.write_text("3"), lambda: manifest.write_text("{}")):
        harm()
        assert tokens(prepare(config).train) == expected


def test_a_checkpoints_tokenizer_is_used_as_it_is(text):
    tokenizer = Chars(TEXT + "ẞ")
    data = prepare(DataConfig(source=str(text), tokenizer="chars"), tokenizer=tokenizer)
    assert data.tokenizer is tokenizer
    with pytest.raises(UserError, match=r"character .* is not among the 1 characters"):
        prepare(DataConfig(source=str(text)), tokenizer=Chars("\n"))


def test_a_folder_with_a_tokenizer_serves_as_one(text, tmp_path):
    Chars(TEXT).save(tmp_path)
    assert prepare(DataConfig(source=str(text), tokenizer=str(tmp_path))).tokenizer.hash == Chars(TEXT).hash


def test_processes_that_prepare_at_once_get_the_same(text, cache):
    script = (
        "import sys; from barellm.config import DataConfig; from barellm.data.sources import prepare\n"
        "data = prepare(DataConfig(source=sys.argv[1], tokenizer='bpe', bpe_vocab=300))\n"
        "print(data.hash, data.tokenizer.hash, len(data.train), int(data.train.array(0, len(data.train)).sum()))"
    )
    command = [sys.executable, "-c", script, str(text)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    results = [child.communicate() for child in children]
    assert len({out for out, _ in results}) == 1 and results[0][0], results
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize("calls", range(0, 24, 3))
def test_a_killed_preparation_leaves_nothing_that_is_believed(calls, text, cache):
    """kill -9 before the Nth rename or sync, then again without."""
    script = (
        "import os, signal, sys; from barellm.config import DataConfig; from barellm.data.sources import prepare\n"
        "left = int(sys.argv[2])\n"
        "def deadly(real):\n"
        "    def call(*args):\n"
        "        global left\n"
        "        left -= 1\n"
        "        if left < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return real(*args)\n"
        "    return call\n"
        "for name in ('fsync', 'rename', 'replace', 'mkdir'): setattr(os, name, deadly(getattr(os, name)))\n"
        "prepare(DataConfig(source=sys.argv[1], tokenizer='bpe', bpe_vocab=300))"
    )
    child = subprocess.run([sys.executable, "-c", script, str(text), str(calls)], capture_output=True, check=False)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    data = prepare(DataConfig(source=str(text), tokenizer="bpe", bpe_vocab=300))
    assert data.tokenizer.decode(tokens(data.train)) + val_text(data).decode() == TEXT


@pytest.mark.extended
def test_the_default_source_is_this_pythons_library():
    data = prepare(DataConfig())
    corpus = stdlib_corpus(0.1)
    originals = b"".join(piece.path.read_bytes() for piece in corpus.val)
    assert data.tokenizer.vocab_size == 2048
    assert val_text(data) == originals
    eot = data.tokenizer.eot
    assert tokens(data.train).count(eot) == len(corpus.train) and tokens(data.val)[0] == eot
    assert 1.5 < 8 * len(gzip.compress(originals, 9)) / len(originals) < 2.6
    assert len(originals) / len(data.val) > 2.5  # bytes a token


def test_gpt2_tokens_of_shakespeare_are_nanogpts(shared, monkeypatch):
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(shared))
    data = prepare(DataConfig(source=str(shared / "tinyshakespeare.txt"), tokenizer="gpt2"))
    assert (len(data.train), len(data.val)) == (1 + 301_966, 36_059)  # one end-of-text before the document


def test_characters_of_shakespeare_are_nanogpts(shared):
    data = prepare(DataConfig(source=str(shared / "tinyshakespeare.txt"), tokenizer="chars"))
    assert (data.tokenizer.vocab_size, len(data.train), len(data.val)) == (65, 1_003_854, 111_540)
    assert data.train.array(0, 10).tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58, 47]  # "First Citi"


def shard(path, ids):
    write_shard(path, [np.array(ids)], magic=20240520)
    return path


def test_llmcs_folder_of_shards_has_its_own_split(tmp_path):
    shard(tmp_path / "fineweb_val_000000.bin", range(5))
    shard(tmp_path / "fineweb_train_000002.bin", range(20, 30))
    shard(tmp_path / "fineweb_train_000001.bin", range(10, 20))
    data = prepare(DataConfig(source=str(tmp_path), tokenizer="bytes"))
    assert tokens(data.val) == list(range(5))
    assert tokens(data.train) == list(range(10, 30))
    assert prepare(DataConfig(source=str(tmp_path), tokenizer="bytes")).hash == data.hash
    shard(tmp_path / "fineweb_train_000002.bin", range(21, 31))
    assert prepare(DataConfig(source=str(tmp_path), tokenizer="bytes")).hash != data.hash


def test_a_shard_of_neither_part_is_not_passed_over(tmp_path):
    for name in ("x_train_000001", "x_val_000000", "more"):
        shard(tmp_path / f"{name}.bin", range(9))
    with pytest.raises(UserError, match=r"more.bin is named neither train nor val"):
        prepare(DataConfig(source=str(tmp_path), tokenizer="bytes"))


@pytest.mark.parametrize("named", ["tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"])
def test_one_shard_brings_its_other_part(named, tmp_path):
    shard(tmp_path / "tiny_shakespeare_train.bin", range(10))
    shard(tmp_path / "tiny_shakespeare_val.bin", range(10, 14))
    data = prepare(DataConfig(source=str(tmp_path / named), tokenizer="bytes"))
    assert (tokens(data.train), tokens(data.val)) == (list(range(10)), list(range(10, 14)))


def test_shards_that_name_no_part_give_their_end(tmp_path):
    shard(tmp_path / "a.bin", range(10))
    shard(tmp_path / "b.bin", range(10, 20))
    data = prepare(DataConfig(source=str(tmp_path), tokenizer="bytes", val_fraction=0.25))
    assert (tokens(data.train), tokens(data.val)) == (list(range(15)), list(range(15, 20)))
    data = prepare(DataConfig(source=str(tmp_path / "b.bin"), tokenizer="bytes"))
    assert (tokens(data.train), tokens(data.val)) == (list(range(10, 19)), [19])


def test_gpt2_shards_train_without_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_GPT2_VOCAB", str(tmp_path))
    data = prepare(DataConfig(source=str(shard(tmp_path / "a.bin", [50256] * 30)), tokenizer="gpt2"))
    assert data.byte_lengths is None
    assert len(data.train) == 27 and data.tokenizer.vocab_size == 50257


@pytest.mark.parametrize("kind, beyond", [("gpt2", 50257), ("bytes", 256)])
def test_an_id_beyond_the_vocabulary_is_refused(kind, beyond, tmp_path):
    shard(tmp_path / "a.bin", [1, 2, beyond - 1] * 10)
    prepare(DataConfig(source=str(tmp_path), tokenizer=kind))
    shard(tmp_path / "b.bin", [1, beyond, 2] * 10)
    message = rf"b.bin has token id {beyond}, beyond the vocabulary of tokenizer {kind} \({beyond} ids\)"
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(source=str(tmp_path), tokenizer=kind))


def test_shards_go_with_the_tokenizer_beside_them(tmp_path):
    shard(tmp_path / "a.bin", [0, 1, 2] * 10)
    Chars("abc").save(tmp_path)
    source = str(tmp_path)
    data = prepare(DataConfig(source=source, tokenizer="chars"))
    assert data.tokenizer.hash == load_tokenizer(tmp_path).hash
    assert val_text(data) == b"abc"
    assert prepare(DataConfig(source=source, tokenizer=source)).hash == data.hash
    for config, given in (
        (DataConfig(source=source, tokenizer="bytes"), None),
        (DataConfig(source=source, tokenizer="bpe"), None),
        (DataConfig(source=source, tokenizer="chars"), Chars("abd")),
        (DataConfig(source=source, tokenizer="chars"), Bytes()),
    ):
        with pytest.raises(UserError, match="were made with tokenizer"):
            prepare(config, tokenizer=given)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"have no tokenizer.json beside them \(llm.c's: gpt2\), data.tokenizer is 'chars'"):
        prepare(DataConfig(source=source, tokenizer="chars"))


def test_shards_bring_their_own_tokenizer_where_none_was_asked_for(tmp_path):
    shard(tmp_path / "a.bin", [0, 1, 2] * 10)
    Chars("abc").save(tmp_path)
    for name in ("bpe", "bytes", "gpt2"):
        data = prepare(DataConfig(source=str(tmp_path), tokenizer=name), requested=False)
        assert data.tokenizer.hash == Chars("abc").hash
    with pytest.raises(UserError, match="were made with tokenizer chars"):  # a checkpoint's
        prepare(DataConfig(source=str(tmp_path), tokenizer="bytes"), tokenizer=Bytes(), requested=False)
    (tmp_path / "tokenizer.json").unlink()
    assert prepare(DataConfig(source=str(tmp_path), tokenizer="bytes"), requested=False).tokenizer.name == "bytes"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_whole_text_is_tokenized_in_one_piece(kind, text, small_bpe, tmp_path):
    """A cut can fall into a word, which then has other tokens."""
    text.write_text("internationalisation " * 21)
    tokenizer = Bytes() if kind == "bytes" else small_bpe
    data = prepare(DataConfig(source=str(text)), tokenizer=tokenizer, whole=True)
    ids = tokenizer.encode(text.read_text()).tolist()
    assert len(data.train) == 0 and tokens(data.val) == ([] if kind == "bytes" else [tokenizer.eot]) + ids
    fractions = [i / 441 for i in range(10, 30)]  # the cut falls before each character of a word, and so into tokens of it
    cuts = [prepare(DataConfig(source=str(text), val_fraction=f), tokenizer=tokenizer) for f in fractions]
    more = {len(cut.train) + len(cut.val) - len(data.val) for cut in cuts}
    assert more == {0} if kind == "bytes" else max(more) >= 1
    (tmp_path / "more").mkdir()
    for name in ("x_train_000001", "x_val_000000"):
        shard(tmp_path / "more" / f"{name}.bin", range(9))
    both = prepare(DataConfig(source=str(tmp_path / "more"), tokenizer="bytes"), whole=True)
    assert len(both.train) == 0 and tokens(both.val) == [*range(9)] * 2


def test_the_whole_library_has_every_file_once():
    parts, whole = prepare(DataConfig(tokenizer="bytes")), prepare(DataConfig(tokenizer="bytes"), whole=True)
    assert len(whole.val) == len(parts.train) + len(parts.val) and whole.hash != parts.hash


@pytest.fixture
def bad(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.bin").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    (tmp_path / "text.bin").write_text("not tokens" * 200)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.txt").write_text("text")
    shard(tmp_path / "both" / "a.bin", [1])
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "no text: pass --data"),
        ("{}/missing.txt", "no such file or folder: .*/missing.txt"),
        ("{}/empty.txt", "empty.txt is empty"),
        ("{}/empty.bin", "empty.bin is empty"),
        ("{}/latin.txt", "latin.txt is not UTF-8 text: byte 0xe9 at offset 3"),
        ("{}/text.bin", "text.bin starts with magic"),
        ("{}/nothing", "folder .*/nothing has no text and no .bin shards. it is empty"),
        ("{}/both", "folder .*/both has both"),
        ("{}/pipe", "pipe is neither a file nor a folder"),
    ],
)
def test_a_bad_source_is_one_line_that_names_it(source, message, bad):
    with pytest.raises(UserError, match=message) as caught:
        prepare(DataConfig(source=source.format(bad), tokenizer="bytes"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("beside", ["a.txt", "a.bin"])
def test_a_subfolder_that_cannot_be_read_is_named(beside, tmp_path, monkeypatch):
    """Its text would be left out, and the shards beside it taken for all there is."""
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "inner" / "deep" / "b.txt").write_text("b")
    if beside == "a.bin":
        shard(tmp_path / beside, range(40))
    else:
        (tmp_path / beside).write_text("text " * 9)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot read .*/inner/deep: Permission denied"):
        prepare(DataConfig(source=str(tmp_path), tokenizer="bytes"))


def test_what_cannot_be_read_is_named(text, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.iterdir", refused)
        with pytest.raises(UserError, match=r"cannot read .*: Permission denied"):
            prepare(DataConfig(source=str(text.parent), tokenizer="bytes"))
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refused)
        with pytest.raises(UserError, match=r"cannot read .*text.txt: Permission denied"):
            prepare(DataConfig(source=str(text), tokenizer="bytes"))


def test_a_bad_configuration_is_refused_before_any_work(text):
    with pytest.raises(UserError, match=r"data.val_fraction is 1.0, expected between 0 and 1"):
        prepare(DataConfig(source=str(text), val_fraction=1.0))
    with pytest.raises(UserError, match="unknown tokenizer 'byte', did you mean 'bytes'"):
        prepare(DataConfig(source=str(text), tokenizer="byte"))


def test_a_full_disk_is_one_line_and_leaves_nothing(text, cache, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        prepare(DataConfig(source=str(text), tokenizer="bytes"))
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_cached_shards_are_llmcs(text, cache):
    data = prepare(DataConfig(source=str(text), tokenizer="bytes"))
    assert [path.name for path in sorted(cache.rglob("*.bin"))] == ["tokens_train_000001.bin", "tokens_val_000000.bin"]
    (train,) = cache.rglob("*_train_*.bin")
    assert open_shard(train).dtype == np.uint16 and len(open_shard(train)) == len(data.train)
