"""Parquet and zstd, as pyarrow and zstandard write them, beside the same records as JSON lines."""

from __future__ import annotations

import json

import pytest

from barellm.cli.main import main
from barellm.data import unpacking
from barellm.data.reading import Layout, blocks
from barellm.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.oracle
RECORDS = [f"story {i}: " + "words of it " * (i % 7) for i in range(60)] + ["", "last — 好"]


def lines(records) -> bytes:
    return "".join(json.dumps({"story": text}) + "\n" for text in records).encode()


def table(records, kind=None):
    return pyarrow.table({"id": list(range(len(records))), "story": pyarrow.array(records, kind or pyarrow.string())})


def test_parquet_and_zstd_give_the_shards_of_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(lines(RECORDS[:20])) + pack(lines(RECORDS[20:])))
    parquet.write_table(table(RECORDS), tmp_path / "a.parquet", row_group_size=9)
    parquet.write_table(table([*RECORDS[:60], None, RECORDS[61]], pyarrow.large_string()), tmp_path / "large.parquet")
    results = set()
    for number, name in enumerate(("a.jsonl", "a.jsonl.zst", "a.parquet", "large.parquet")):
        out = tmp_path / str(number) / "out"
        options = ["--field", "story", "--tokenizer", "bpe", "--vocab", "300", "--shard-tokens", "200"]
        assert main(["prepare", str(tmp_path / name), "--out", str(out), *options]) == 0
        results.add(tuple((path.name, path.read_bytes()) for path in sorted(out.glob("*.bin"))))
    assert len(results) == 1 and len(results.pop()) > 4


def test_a_row_is_a_place_to_go_on_from_and_to_stop_at(tmp_path, monkeypatch):
    monkeypatch.setattr("barellm.data.records.ROWS", 4)
    parquet.write_table(table(RECORDS), tmp_path / "a.parquet", row_group_size=9)
    layout = Layout(field="story")
    found = list(blocks(tmp_path / "a.parquet", layout))
    assert [block.text for block in found] == RECORDS
    for start, stop in ((0, 62), (5, 9), (9, 18), (17, 19), (61, 62), (62, 62)):
        assert list(blocks(tmp_path / "a.parquet", layout, start=start, stop=stop)) == found[start:stop]


def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    parquet.write_table(table(RECORDS), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"has no column 'text' of text, it has: id \(int64\), story \(string\)"):
        list(blocks(tmp_path / "a.parquet", Layout()))
    with pytest.raises(UserError, match=r"has no column 'id' of text"):
        list(blocks(tmp_path / "a.parquet", Layout(field="id")))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"a.parquet is no whole Parquet file"):
        list(blocks(tmp_path / "a.parquet", Layout(field="story")))
    packed = zstandard.ZstdCompressor().compress(b"some text " * 10_000)
    for content, message in ((packed[:-3], "it ends inside a frame"), (b"no zstd", "a.zst is no whole zstd file")):
        (tmp_path / "a.zst").write_bytes(content)
        with pytest.raises(UserError, match=message):
            list(blocks(tmp_path / "a.zst", Layout()))


def test_text_is_text_in_every_type_of_column(tmp_path):
    """pandas writes categories, other programs views and bytes; null is a text without characters, as in JSON lines."""
    rows = ["one", None, "é 漢字 🎉", "one"] * 30
    a = pyarrow
    for kind in (
        *(a.string(), a.large_string(), a.string_view(), a.binary(), a.large_binary(), a.binary_view()),
        *(a.dictionary(a.int8(), a.string()), a.dictionary(a.int32(), a.large_string())),
    ):
        values = a.array(rows).dictionary_encode() if a.types.is_dictionary(kind) else a.array(rows).cast(kind)
        parquet.write_table(a.table({"story": values.cast(kind)}), tmp_path / "a.parquet", row_group_size=7)
        found = [block.text for block in blocks(tmp_path / "a.parquet", Layout(field="story"))]
        assert found == [text or "" for text in rows], kind
    parquet.write_table(table([None] * 3, a.null()), tmp_path / "a.parquet")
    assert [block.text for block in blocks(tmp_path / "a.parquet", Layout(field="story"))] == [""] * 3


@pytest.mark.parametrize("claims", ["bytes", "text"])
def test_a_cell_that_is_not_utf_8_is_named_by_its_row(claims, tmp_path):
    cells = pyarrow.array([b"fine", b"not \xff it"], pyarrow.binary())
    if claims == "text":  # Arrow itself does not look
        cells = pyarrow.Array.from_buffers(pyarrow.string(), 2, cells.buffers())
    parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet, row 2 is not UTF-8 text: byte 0xff at its byte 4$"):
        list(blocks(tmp_path / "a.parquet", Layout()))


def test_a_table_is_what_another_reader_of_csv_sees(tmp_path):
    from pyarrow import csv

    rows = [*RECORDS, 'with "quotes", and commas', "lines\nin\r\nquotes"]
    csv.write_csv(pyarrow.table({"id": list(range(len(rows))), "story": rows}), tmp_path / "a.csv")
    assert [block.text for block in blocks(tmp_path / "a.csv", Layout(field="story"))] == rows
    read = csv.read_csv(tmp_path / "a.csv", parse_options=csv.ParseOptions(newlines_in_values=True))
    assert read["story"].to_pylist() == rows


def test_a_small_zstd_file_takes_little_memory(tmp_path, monkeypatch):
    """64 MB of zeros in 10 KB, and a frame that asks for a window of 2 GB: what comes is in pieces, and the window is refused."""
    packer = zstandard.ZstdCompressor()
    (tmp_path / "a.zst").write_bytes(packer.compress(bytes(1 << 26)))
    assert max(map(len, unpacking.chunks(tmp_path / "a.zst"))) == unpacking.CHUNK
    library, pieces = zstandard.ZstdDecompressor, []

    class Watched:
        def __init__(self, **options):
            self.real = library(**options).decompressobj()

        def decompressobj(self):
            return self

        def decompress(self, chunk):
            pieces.append(len(found := self.real.decompress(chunk)))
            return found

        def __getattr__(self, name):
            return getattr(self.real, name)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    assert sum(map(len, unpacking.chunks(tmp_path / "a.zst"))) == sum(pieces) == 1 << 26 and max(pieces) <= 1 << 25
    monkeypatch.undo()
    parameters = zstandard.ZstdCompressionParameters(window_log=31)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.zst").write_bytes(stream.compress(b"some text " * 1000) + stream.flush())
    with pytest.raises(UserError, match=r"a.zst asks for a zstd window of more than 128 MiB, which a file of its size"):
        list(unpacking.chunks(tmp_path / "a.zst"))
    monkeypatch.setattr(unpacking, "LARGE_WINDOW", 1 << 30)  # a file of gigabytes may have one
    assert b"".join(unpacking.chunks(tmp_path / "a.zst")) == b"some text " * 1000
