"""llm.c's .bin shards of tokens, and several of them read as one stream.

A shard is little-endian: 256 int32 of header (magic, version, number of tokens, zeros), then the tokens, nothing else.
Magic 20240520 version 1 holds uint16 (GPT-2), magic 20240801 version 7 holds uint32 (Llama 3)."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from barellm.data import cache, mapping
from barellm.errors import UserError

HEADER_BYTES = 1024
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic -> version, dtype
SHARD_TOKENS = 100_000_000  # llm.c's own shard size; the header's int32 allows 2^31 - 1
BLOCK = 1 << 22  # tokens per piece where a whole shard is walked
MEMO_BYTES = 1 << 26  # files above this size are inspected once and remembered


def magic_for(vocab_size: int) -> int:
    """The format that holds ids below `vocab_size`: uint16 where they fit."""
    return 20240520 if vocab_size <= 1 << 16 else 20240801


def shard_header(magic: int, tokens: int) -> bytes:
    assert tokens < 1 << 31
    header = np.zeros(256, "<i4")
    header[:3] = magic, FORMATS[magic][0], tokens
    return header.tobytes()


def write_shard(path: Path, blocks: Iterable[np.ndarray], *, magic: int) -> int:
    """Write one shard atomically; returns its number of tokens. The blocks may have any integer dtype."""
    dtype = FORMATS[magic][1]
    count = 0
    with cache.new_file(path) as file:
        file.write(bytes(HEADER_BYTES))
        for block in blocks:
            assert block.size == 0 or (block.min() >= 0 and block.max() <= np.iinfo(dtype).max)
            file.write(block.astype(dtype).tobytes())
            count += block.size
        file.seek(0)
        file.write(shard_header(magic, count))
    return count


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard as a read-only memory map, uint16 or uint32. UserError unless it is exactly llm.c's format."""
    with cache.reading(path), open(path, "rb") as file:
        size, header = path.stat().st_size, file.read(12)
    if size < HEADER_BYTES:
        raise UserError(f"{path} has {size} bytes, a token shard has at least {HEADER_BYTES}")
    magic, version, count = np.frombuffer(header, "<i4").tolist()
    if magic not in FORMATS:
        raise UserError(f"{path} starts with magic {magic}, token shards with 20240520 (GPT-2) or 20240801 (Llama 3)")
    known, dtype = FORMATS[magic]
    if version != known:
        raise UserError(f"{path} has version {version}, expected {known} for magic {magic}")
    expected = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != expected:
        raise UserError(f"{path} has {size} bytes, its header says {count} tokens: expected {expected}")
    if count == 0:
        raise UserError(f"{path} holds no tokens")
    return mapping.mapped(path, dtype, offset=HEADER_BYTES, shape=count)


def inspect_shard(path: Path) -> tuple[int, str]:
    """(largest token id, xxh3 digest) of a shard, in one pass; cached on disk for big files."""

    def walk() -> dict:
        tokens, digest, largest = open_shard(path), xxhash.xxh3_128(), 0
        for start in range(0, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            largest = max(largest, int(block.max()))
            digest.update(block.data)
        mapping.check()
        return {"largest": largest, "digest": digest.hexdigest()}

    found = remembered(path, walk)
    return found["largest"], found["digest"]


def remembered(path: Path, compute: Callable[[], dict], *, about: str = "") -> dict:
    """`compute()`, cached on disk for big files while path, size, inode and time are the same. `about`: what else matters."""
    stat = path.stat()
    if stat.st_size < MEMO_BYTES:
        return compute()
    key = xxhash.xxh3_128_hexdigest(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}|{about}".encode())
    memo = cache.cache_folder("inspected") / f"{key}.json"
    try:
        return json.loads(memo.read_text())
    except (OSError, ValueError):
        result = compute()
        with cache.new_file(memo) as file:
            file.write(json.dumps(result).encode())
        return result


class TokenStream:
    """Token arrays (usually maps of shards) read as one sequence; `name` says in messages what it is."""

    def __init__(self, parts: Sequence[np.ndarray], *, name: str) -> None:
        self.parts = tuple(part for part in parts if len(part))
        self.name = name
        self.ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills `out` (one axis, any integer dtype) with the tokens from `start`. LostFile: a shard was cut short meanwhile."""
        assert start >= 0 and start + len(out) <= len(self)
        part = int(np.searchsorted(self.ends, start, side="right")) if len(self.parts) > 1 else 0
        offset = start - (int(self.ends[part - 1]) if part else 0)
        done = 0
        while done < len(out):
            piece = self.parts[part][offset : offset + len(out) - done]
            out[done : done + len(piece)] = piece
            done, part, offset = done + len(piece), part + 1, 0
        mapping.check(self.parts)

    def array(self, start: int, stop: int) -> np.ndarray:
        """A copy of the tokens [start, stop), int32."""
        out = np.empty(stop - start, np.int32)
        self.read(start, out)
        return out

    def slice(self, start: int, stop: int, *, name: str) -> "TokenStream":
        """The stream of the tokens [start, stop), nothing copied."""
        begins = [0, *self.ends.tolist()][:-1]
        parts = [part[max(start - b, 0) : max(stop - b, 0)] for part, b in zip(self.parts, begins, strict=True)]
        return TokenStream(parts, name=name)
