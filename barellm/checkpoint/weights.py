"""A model's weights where they lie, by barellm's names: what a run may begin with, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from barellm import overrides
from barellm.checkpoint import checkpoint, tensorfile
from barellm.config import Config, ModelConfig
from barellm.data.kinds import load_tokenizer
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.models.gpt2 import declare_parameters
from barellm.program.builder import Program, Store
from barellm.program.tensor import Tensor
from barellm.runtime.session import Session


@cache
def parameters(model: ModelConfig) -> dict[str, Tensor]:
    """The parameters of a model by name, fp32."""
    store = Store()
    declare_parameters(Program(store), model)
    return store.tensors


@dataclass(frozen=True)
class Weights:
    """`arrays`: by barellm's names, matrices (out, in), in fp32, bf16 or fp16; "wte" has at least vocab_size rows. They are views
    of mapped files, read when they are used. `tokenizer` None: nothing says which.

    As a source of rows it is what a session is, so that `checkpoint` and `tensorfile` write either.
    """

    path: Path
    model: ModelConfig
    arrays: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return parameters(self.model)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) as fp32; those of padded ids are zero."""
        t = self.tensors[name]
        rows = np.zeros((hi - lo, *t.shape[1:]), np.float32)
        valid = max(0, min(hi, t.valid_rows) - lo)
        rows[:valid] = self.arrays[name][lo : lo + valid]
        return rows

    def load(self, session: Session) -> None:
        """Stream all into the session's parameters."""
        for name, t in self.tensors.items():
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4):
                session.write_rows(name, lo, self.read_rows(name, lo, hi))

    def without_tokenizer(self, option: str) -> UserError:
        """What is wrong where nothing says which tokenizer it is, and the command's option that could."""
        ids = self.model.vocab_size
        name = f"name its kind, or a folder that holds it, with {option}"
        return UserError(f"{self.path} has {ids} ids and does not say of which tokenizer: {name}")

    def configured(self, config: Config, changes: Mapping[str, Any]) -> Config:
        """`config` with this model's sizes, with its positions where sequences would be longer, and with its tokenizer. UserError
        where `changes`, what the user asked for, say otherwise. Dropout is the run's."""
        for key, value in changes.items():
            if key.startswith("model.") and key != "model.dropout":
                found = getattr(self.model, key.removeprefix("model."))
                if value != found:
                    raise UserError(f"{key} is {found!r} in {self.path}, the command line says {value!r}")
        if self.tokenizer is None:
            raise self.without_tokenizer("--data.tokenizer")
        sizes = {f.name: getattr(self.model, f.name) for f in fields(ModelConfig) if f.name != "dropout"}
        train, data = config.train, config.data
        if "train.seq" not in changes:
            train = replace(train, seq=min(train.seq, self.model.max_seq))
        if "data.tokenizer" not in changes:
            data = replace(data, tokenizer=self.tokenizer.name)
        return replace(config, model=replace(config.model, **sizes), data=data, train=train)


def of_checkpoint(path: Path) -> Weights:
    """The weights of a step folder that was verified."""
    model = overrides.from_json(checkpoint.read_meta(path)["config"]).model
    file = path / checkpoint.WEIGHTS
    arrays, expected = tensorfile.mapped(file), parameters(model)
    tensorfile.check_names(file, arrays, expected)
    for name, t in expected.items():
        if (arrays[name].dtype, arrays[name].shape) != (np.float32, t.shape):
            found = f"{arrays[name].dtype} {arrays[name].shape}"
            raise UserError(f"{file}: {name} is {found}, expected float32 {t.shape}")
    return Weights(path, model, arrays, load_tokenizer(path))
