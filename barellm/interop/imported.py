"""Another program's weights as a checkpoint of barellm, at step 0, with a configuration that says what they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import __version__, models
from barellm.checkpoint import checkpoint
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.weights import Weights
from barellm.config import Config, ModelConfig, overrides
from barellm.config.fields import entries
from barellm.data.kinds import tokenizer_files
from barellm.data.tokenizers import Ids
from barellm.errors import UserError
from barellm.interop import huggingface
from barellm.interop.llmc_state import State, Training
from barellm.training.batch_rampup import BatchRampup


def like(weights: Weights) -> Config:
    """The preset of this model's sizes, whatever its vocabulary; else the one that its module names, with them. It has no text."""
    known = [make() for make in models.of(weights.model).PRESETS.values()]
    same = [p for p in known if _sizes(p.model) == _sizes(weights.model)]
    config = weights.configured(same[0] if same else models.preset(huggingface.hugging_face(weights.model).preset), {})
    return replace(config, data=replace(config.data, source=""))


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The part of a configuration that is the model's own, and not the run's, the tokenizer's or the text's."""
    known = {name for name, entry in entries(type(model)).items() if not entry.of_run}
    return {name: getattr(model, name) for name in known - {"vocab_size", "padded_vocab", "max_seq"}}


def save(
    weights: Weights, out: Path, *, config: Config | None = None, step: int = 0, total: int | None = None,
    state: State | None = None,
) -> Path:  # fmt: skip
    """Save another program's weights as a checkpoint in the new folder `out`, and return its folder. `config`, `step` and `total`:
    known if the weights are a run's. With llm.c's `state` (optimizer, data position) a run of `config` can resume from it."""
    tokenizer = weights.tokenizer or Ids(weights.model.vocab_size)
    config = config or like(weights)
    meta = {
        "total_steps": total, "config": overrides.to_json(config), "source": str(weights.path),
        "tokenizer": {"kind": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "versions": {"barellm": __version__},
    }  # fmt: skip
    source: checkpoint.Source = weights
    if state is not None:
        source, step = (Training(weights if not state.master else replace(weights, arrays=state.master), state), state.step)
        meta |= _training(config, state)
    with RunFolder(out, resume=None) as folder:
        folder.need_space(checkpoint.checkpoint_bytes(source))
        return checkpoint.save(folder.checkpoints, source, step=step, meta=meta, tokenizer=tokenizer_files(tokenizer), keep=1)


def _training(config: Config, state: State) -> dict[str, Any]:
    """The meta.json entries from which a run resumes that began in llm.c: no hash of its data, no elapsed time. UserError where
    this configuration could not have taken these steps."""
    optim, train = config.optim, config.train
    if optim.name != "adamw":
        raise UserError(f"optim.name is {optim.name!r}, and {state.path} has the moments of AdamW, expected 'adamw'")
    if not train.steps or train.minutes:
        raise UserError("a run that resumes from another program's state ends after some number of steps: --steps N")
    if train.steps < state.step:
        raise UserError(f"train.steps is {train.steps}, {state.path} is of step {state.step}: ask for more steps")
    samples = BatchRampup(train).before(state.step) * train.micro_batch_size
    return {
        "total_steps": train.steps, "samples": samples, "tokens": samples * train.seq, "seconds": 0.0, "data": None,
        "llmc": state.place, "machine": {"isa": "llm.c"},
    }  # fmt: skip
