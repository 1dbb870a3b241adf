import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data import shards
from barellm.data.shards import TokenStream, inspect_shard, magic_for, open_shard, write_shard
from barellm.data.writing import ShardWriter
from barellm.errors import UserError


def llmc_bytes(tokens, magic=20240520, version=1, code="H") -> bytes:
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}{code}", *tokens)


def test_a_shard_is_bit_for_bit_llmcs(tmp_path):
    tokens = [0, 1, 50256, 65535, 7]
    write_shard(tmp_path / "a.bin", [np.array(tokens[:2]), np.array(tokens[2:])], magic=magic_for(50257))
    assert (tmp_path / "a.bin").read_bytes() == llmc_bytes(tokens)
    tokens = [0, 128000, 2**31]
    write_shard(tmp_path / "b.bin", [np.array(tokens)], magic=magic_for(128256))
    assert (tmp_path / "b.bin").read_bytes() == llmc_bytes(tokens, 20240801, 7, "I")


def test_llmcs_shards_are_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(llmc_bytes([5, 6, 60000]))
    (tmp_path / "b.bin").write_bytes(llmc_bytes([5, 6, 128000], 20240801, 7, "I"))
    assert open_shard(tmp_path / "a.bin").tolist() == [5, 6, 60000]
    assert open_shard(tmp_path / "b.bin").tolist() == [5, 6, 128000]
    assert inspect_shard(tmp_path / "a.bin")[0] == 60000


def test_a_map_cannot_be_written(tmp_path):
    (tmp_path / "a.bin").write_bytes(llmc_bytes([5, 6]))
    with pytest.raises(ValueError):
        open_shard(tmp_path / "a.bin")[0] = 1


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has 0 bytes, a token shard has at least 1024"),
        (b"hello", "has 5 bytes, a token shard has at least 1024"),
        (llmc_bytes([1])[:1000], "has 1000 bytes"),
        (b"To be, or not to be" * 100, "starts with magic 1646292820, token shards with 20240520"),
        (llmc_bytes([1], magic=20240522), "starts with magic 20240522"),
        (llmc_bytes([1], version=2), "has version 2, expected 1 for magic 20240520"),
        (llmc_bytes([1, 2])[:-1], "has 1027 bytes, its header says 2 tokens: expected 1028"),
        (llmc_bytes([1, 2]) + b"\0", "has 1029 bytes"),
        (struct.pack("<256i", 20240520, 1, -1, *[0] * 253), "header says -1 tokens"),
        (llmc_bytes([]), "holds no tokens"),
    ],
)
def test_a_corrupt_shard_is_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*a.bin: No such file"):
        open_shard(tmp_path / "a.bin")


@given(data=st.data())
def test_blocks_cut_into_shards_read_as_one_stream(data, tmp_path_factory):
    """Whoever goes on after any block, and finds more than that was told of, ends with the same files."""
    folder = tmp_path_factory.mktemp("shards")
    blocks = data.draw(st.lists(st.lists(st.integers(0, 65535), max_size=7), max_size=5))
    size, stopped = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))

    def writer(counts) -> ShardWriter:
        return ShardWriter(folder, "x", magic=20240520, shard_tokens=size, counts=counts)

    first = writer({"val": 0, "train": 0})
    known = dict(first.counts)
    for number, block in enumerate(blocks[: stopped + 1]):
        known = dict(first.counts) if number == stopped else known
        first.write("train", np.array(block, np.int32))
    if stopped >= len(blocks):
        known = dict(first.counts)
    first.sync()
    second = writer(known)
    for block in blocks[stopped:]:
        second.write("train", np.array(block, np.int32))
    paths = second.finish()
    assert sorted(folder.iterdir()) == paths
    flat = [token for block in blocks for token in block]
    assert [path.name for path in paths] == [f"x_train_{i + 1:06d}.bin" for i in range(-(-len(flat) // size))]
    assert all(len(open_shard(path)) == size for path in paths[:-1])
    stream = TokenStream([open_shard(path) for path in paths], name="x")
    assert len(stream) == len(flat) and stream.array(0, len(flat)).tolist() == flat
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(flat))] * 2)))
    assert stream.array(start, stop).tolist() == flat[start:stop]
    part = stream.slice(start, stop, name="part")
    assert part.array(0, len(part)).tolist() == flat[start:stop]


def test_nothing_is_left_of_a_shard_that_failed(tmp_path):
    def blocks():
        yield np.array([1])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_shard(tmp_path / "a.bin", blocks(), magic=20240520)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*a.bin: No space left on device"):
        write_shard(tmp_path / "a.bin", [np.array([1])], magic=20240520)
    assert list(tmp_path.iterdir()) == []


def test_a_big_shard_is_walked_once_until_it_changes(tmp_path, monkeypatch):
    walks = []
    path = tmp_path / "a.bin"
    monkeypatch.setattr(shards, "MEMO_BYTES", 0)
    monkeypatch.setattr(shards, "open_shard", lambda path, real=open_shard: walks.append(path) or real(path))
    path.write_bytes(llmc_bytes([3, 9]))
    assert inspect_shard(path) == inspect_shard(path)
    assert len(walks) == 1
    path.write_bytes(llmc_bytes([3, 9, 11]))
    assert inspect_shard(path)[0] == 11
    assert len(walks) == 2
