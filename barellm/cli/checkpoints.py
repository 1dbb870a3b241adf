"""Opening a checkpoint for commands that only read it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from barellm import overrides
from barellm.assembly.machine import Machine, check_device, open_machine
from barellm.checkpoint import checkpoint
from barellm.config import Config
from barellm.data.kinds import load_tokenizer
from barellm.data.tokenizers import Tokenizer
from barellm.models.course import enter


@dataclass(frozen=True)
class Found:
    """A checkpoint before its weights are read."""

    path: Path  # the step's folder
    config: Config
    tokenizer: Tokenizer
    device: str

    @contextmanager
    def opened(self, *, positions: int) -> Iterator[Machine]:
        """A machine with its weights, and a KV cache of so many `positions` (0: none, and no program "decode")."""
        with open_machine(self.config, device=self.device, training=False, positions=positions) as machine:
            checkpoint.load(self.path, machine.session, optimizer=False)
            meta = checkpoint.read_meta(self.path)
            enter(machine.session, self.config, meta["step"], meta.get("total_steps"))
            yield machine


def found(name: str, *, device: str, dtype: str | None = None, batch: int = 1) -> Found:
    """The checkpoint of that name, or a run's newest one that is whole, in the dtype that it was trained in unless another is
    named. Says on stderr which newer ones are damaged."""
    check_device(device)
    path, wrong = checkpoint.find(Path(name))
    for text in wrong:
        print(f"barellm: warning: skipped {text}", file=sys.stderr)
    meta = checkpoint.read_meta(path)
    config = overrides.from_json(meta["config"])
    tokenizer = load_tokenizer(path)
    config = replace(config, train=replace(config.train, batch=batch, dtype=dtype or config.train.dtype))
    config.check()
    return Found(path, config, tokenizer, device)
