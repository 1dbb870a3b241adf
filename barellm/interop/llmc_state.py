"""llm.c's whole checkpoints: beside model_00000500.bin each process writes state_00000500_00000.bin and so on.

    256 int32       [0] magic [1] version [2] processes [3] which of them [4] whether there are master weights [5] whether data is
                    shuffled [10] the step; uint64: [20] the generator of its rounding [22] that of the last update [30] place in
                    the list of shards [32] samples that were taken of that shard
    fp32            first moments, second moments, master weights: each in the order of the model's file, with the padded rows
    where shuffled  uint64 count and int32 list of shards, uint64 count and int32 order of samples, the Mersenne twister

With ZeRO-1 a process has its share of each tensor of each layer; else all have the same."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from barellm import models
from barellm.checkpoint import storage, tensorfile
from barellm.checkpoint.weights import Weights, parameters
from barellm.config import ModelConfig
from barellm.data.llmc import DataPosition
from barellm.data.mapping import mapped
from barellm.errors import UserError
from barellm.interop import llmc
from barellm.models import gpt2
from barellm.program.builder import Program, Store
from barellm.program.tensor import Tensor

MAGIC, VERSION = 20240527, 1
RANDOM = 13371337  # what llm.c's own generator begins with
TWISTER = np.dtype([("seed", "<u8"), ("left", "<i4"), ("next", "<u4"), ("key", "<u4", 624), ("matrix", "<u4", 2)])
MATRIX = (0, 0x9908B0DF)


class Flat:
    """A tensor whose elements lie in several pieces, one after the other. Only rows that are asked for are copied."""

    def __init__(self, pieces: Sequence[np.ndarray], shape: Sequence[int]) -> None:
        self.pieces, self.shape = pieces, tuple(shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        width, at, found = prod(self.shape[1:]), 0, []
        for piece in self.pieces:
            lo, hi = (min(max(0, row * width - at), len(piece)) for row in (rows.start, rows.stop))
            found.append(piece[lo:hi])
            at += len(piece)
        return np.concatenate(found).reshape(-1, *self.shape[1:])


@dataclass(frozen=True)
class State:
    """`step` updates were done. By a parameter's name its moments, and its weight in fp32 where llm.c kept that. `place`: where the
    data stood, as `data.llmc.LlmcOrder.check` wants it."""

    path: Path
    step: int
    processes: int
    m: Mapping[str, Flat]
    v: Mapping[str, Flat]
    master: Mapping[str, Flat]
    place: dict[str, Any]

    @property
    def story(self) -> str:
        many = f", {self.processes} processes" if self.processes > 1 else ""
        weights = ", master weights" if self.master else ""
        return f"{self.path.name}: step {self.step:,}, both moments{weights}{many}"


@dataclass(frozen=True)
class Training:
    """What a run goes on from, as a source of rows: weights, and AdamW's state by barellm's names."""

    weights: Weights
    state: State

    @property
    def tensors(self) -> dict[str, Tensor]:
        return _tensors(self.weights.model)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Rows [lo, hi) of a weight, or of a moment "NAME.m" or "NAME.v"; padded rows are zero."""
        if name == "skipped":
            return np.zeros(1, np.int32)
        if name in self.weights.tensors:
            return self.weights.read_rows(name, lo, hi)
        name, _, moment = name.rpartition(".")
        t, moments = self.weights.tensors[name], {"m": self.state.m, "v": self.state.v}[moment][name]
        rows, valid = np.zeros((hi - lo, *t.shape[1:]), np.float32), max(0, min(hi, t.valid_rows) - lo)
        rows[:valid] = moments[lo : lo + valid]
        return rows


@cache
def _tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Parameters, and AdamW's state as `optim.adamw` declares it."""
    program = Program(Store())
    models.of(model).declare(program, model)
    program.state("skipped", (1,), "i32")
    for t in program.store.of_role("parameter"):
        for moment in "mv":
            program.state(f"{t.name}.{moment}", t.shape, "fp32")
    return program.store.tensors


def beside(path: Path) -> list[Path]:
    """The states that lie with a model's file, in the order of their processes."""
    named = re.fullmatch(r"model_(\d{8})\.bin", path.name)
    return sorted(path.parent.glob(f"state_{named[1]}_" + "[0-9]" * 5 + ".bin")) if named else []


def read(paths: Sequence[Path], weights: Weights) -> State:
    """The training state in the files of all llm.c processes, merged (ZeRO-1 shards each tensor). UserError if they are incomplete,
    inconsistent or of another model."""
    model = weights.model
    assert isinstance(model, gpt2.Config)
    wte: Any = weights.arrays["wte"]
    known_shapes = {name: t.shape for name, t in parameters(model).items()} | {"wte": wte.shape}
    shapes = {name: tuple(map(int, known_shapes[name])) for name in gpt2.llmc_order(model)}
    files = [_File(path) for path in paths]
    first = files[0]
    for rank, file in enumerate(files):
        if (file.processes, file.rank) != (len(files), rank):
            actual = f"{file.path} is of process {file.rank} of {file.processes}"
            raise UserError(f"{actual}, expected {rank} of {len(files)}, as many as there are files")
        if (file.step, file.master) != (first.step, first.master):
            raise UserError(f"{file.path} is of step {file.step}, and {first.path} of step {first.step}")
    if first.step != int(first.path.name.split("_")[1]):
        raise UserError(f"{first.path} is of step {first.step}, and its name says another")
    total = sum(map(prod, shapes.values()))
    full_tails = [file.tail(total) for file in files]
    if all(tail is not None for tail in full_tails):  # every process has everything
        files, tails = files[:1], full_tails[:1]
    else:  # ZeRO-1
        tails = [file.tail(total // len(files)) for file in files]
        if any(size % len(files) for size in map(prod, shapes.values())) or None in tails:
            found = f"{first.path} has {first.size} bytes"
            raise UserError(f"{found}, expected the state of the {total:,} parameters of {weights.path}")
    counts = {name: prod(shape) // len(files) for name, shape in shapes.items()}

    def plane(number: int) -> dict[str, Flat]:
        """Array number `number` of the file (0: m, 1: v, 2: master weights), split into parameters."""
        found, begin = {}, number * sum(counts.values())
        for name, count in counts.items():
            found[name] = Flat([file.values[begin : begin + count] for file in files], shapes[name])
            begin += count
        return found

    master = plane(2) if first.master else {}
    data_place = {"processes": first.processes, "shuffled": first.shuffled, "shard": first.shard, "sample": first.sample}
    return State(first.path, first.step, first.processes, plane(0), plane(1), master, data_place | (tails[0] or {}))


class _File:
    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.bytes = mapped(path) if self.size else np.zeros(0, np.uint8)
        words = np.frombuffer(self.bytes[: llmc.HEADER].tobytes().ljust(llmc.HEADER, b"\0"), "<i4").tolist()
        if words[:2] != [MAGIC, VERSION]:
            raise UserError(f"{path} begins with {words[:2]}, expected {[MAGIC, VERSION]}, a state of llm.c")
        self.processes, self.rank, self.master, self.shuffled = words[2], words[3], bool(words[4]), bool(words[5])
        self.step, self.shard, self.sample = words[10], words[30], words[32]
        self.planes = 3 if self.master else 2

    @property
    def values(self) -> np.ndarray:
        end = llmc.HEADER + (self.size - llmc.HEADER) // 4 * 4
        return self.bytes[llmc.HEADER : end].view("<f4")

    def tail(self, parameters: int) -> dict[str, Any] | None:
        """The data position behind arrays of `parameters` elements each: {} if not shuffled; None if the file's size is wrong."""
        offset = llmc.HEADER + 4 * self.planes * parameters
        if not self.shuffled:
            return {} if self.size == offset else None
        lists = []
        for _ in range(2):
            count = int(self.bytes[offset : offset + 8].view("<u8")[0]) if offset + 8 <= self.size else self.size
            if offset + 8 + 4 * count > self.size:
                return None
            lists.append(self.bytes[offset + 8 : offset + 8 + 4 * count].view("<i4"))
            offset += 8 + 4 * count
        return {"shards": lists[0].tolist()} if self.size == offset + TWISTER.itemsize else None


def write(weights: Weights, moments: Path, out: Path, *, dtype: str, step: int, data_position: DataPosition | None) -> list[str]:
    """Write a llm.c checkpoint for one process into the new folder `out`; returns the names of its files. `moments`: a checkpoint's
    optimizer file. `data_position` None: llm.c starts its data from the beginning, unshuffled."""
    model = weights.model
    assert isinstance(model, gpt2.Config)
    state = tensorfile.mapped(moments)
    names = [f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}"]
    header = np.zeros(llmc.HEADER // 4, "<i4")
    header[:6] = [MAGIC, VERSION, 1, 0, 1, data_position is not None]  # process 0 of 1, with master weights; places: module
    header[10] = step
    header[[20, 22]] = RANDOM
    tail = b""
    if data_position is not None:
        header[[30, 32]] = data_position.shard, data_position.sample
        for numbers in (data_position.shards, data_position.samples):
            tail += np.uint64(len(numbers)).tobytes() + np.asarray(numbers, "<i4").tobytes()
        left = 625 - data_position.drawn  # llm.c counts what is left, and one more
        tail += np.array((0, left, data_position.drawn, data_position.key, MATRIX), TWISTER).tobytes()
    padding = llmc.pad(model)
    sizes = [(t.valid_rows + (padding if name == "wte" else 0)) * prod(t.shape[1:]) for name, t in weights.tensors.items()]
    with storage.new_folder(out) as folder:
        llmc.write(weights, folder / names[0], dtype=dtype)
        with storage.new_file(folder / names[1], size=llmc.HEADER + 12 * sum(sizes) + len(tail)) as file:
            file.write(header)
            for kind in ("m", "v", None):
                for name in gpt2.llmc_order(model):
                    for rows in _rows(weights, name, None if kind is None else state[f"{name}.{kind}"]):
                        file.write(np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8))
                    if name == "wte":
                        file.write(bytes(4 * padding * model.d_model))
            if tail:
                file.write(tail)
        storage.write_file(folder / names[2], b"")
    return names


def _rows(weights: Weights, name: str, array: np.ndarray | None) -> Iterator[np.ndarray]:
    """Rows of a parameter, or of an array of its shape, without those of padded ids."""
    t = weights.tensors[name]
    for lo, hi in tensorfile.pieces((t.valid_rows, *t.shape[1:]), itemsize=4):
        yield weights.read_rows(name, lo, hi) if array is None else array[lo:hi]
