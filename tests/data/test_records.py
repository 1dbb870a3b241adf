"""Arrays of JSON, CSV and JSON lines: the same records in every form, and what is wrong with a file in one line."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data import records, unpacking
from barellm.data.reading import Layout, blocks, documents, each_record
from barellm.errors import UserError

TEXTS = ["doc, one", "", 'with "quotes"', "lines\nand\r\nlines\n\n", "é 漢字 🎉 \u2028 \x0b \x0c \x85", "\\n is no escape", "[{"]


def table(rows, delimiter=",") -> str:
    held = io.StringIO(newline="")
    csv.writer(held, delimiter=delimiter).writerows([["id", "text"], *([i, text] for i, text in enumerate(rows))])
    return held.getvalue()


def forms(rows) -> dict[str, str]:
    objects = [{"id": [i, {"a": None}], "text": text} for i, text in enumerate(rows)]
    lines = "".join(json.dumps(one) + "\n" for one in objects)
    return {
        "a.jsonl": lines,
        "lines.json": lines,
        "a.json": json.dumps(objects),
        "pretty.json": json.dumps(objects, indent=2, ensure_ascii=False) + "\n\n",
        "objects.json": "\n".join(json.dumps(one, indent=1) for one in objects),
        "a.csv": table(rows),
        "a.tsv": table(rows, "\t"),
    }


@given(
    rows=st.lists(st.text(st.sampled_from('ab,"\\ \t\r\n\x0b\u2028é🙂[{'), max_size=30), min_size=1, max_size=6),
    chunk=st.integers(1, 40),
)
@pytest.mark.extended
def test_every_form_has_the_same_documents_wherever_its_bytes_are_cut(rows, chunk, tmp_path_factory):
    """And each end of a block is a place to go on and to stop at."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "CHUNK", chunk)
        for name, text in forms(rows).items():
            for mark in ("", "\ufeff"):
                path = folder / name
                path.write_bytes((mark + text).encode())
                found = list(blocks(path, Layout()))
                assert [block.text for block in found] == rows, name
                for number, block in enumerate(found, 1):
                    assert list(blocks(path, Layout(), start=block.end)) == found[number:]
                    assert list(blocks(path, Layout(), stop=block.end)) == found[:number]


def test_what_is_packed_is_read_as_what_is_not(tmp_path):
    for name, text in forms(TEXTS).items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert list(documents(blocks(tmp_path / f"{name}.gz", Layout()))) == TEXTS


def test_null_is_a_text_without_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": null}]')
    for name in ("a.jsonl", "a.json"):
        assert [block.text for block in blocks(tmp_path / name, Layout())] == ["a", ""]


@pytest.mark.parametrize("name, content, message", [
    ("a.json", '[{"text": "a"}, {"text": "b" "c"}]', "record 2 is no JSON: Expecting ',' delimiter at character 14$"),
    ("a.json", '[{"text": "a"}, {"text": "b"', "record 2 is no JSON: Expecting ',' delimiter at character 13"),
    ("a.json", '[{"text": "a"}, {"text": "b', "record 2 is no JSON: Unterminated string starting at at character 10"),
    ("a.json", '[{"text": "a"},]', "record 2 is no JSON: Expecting value"),
    ("a.json", '[{"text": "a"},', "record 2 is no JSON: Expecting value"),
    ("a.json", '[{"text": "a"} {"text": "b"}]', "has '{' after record 1, expected ',' or ']'"),
    ("a.json", '[{"text": "a"}', "a.json ends after record 1, expected ',' or ']'"),
    ("a.json", '[{"text": "a"}] [1]', "is a list of JSON with more behind its end"),
    ("a.json", "[", "is a list of JSON with no end"),
    ("a.json", '{"text": "a"} garbage', "record 2 is no JSON: Expecting value at character 1$"),
    ("a.json", '["a"]', "record 1 has no text in a field 'text', it has: str$"),
    ("a.json", "[12]", "record 1 has no text in a field 'text', it has: int$"),
    ("a.json", '{"data": [{"text": "a"}], "n": 1}', "it has: data, n; only a list that is the whole"),
    ("a.json", "[" * 100_000, "record 1 is no JSON: it has lists or objects too deep in each other"),
    ("a.json", '[{"text": ' + "9" * 5000 + "}]", "record 1 is no JSON: Exceeds the limit"),
    ("a.json", b'[{"text": "a"}, {"text": "b\xff"}]', "a.json is not UTF-8 text: byte 0xff at offset 27"),
    ("a.json", b'[{"text": "b\xc3', "a.json is not UTF-8 text: it ends inside a character"),
    ("a.json", '[{"text": "\\ud800"}]', r"record 1 has \\ud800 alone in its text"),
    ("a.csv", "id,body\n1,a\n", "line 2 has no text in a field 'text', it has: id, body"),
    ("a.csv", "id,text\n1,a\n2\n", "line 3 has 1 columns, expected the 2 of the header"),
    ("a.csv", 'id,text\n1,"a\nb"\n\n2,b,c\n', "line 5 has 3 columns"),
    ("a.csv", "text,text\na,b\n", "line 1 has the column 'text' twice"),
    ("a.csv", 'id,text\n1,"a\nb', "line 2 is no CSV: unexpected end of data"),
    ("a.csv", 'id,text\n1,"a"b\n', "line 2 is no CSV: ',' expected after"),
    ("a.csv", b"id,text\n1,a\xff\n", "a.csv is not UTF-8 text: byte 0xff at offset 11"),
    ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is no JSON: 'utf-8' codec"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        list(blocks(path, Layout()))


def test_a_record_that_is_wrong_early_is_found_before_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "CHUNK", 64)
    path = tmp_path / "a.json"
    path.write_text('[{"text": b}, ' + '{"text": "a"}, ' * 1000)
    taken = []
    real = unpacking.chunks
    monkeypatch.setattr(unpacking, "chunks", lambda *more: (taken.append(1) or c for c in real(*more)))
    with pytest.raises(UserError, match="Expecting value at character 10"):
        list(each_record(path))
    assert len(taken) == 1


@pytest.mark.parametrize("name, begin", [("a.jsonl", '{"text": "'), ("a.json", '[{"text": "'), ("a.csv", 'text\n"')])
def test_a_record_of_a_packed_file_has_a_greatest_length(name, begin, tmp_path, monkeypatch):
    """A few bytes can claim to hold any number of them; a file as it is holds its own size at most."""
    monkeypatch.setattr(records, "LONGEST", 1 << 18)
    monkeypatch.setattr(unpacking, "CHUNK", 1 << 14)
    content = (begin + "a" * (1 << 20)).encode()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=r"gz has a record of more than 262144 bytes|field larger than field limit"):
        list(blocks(tmp_path / f"{name}.gz", Layout()))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"is no JSON|is no CSV"):
        list(blocks(tmp_path / name, Layout()))
