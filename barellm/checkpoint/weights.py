"""A model's weights where they lie, by barellm's names: what a run may begin with, and what is exported."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from barellm import models
from barellm.checkpoint import checkpoint, tensorfile
from barellm.config import Config, ModelConfig, overrides
from barellm.config.fields import entries
from barellm.data import kinds, mapping, tokenizers
from barellm.errors import UserError
from barellm.models.user_model import mistakes_named
from barellm.program.builder import Program, Store
from barellm.program.dtypes import numpy_dtype
from barellm.program.tensor import Tensor
from barellm.runtime.session import Session


@cache
@mistakes_named
def parameters(model: ModelConfig) -> dict[str, Tensor]:
    store = Store()
    models.of(model).declare(Program(store), model)
    return {t.name: t for t in store.of_role("parameter")}  # and no constants, which a model may declare too


class RowsOfArray(Protocol):
    """What rows are taken from: an array, or one that lies in parts."""

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class Reordered:
    """The rows of an array in another order: row i is the array's row order[i]. Only those that are asked for are copied."""

    def __init__(self, array: np.ndarray, order: np.ndarray) -> None:
        self.array, self.order = array, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.array[self.order[rows]]


class Stack:
    """Arrays one below the other, as one: only the rows that are asked for are copied."""

    def __init__(self, arrays: Sequence[np.ndarray | Reordered]) -> None:
        self.arrays = arrays

    def __getitem__(self, rows: slice) -> np.ndarray:
        """From row `rows.start` to `rows.stop`, in the arrays' common dtype."""
        found, first = [], 0
        for array in self.arrays:
            found.append(array[max(0, rows.start - first) : max(0, rows.stop - first)])
            first += len(array)
        return np.concatenate(found, dtype=found[0].dtype if len({part.dtype for part in found}) == 1 else np.float32)


@dataclass(frozen=True)
class Weights:
    """`arrays`: by barellm's names, matrices (out, in), in fp32, bf16 or fp16; those with a row for each id have at least
    vocab_size rows. They are views of mapped files, read when they are used. `tokenizer` None: nothing says which. `trained`: the
    matrices of adapters that a run goes on to train on top of them.

    As a source of rows it is what a session is, so that `checkpoint` and `tensorfile` write either."""

    path: Path
    model: ModelConfig
    arrays: Mapping[str, RowsOfArray]
    tokenizer: tokenizers.Tokenizer | None
    trained: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return parameters(self.model)

    @property
    def bf16(self) -> frozenset[str]:
        """The parameters whose numbers are bf16 as they lie."""
        return frozenset(name for name, array in self.arrays.items() if array[0:0].dtype == numpy_dtype("bf16"))

    def stored_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) in the dtype that they are stored in; those of padded ids are zero."""
        t = self.tensors[name]
        missing = hi - max(lo, min(hi, t.valid_rows))
        rows = self.arrays[name][lo : hi - missing]
        return np.concatenate([rows, np.zeros((missing, *t.shape[1:]), rows.dtype)]) if missing else rows

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) as fp32, a copy; those of padded ids are zero."""
        return self.stored_rows(name, lo, hi).astype(np.float32)

    def digest(self) -> str:
        """A hash of all parameter values, independent of the file format."""
        from xxhash import xxh3_64

        h = xxh3_64(repr([(name, t.valid_rows, t.shape) for name, t in self.tensors.items()]).encode())
        for name, t in self.tensors.items():
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4):
                h.update(self.read_rows(name, lo, hi).reshape(-1).view(np.uint8).data)
            mapping.release()
        mapping.check()
        return h.hexdigest()

    def load(self, session: Session, names: Collection[str] | None = None) -> None:
        """Stream all, or those of `names`, into the session's parameters."""
        for name, t in self.tensors.items():
            if names is not None and name not in names:
                continue
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4):
                session.write_rows(name, lo, self.stored_rows(name, lo, hi))
            mapping.release()
        for name, array in self.trained.items():
            session.write_rows(name, 0, array)
        mapping.check()

    def configured(self, config: Config, changes: Mapping[str, Any]) -> Config:
        """`config` for training this model: with its architecture, sizes and tokenizer, and sequences no longer than its positions.
        UserError where `changes` (the command line's) contradict it. Training-only fields, such as dropout, stay the run's."""
        known = entries(type(self.model))
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if section == "model" and not (name in known and known[name].of_run):
                found = getattr(self.model, name, None)
                if value != found:
                    raise UserError(f"{key} is {found!r} in {self.path}, the command line says {value!r}")
        model: Any = self.model
        if type(config.model) is type(model):
            model = replace(model, **{name: getattr(config.model, name) for name, e in known.items() if e.of_run})
        train, data = config.train, config.data
        if "train.seq" not in changes:
            train = replace(train, seq=min(train.seq, self.model.max_seq))
        if "data.tokenizer" not in changes:
            data = replace(data, tokenizer=self.tokenizer.name if self.tokenizer else tokenizers.Ids.name)
        return replace(config, model=model, data=data, train=train)


def of_checkpoint(path: Path) -> Weights:
    """The weights of a step folder that was verified."""
    checkpoint.need_numbers(path)
    model = overrides.from_json(checkpoint.read_meta(path)["config"], path / checkpoint.META).model
    file = path / checkpoint.WEIGHTS
    tensorfile.checked_header(file, parameters(model))
    return Weights(path, model, tensorfile.mapped(file), kinds.load_tokenizer(path, rows=model.vocab_size))
