"""Parquet and zstd, as pyarrow and zstandard write them, beside the same records as JSON lines."""

from __future__ import annotations

import json

import pytest

from barellm.cli.main import main
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
    monkeypatch.setattr("barellm.data.reading.ROWS", 4)
    parquet.write_table(table(RECORDS), tmp_path / "a.parquet", row_group_size=9)
    layout = Layout(field="story")
    found = list(blocks(tmp_path / "a.parquet", layout))
    assert [block.text for block in found] == RECORDS
    for start, stop in ((0, 62), (5, 9), (9, 18), (17, 19), (61, 62), (62, 62)):
        assert list(blocks(tmp_path / "a.parquet", layout, start=start, stop=stop)) == found[start:stop]


def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    parquet.write_table(table(RECORDS), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"has no column 'text' of text, it has: id, story"):
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
