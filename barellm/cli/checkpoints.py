"""Opening a checkpoint for commands that only read it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from barellm import models
from barellm.assembly.build import CompiledModel, check_device, chosen_device, open_model
from barellm.checkpoint import checkpoint, quantized
from barellm.checkpoint.weights import Weights, of_checkpoint, parameters
from barellm.config import AdapterConfig, Config, overrides
from barellm.data import kinds, tokenizers
from barellm.errors import UserError
from barellm.models.training_schedule import on_step
from barellm.program.quantization import scheme


@dataclass(frozen=True)
class Found:
    """A checkpoint or another program's model before its weights are read, or a preset, whose weights are drawn from its seed."""

    path: Path | None  # the step's folder, or what another program wrote
    config: Config
    tokenizer: tokenizers.Tokenizer
    device: str
    weights: str  # as products read them: "" for numbers, or a scheme of few bits
    source: Weights | None = None  # where the weights are numbers that somebody trained

    @contextmanager
    def opened(
        self, *, positions: int, rows: int = 1, scoring: tuple[int, int] | None = None, documents: bool = False, exact: bool = False
    ) -> Iterator[CompiledModel]:
        """Context manager: the compiled model with weights loaded, with programs for decoding (KV cache of `rows` x `positions`),
        for scoring, or for evaluation (positions 0). `scoring`, `documents`, `exact`: as in `assembly.build.build_programs`."""
        program = "decode" if positions else "score" if scoring else "eval"
        needed = (program,) if self.path else (program, "init")
        options = {"device": self.device, "positions": positions, "rows": rows, "scoring": scoring}
        options |= {"weights": self.weights, "only": needed, "documents": documents, "exact": exact}
        bf16 = None if self.path is None else self.source.bf16 if self.source else ()
        with open_model(self.config, training=False, bf16=bf16, **options) as compiled:
            if self.path is None:
                compiled.initialize(self.config.train.seed)
            elif self.source is not None:
                self.source.load(compiled.loading)
            else:
                schemes = {name: m.how for name, m in compiled.matrices.items() if not m.stays}
                quantized.load(self.path, compiled.loading, parameters(self.config.model), schemes)
            if self.path is not None and (self.path / checkpoint.MANIFEST).is_file():
                meta = checkpoint.read_meta(self.path)
                on_step(compiled.session, self.config, meta["step"], meta.get("total_steps"))
            yield compiled


def found_or_fresh(name: str, *, device: str, dtype: str | None = None, weights: str | None = None, adapter: str = "") -> Found:
    """As `found`; if there is no such folder, a preset of that name with random weights, whose tokenizer must need no text."""
    if Path(name).exists() or name not in models.presets() or adapter:
        return found(name, device=device, dtype=dtype, weights=weights, adapter=adapter)
    check_device(device)
    if weights is not None:
        scheme(weights)
    config = models.preset(name)
    if (kind := config.data.tokenizer) not in ("bytes", "gpt2"):
        what = f"({kind}) is made from its text: train it" if kind else "comes with its published weights: barellm import them"
        raise UserError(f"the tokenizer of {name} {what} first, then name the run")
    config = _changed(config, 1, dtype)
    return Found(None, config, kinds.make_tokenizer(kind, lambda: ()), chosen_device(device, config), weights or "")


def found(name: str, *, device: str, dtype: str | None = None, batch: int = 1, weights: str | None = None, adapter="") -> Found:
    """Find a checkpoint (a run's newest complete one) or another program's model, without reading weights. `dtype`: default is the
    trained one. `weights`: a quantization scheme. `adapter`: a folder to merge. Damaged newer checkpoints are named on stderr."""
    check_device(device)
    if weights is not None:
        scheme(weights)
    if (foreign := _of_others(Path(name))) is not None:
        from barellm.interop import imported, sources

        tokenizer = foreign.tokenizer or tokenizers.Ids(foreign.model.vocab_size)
        config = _changed(imported.like(foreign), batch, dtype)
        foreign = sources.with_adapter(foreign, adapter)
        return Found(foreign.path, config, tokenizer, chosen_device(device, config), weights or "", source=foreign)
    path, wrong = checkpoint.find(Path(name), optimizer=False)
    for text in wrong:
        print(f"barellm: warning: skipped {text}", file=sys.stderr)
    meta = checkpoint.read_meta(path)
    config = overrides.from_json(meta["config"], path / checkpoint.META)
    config = _changed(config, batch, dtype)
    stored = quantized.stored_scheme(path, meta)
    if stored and weights not in (None, stored, meta["weights"]):
        made_of = meta.get("source", "the run that it was made of")
        raise UserError(f"{path} has weights {stored}, the command line says {weights}: use {made_of}")
    source = None
    if "base" in meta or adapter:
        from barellm.interop import sources

        source = sources.with_adapter(sources.of_step(path), adapter)
    elif not stored:
        source = of_checkpoint(path)
    tokenizer = (source and source.tokenizer) or kinds.load_tokenizer(path, rows=config.model.vocab_size)
    return Found(path, config, tokenizer, chosen_device(device, config), stored or weights or "", source)


def _of_others(path: Path) -> Weights | None:
    """What another program wrote; what reads it is imported only then."""
    if checkpoint.holds_any(path):
        return None
    from barellm.interop.sources import of_others

    return of_others(path)


def _changed(config: Config, batch: int, dtype: str | None) -> Config:
    """The configuration of a session that trains nothing."""
    train = replace(config.train, micro_batch_size=batch, dtype=dtype or config.train.dtype)
    config = replace(config, adapter=AdapterConfig(), train=train)
    config.check()
    return config
