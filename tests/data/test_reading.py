"""Files of text as blocks, beside a plain rule: read all, split at the separator."""

from __future__ import annotations

import gzip
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data import reading, unpacking
from barellm.data.reading import Layout, blocks
from barellm.errors import UserError


def documents(path, layout) -> list[str]:
    found = []
    for block in blocks(path, layout):
        found += [""] * block.begins
        found[-1] += block.text
    return found


@given(
    text=st.text(st.sampled_from("ab \né|🙂-"), max_size=200),
    separator=st.sampled_from(["", "||", "|", "\n\n", "é|", "--a"]),
    keep=st.booleans(),
)
def test_documents_lie_between_separators_and_each_block_is_a_place_to_go_on(text, separator, keep, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text, newline="")
    layout = Layout(separator=separator, keep=keep)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK", 40), ("LONGEST_WORD", 100)):
            patch.setattr(reading, name, value)
        patch.setattr(unpacking, "CHUNK", 7)
        found = list(blocks(path, layout))
        wanted = text.split(separator) if separator else [text]
        wanted = [part + separator * keep for part in wanted[:-1]] + [part for part in wanted[-1:] if part]
        assert documents(path, layout) == wanted
        for number, block in enumerate(found):
            assert list(blocks(path, layout, start=block.end, begins=block.closed)) == found[number + 1 :]
            assert len(block.text.encode()) <= 107


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_part_of_a_file_ends_where_it_should_wherever_it_begins(name, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 20)
    monkeypatch.setattr(unpacking, "CHUNK", 7)
    content = b"words of a text, " * 12
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for start, stop in ((0, 50), (34, 85), (100, 101), (150, 204)):
        found = "".join(block.text for block in blocks(tmp_path / name, Layout(), start=start, stop=stop))
        assert found.encode() == content[start:stop]


def test_records_longer_than_a_block_come_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 50)
    texts = ["word " * 40, "", "short", "x" * 120, "end é"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"t": text}) for text in texts) + "\n\n")
    found = list(blocks(path, Layout(field="t")))
    assert documents(path, Layout(field="t")) == texts and len(found) > 8
    whole = [block for block in found if block.end >= 0]
    assert len(whole) == len(texts)  # nobody goes on inside a record
    last = list(blocks(path, Layout(field="t"), start=whole[2].end))
    assert "".join(block.text for block in last) == texts[3] + texts[4]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "a"', "line 2 is no JSON: Expecting ',' delimiter at column 13$"),
        ('{"text": b}', "line 2 is no JSON: Expecting value at column 10$"),
        ('{"txt": "a", "id": 1}', "line 2 has no text in a field 'text', it has: txt, id"),
        ('{"text": 3}', "line 2 has no text in a field 'text', it has: text 3"),
        ("[1]", "line 2 has no text in a field 'text', it has: list"),
        ('{"text": "a\\ud800b"}', r"a.jsonl, line 2 has \\ud800 alone in its text"),
        ("[" * 100_000, "a.jsonl, line 2 is no JSON: it has lists or objects too deep in each other"),
    ],
    ids=lambda value: value[:20],
)
def test_a_record_without_text_is_named_by_its_line(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        list(blocks(tmp_path / "a.jsonl", Layout()))


def test_a_compressed_file_that_is_cut_short_or_damaged_is_refused(tmp_path):
    packed = gzip.compress(b"some text " * 1000)
    for content in (packed[:-4], packed[:40] + b"\x00" + packed[41:], b"no gzip"):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"a.txt.gz is no whole gzip file"):
            list(blocks(tmp_path / "a.txt.gz", Layout()))
    (tmp_path / "a.parquet.gz").write_bytes(packed)
    with pytest.raises(UserError, match=r"is Parquet in .gz, expected Parquet as it is"):
        list(blocks(tmp_path / "a.parquet.gz", Layout()))


@pytest.mark.parametrize("name, package", [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_package_that_is_missing_is_named_with_its_command(name, package, tmp_path, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"{name} needs the package {package}: pip install {package}"):
        list(blocks(tmp_path / name, Layout()))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 20])
def test_a_byte_order_mark_is_no_text(name, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "CHUNK", chunk)
    monkeypatch.setattr(reading, "BLOCK", 20)
    text = "é words of a text, and \ufeff inside " * 4
    content = ("\ufeff" + text).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = list(blocks(path, Layout()))
    assert "".join(block.text for block in found) == text and found[-1].end == len(content)
    for number, block in enumerate(found, 1):
        assert list(blocks(path, Layout(), start=block.end, begins=block.closed)) == found[number:]
        assert list(blocks(path, Layout(), stop=block.end))[-1].text == block.text
    path.write_bytes(gzip.compress(content[:3]) if name.endswith("gz") else content[:3])
    assert list(blocks(path, Layout())) == [] and documents(path, Layout(separator="x")) == []


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_utf_16_is_refused_in_a_line(coding, name, tmp_path):
    (tmp_path / name).write_bytes('{"text": "some"}'.encode(coding))
    with pytest.raises(UserError, match=r"is UTF-(16|32) text.*, expected UTF-8$"):
        list(blocks(tmp_path / name, Layout()))
