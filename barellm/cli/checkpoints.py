"""Opening a checkpoint for commands that only read it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import overrides
from barellm.assembly.machine import check_device, open_machine
from barellm.checkpoint import checkpoint
from barellm.config import Config
from barellm.data.kinds import load_tokenizer
from barellm.data.tokenizers import Tokenizer


@contextmanager
def opened(
    name: str, *, device: str, dtype: str | None = None, batch: int = 1
) -> Iterator[tuple[Path, Config, Tokenizer, Any]]:
    """(step folder, configuration, tokenizer, session with its weights), in the dtype that it was trained in unless another is
    named. Says on stderr which newer ones are damaged."""
    check_device(device)
    path, wrong = checkpoint.find(Path(name))
    for text in wrong:
        print(f"barellm: warning: skipped {text}", file=sys.stderr)
    config = overrides.from_json(checkpoint.read_meta(path)["config"])
    tokenizer = load_tokenizer(path)
    config = replace(config, train=replace(config.train, batch=batch, dtype=dtype or config.train.dtype))
    config.check()
    with open_machine(config, device=device, training=False) as machine:
        checkpoint.load(path, machine.session, optimizer=False)
        yield path, machine.config, tokenizer, machine.session
