import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data import reading
from barellm.data.bpe import BytePairs
from barellm.data.corpus import stdlib_corpus, text_corpus
from barellm.data.gpt2 import Gpt2, _read_folder
from barellm.data.reading import Layout, blocks, reading_of
from barellm.data.tokenizers import Chars
from barellm.errors import UserError

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
# Words, numbers, marks and every kind of white space next to each other: what a cut in the wrong place would change.
awkward = st.text(st.sampled_from("ab1,'sé好 \t\r\n\x0b\u00a0\u2003🙂"), max_size=60)


def texts(path) -> list[str]:
    return [block.text for block in blocks(path, Layout())]


@given(contents=st.lists(unicode_text, min_size=1, max_size=4), fraction=st.floats(0.01, 0.99))
def test_text_is_cut_by_characters_as_nanogpt_cuts_it(contents, fraction, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    whole = "".join(contents)
    paths = []
    for i, content in enumerate(contents):
        paths.append(folder / f"{i}.txt")
        paths[-1].write_text(content, newline="")
    if not whole:
        with pytest.raises(UserError, match="these is empty, expected text"):
            text_corpus(paths, fraction, name="these")
        return
    corpus = text_corpus(paths, fraction, name="these")
    cut = int(len(whole) * (1 - fraction))
    assert "".join(corpus.texts(corpus.train)) == whole[:cut]
    assert "".join(corpus.texts(corpus.val)) == whole[cut:]
    begins = [piece for piece in corpus.train + corpus.val if piece.begins]
    assert len({piece.path for piece in begins}) == len(begins) == sum(map(bool, contents))


def test_the_hash_is_of_contents_and_cut_not_of_names(tmp_path):
    (tmp_path / "a").write_text("some text")
    (tmp_path / "b").write_text("some text")
    (tmp_path / "c").write_text("Some text")
    hashes = [text_corpus([tmp_path / name], 0.5, name=name).hash for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert text_corpus([tmp_path / "a"], 0.2, name="a").hash != hashes[0]


@given(text=awkward, block=st.integers(1, 12))
def test_blocks_change_no_token(text, block, small_bpe, shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK", block)
        found = texts(path)
    assert "".join(found) == text
    for tokenizer in (small_bpe, gpt2_of(shared)):
        assert [i for part in found for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


def gpt2_of(shared, made: list[BytePairs] = []) -> BytePairs:  # noqa: B006 (made once)
    if not made:
        made.append(Gpt2(_read_folder(shared)))
    return made[0]


def test_text_without_white_space_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 10)
    monkeypatch.setattr(reading, "LONGEST_WORD", 25)
    (tmp_path / "a").write_text("好" * 40)
    found = texts(tmp_path / "a")
    assert "".join(found) == "好" * 40 and max(map(len, found)) < 30


@pytest.mark.parametrize("block", [1, 3, 1 << 18])
def test_bytes_that_are_no_utf8_are_named_with_their_place(block, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", block)
    (tmp_path / "a").write_bytes("é好 word ".encode() + b"\xff tail")
    with pytest.raises(UserError, match="a is not UTF-8 text: byte 0xff at offset 11"):
        texts(tmp_path / "a")
    (tmp_path / "a").write_bytes("word 好".encode()[:-1])
    with pytest.raises(UserError, match="a is not UTF-8 text: byte 0xe5 at offset 5"):
        texts(tmp_path / "a")


def test_the_first_wrong_byte_of_a_file_is_named_before_it_is_cut(tmp_path):
    """Validation is tokenized first by most kinds, and characters are collected from the training part on."""
    (tmp_path / "a").write_bytes(b"good " * 20 + b"\xe9 bad" + b" good" * 100 + b"\xff")
    with pytest.raises(UserError, match="a is not UTF-8 text: byte 0xe9 at offset 100"):
        text_corpus([tmp_path / "a"], 0.1, name="a")


def test_shakespeare_has_nanogpts_split_and_characters(shared):
    corpus = text_corpus([shared / "tinyshakespeare.txt"], 0.1, name="shakespeare")
    train, val = "".join(corpus.texts(corpus.train)), "".join(corpus.texts(corpus.val))
    assert (len(train), len(val)) == (1_003_854, 111_540)
    tokenizer = Chars(train + val)
    assert "".join(tokenizer.characters) == "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert tokenizer.vocab_size == 65


@pytest.fixture
def library(tmp_path):
    """A folder like lib/python3.x."""
    root = tmp_path / "python3.x"
    for name in [*(f"module{i}.py" for i in range(60)), "package/inner.py", "package/tests/test_inner.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 20)
    for folder in ("site-packages", "test", "encodings", "pydoc_data", "idlelib/idle_test"):
        (root / folder).mkdir(parents=True)
        (root / folder / "unwanted.py").write_text("unwanted")
    (root / "copy.py").write_text((root / "module7.py").read_text())
    (root / "latin.py").write_bytes(b"# \xe9t\xe9")
    (root / "empty.py").write_text("")
    (root / "_sysconfigdata_x.py").write_text("unwanted")
    (root / "data.txt").write_text("unwanted")
    os.symlink(tmp_path / "elsewhere.py", root / "link.py")
    (tmp_path / "elsewhere.py").write_text("unwanted")
    return root


def test_the_library_is_split_by_files_without_leaks(library):
    corpus = stdlib_corpus(0.1, root=library)
    train, val = ({piece.path for piece in part} for part in (corpus.train, corpus.val))
    assert not train & val
    assert {path.read_text() for path in train}.isdisjoint(path.read_text() for path in val)
    names = {path.relative_to(library).as_posix() for path in train | val}
    # copy.py comes before module7.py and has its content: one of the two is enough
    assert names == {*(f"module{i}.py" for i in range(60) if i != 7), "copy.py", "package/inner.py"}
    size = sum(piece.stop for piece in corpus.val)
    whole = size + sum(piece.stop for piece in corpus.train)
    assert 0.1 <= size / whole < 0.1 + 1 / 60
    assert [piece.path for piece in corpus.train] == sorted(train)
    assert all(piece.begins for piece in corpus.train + corpus.val)


def test_the_librarys_split_is_the_same_every_time_and_hardly_moves_with_a_new_file(library):
    before = stdlib_corpus(0.1, root=library)
    assert stdlib_corpus(0.1, root=library) == before
    (library / "module99.py").write_text("new\n" * 20)
    after = stdlib_corpus(0.1, root=library)
    assert after.hash != before.hash
    assert len({piece.path for piece in before.val} ^ {piece.path for piece in after.val}) <= 2
    (library / "module99.py").write_text("NEW\n" * 20)
    assert stdlib_corpus(0.1, root=library).hash != after.hash


def test_a_folder_without_source_is_no_library(tmp_path):
    with pytest.raises(UserError, match="standard library has no readable source in"):
        stdlib_corpus(0.1, root=tmp_path)


def test_this_pythons_library_is_megabytes_of_code():
    corpus = stdlib_corpus(0.1)
    train, val = (sum(piece.stop for piece in part) for part in (corpus.train, corpus.val))
    assert train + val > 5_000_000
    assert 0.1 <= val / (train + val) < 0.13
    names = {piece.path.name for piece in corpus.train + corpus.val}
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= names
    assert not any(part in ("test", "tests", "site-packages") for piece in corpus.train for part in piece.path.parts[-3:-1])


def test_a_text_with_a_byte_order_mark_is_cut_as_the_same_without(tmp_path):
    """But their hashes differ: a cache of an earlier version has the mark among the text's characters."""
    found = []
    for name, mark in (("a.txt", ""), ("b.txt", "\ufeff")):
        (tmp_path / name).write_text(mark + "é words of a text, " * 9, encoding="utf-8")
        corpus = text_corpus([tmp_path / name], 0.3, name="x")
        found.append([list(corpus.texts(part)) for part in (corpus.train, corpus.val)])
    assert found[0] == found[1] and all(found[0])
    assert reading_of(tmp_path / "a.txt", Layout()) == "" != reading_of(tmp_path / "b.txt", Layout())


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_where_no_document_begins_in_the_last_share_the_last_one_is_for_validation(name, tmp_path):
    texts = ["x" * 10, "y" * 50, "z" * 20, ""]
    lines = [json.dumps({"text": text}) for text in texts] if name == "a.jsonl" else ["id,text", *(f"1,{t}" for t in texts)]
    (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    corpus = text_corpus([tmp_path / name], 0.1, name="x")
    assert corpus.documents(corpus.train) == texts[:2] and corpus.documents(corpus.val) == texts[2:]
    assert not text_corpus([tmp_path / name], 0, name="x").val
    (tmp_path / "more.txt").write_text("w" * 60)
    both = text_corpus([tmp_path / name, tmp_path / "more.txt"], 0.4, name="x")
    assert both.documents(both.train) == [*texts, "wwww"] and both.documents(both.val) == ["w" * 56]
