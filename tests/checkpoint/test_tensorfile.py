"""safetensors files of strangers: each is read as the library safetensors reads it, or refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize

from barellm.checkpoint import tensorfile
from barellm.errors import UserError
from tests.training.fake import FakeSession

SESSION = FakeSession(seed=3)
WEIGHTS = {name: t for name, t in SESSION.tensors.items() if t.role == "parameter"}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def changed(entry: Any = ENTRY, **keys: Any) -> bytes:
    return json.dumps({"a": {**entry, **keys}}).encode()


PAIR = json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [0, 8]}}).encode()
GAP = json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}).encode()
TWICE = b'{"a": %s, "a": %s}' % (json.dumps(ENTRY).encode(), json.dumps(ENTRY).encode())
REFUSED = {
    "every tensor at the same bytes": (PAIR, "'b' begins at byte 0 of the data, expected 8"),
    "a gap": (GAP, "'b' begins at byte 12 of the data, expected 8"),
    "a gap at the beginning": (changed(data_offsets=[8, 16]), "'a' begins at byte 8 of the data, expected 0"),
    "data behind the last": (changed(shape=[1], data_offsets=[0, 4]), "has 4 bytes, the file has 8"),
    "data that is not there": (changed(shape=[4], data_offsets=[0, 16]), "has 16 bytes, the file has 8"),
    "bytes of another shape": (changed(shape=[3]), "two that are 12 bytes apart for F32 [3]"),
    "offsets backwards": (changed(data_offsets=[8, 0]), "two that are 8 bytes apart"),
    "three offsets": (changed(data_offsets=[0, 8, 8]), "two that are 8 bytes apart"),
    "no offsets": (json.dumps({"a": {"dtype": "F32", "shape": [2]}}).encode(), "expected its dtype, shape and data_offsets"),
    "a negative size": (changed(shape=[-2]), "has the shape [-2], expected integers from 0 on"),
    "a size that is no integer": (changed(shape=[2.0]), "has the shape [2.0], expected integers from 0 on"),
    "a size that is a truth": (changed(shape=[True]), "has the shape [True], expected integers from 0 on"),
    "a huge size": (changed(shape=[1 << 64]), "expected integers from 0 on"),
    "sizes of no bytes that overflow": (changed(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]), "fewer than 2^63 bytes"),
    "sizes of no bytes whose bytes overflow": (changed(shape=[0, 1 << 61], data_offsets=[0, 0]), "fewer than 2^63 bytes"),
    "many axes": (changed(shape=[1] * 33), "expected at most 32 axes"),
    "a shape that is a text": (changed(shape="2"), "has the shape '2', expected integers"),
    "an unknown dtype": (changed(dtype="F32\n"), r"has the dtype 'F32\n', expected one of F32, F64, "),
    "a dtype that is a list": (changed(dtype=["F32"]), "has the dtype ['F32'], expected one of"),
    "an entry that is a list": (json.dumps({"a\nb": [1]}).encode(), r"the entry of 'a\nb' in its header is [1]"),
    "a name twice": (TWICE, "its header has the name 'a' twice"),
    "a key twice": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "its header has the name 'dtype' twice"),
    "metadata of numbers": (b'{"__metadata__": {"a": 1}}', "__metadata__ in its header is {'a': 1}"),
    "metadata that is a list": (b'{"__metadata__": [1]}', "__metadata__ in its header is [1]"),
    "a list": (b"[]", "its header is list, expected an object"),
    "deep nesting": (b'{"a":' * 200_000, "its header is not JSON"),
    "another encoding": (json.dumps({}).encode("utf-16"), "its header is not JSON"),
    "a name that is no Unicode": (b'{"\\ud800": 1}', "its header is not JSON"),
    "many digits": (b'{"a": %s}' % (b"9" * 5000), "its header is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("reader", ["mapped", "read"])
def test_a_header_that_is_wrong_is_refused_in_one_line(tmp_path, what, reader):
    header, says = REFUSED[what]
    path = file(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(UserError) as raised:
        tensorfile.mapped(path) if reader == "mapped" else tensorfile.read(path, SESSION, WEIGHTS)  # pyright: ignore
    assert says in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 10])
@pytest.mark.parametrize("length", [0, 1, 3, 1 << 20, (1 << 64) - 1])
def test_a_header_beyond_the_file_is_refused(tmp_path, size, length):
    (tmp_path / "a").write_bytes((length.to_bytes(8, "little") + b"{}")[:size])
    with pytest.raises(UserError, match="is not a safetensors file: its header would have"):
        tensorfile.mapped(tmp_path / "a")


def test_tensors_in_any_order_and_without_elements_are_read(tmp_path):
    data = np.arange(5, dtype="<f4")
    header = {
        "__metadata__": None,
        "b": {"dtype": "F32", "shape": [3, 1], "data_offsets": [8, 20], "more": 1},
        "none": {"dtype": "I64", "shape": [0, 1 << 40], "data_offsets": [8, 8]},
        "a": ENTRY,
    }
    arrays = tensorfile.mapped(file(tmp_path / "a", header, data.tobytes()))
    assert arrays["a"].tolist() == [0, 1] and arrays["b"].tolist() == [[2], [3], [4]] and arrays["none"].size == 0
    assert tensorfile.mapped(file(tmp_path / "b", b"{}  ")) == {}


def mutated(header: bytes, draw: random.Random) -> bytes:
    """A header of which one thing is different: a byte, a piece, or a value of an entry."""
    kind, at = draw.randrange(5), draw.randrange(len(header))
    if kind == 0:
        return header[:at] + bytes([draw.randrange(256)]) + header[at + 1 :]
    if kind == 1:
        return header[:at] + header[at + draw.randrange(1, 9) :]
    if kind == 2:
        return header[:at] + header[draw.randrange(len(header)) :][: draw.randrange(1, 40)] + header[at:]
    entries = json.loads(header)
    name = draw.choice([name for name in entries if name != "__metadata__"])
    odd = [0, 1, 4, -1, 7, 1 << 31, 1 << 63, 1 << 70, 1.5, 1e300, True, None, "", "4", [], [0, 4], {}, "F32", "F16", "I8"]
    value, key = draw.choice(odd), draw.choice(list(entries[name]))
    if kind == 3:
        entries[name][key] = value
    elif isinstance(held := entries[name][key], list):
        held[draw.randrange(len(held))] = value
    else:
        entries[draw.choice([name, "other", "__metadata__", ""])] = value
    return json.dumps(entries).encode()


def test_of_1500_mutated_headers_each_is_read_right_or_refused_in_one_line(tmp_path):
    """Right is what the library safetensors reads, which refuses the same files, but for dtypes that only it knows and names that
    stand twice. A session gets the same numbers, or nothing is written."""
    draw, path = random.Random(20), tmp_path / "a.safetensors"
    tensorfile.write(path, SESSION, WEIGHTS)
    content, start = path.read_bytes(), tensorfile.read_header(path)[1]
    header, data = content[8:start].rstrip(), content[start:]
    read = 0
    for _ in range(1500):
        mutant = mutated(header, draw)
        file(path, mutant, data)
        try:
            right = {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in deserialize(path.read_bytes())}
        except SafetensorError:
            right = None
        try:
            found = tensorfile.mapped(path)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            assert right is None or "has the dtype" in str(error) or "twice" in str(error), mutant
            continue
        assert right is not None, mutant
        assert {name: (list(a.shape), a.tobytes()) for name, a in found.items()} == {
            name: (shape, raw) for name, (_, shape, raw) in right.items()
        }
        read += 1
        session = FakeSession(seed=4)
        try:
            tensorfile.read(path, session, WEIGHTS)  # pyright: ignore[reportArgumentType]
        except UserError:
            assert (
                set(found) != set(WEIGHTS)
                or any(found[name].shape != t.shape for name, t in WEIGHTS.items())
                or any(found[name].dtype != np.float32 for name in WEIGHTS)
            )
            assert (session.arrays["b"] == FakeSession(seed=4).arrays["b"]).all()
        else:
            assert all((session.arrays[name] == found[name]).all() for name in WEIGHTS)
    assert 20 < read < 1000, "some are as good as before, and most are not"
