"""Architectures by name. Each is one module of this folder, which is imported when it is asked for and has

    Config                 a frozen dataclass of `barellm.config.ModelConfig`, whose fields carry help and bounds
    PRESETS                preset's name -> a function that returns its `barellm.config.Config`
    declare(p, cfg)        the parameters, declared on a Program; returns them as the two below want them
    forward(p, cfg, tokens, targets, training=)   tokens and targets (B, T) i32 -> the loss (1,)

and where it has them

    decode(p, cfg, tokens, caches=, **places)  the same with KV caches -> fp32 logits (B, 1, Vp) of the last position; the last two
                           are for continuous batching (`assembly/serving.py`). Without decode text is drawn by `forward`, of all
                           that the model sees, for each token again: slow, and right
    HIDDEN                 its hidden matrices, which `optim.name muon` updates by Muon, in the words of `optim.rules.Rule`; "h.*"
                           unless it says: matrices of blocks whose names begin so
    training_schedule(config)   the steps of a run that has stages, and what programs read in each (`models/training_schedule.py`)
    loss_gradient(cfg)     what the gradient of each target's loss is multiplied by in training, where that is not one over the
                           number of the step's targets; None where it is
    documents=             of forward: `program.tensor.Documents` where rows are packed and each token sees its own document alone
    WHOLE                  True: it has no KV cache, and decode is given the text from its beginning each time
    HUGGING_FACE, llmc_order(cfg)   its weights in files of other programs (`models/hf_mapping.py`); of Hugging Face's
                           architectures that it can be the first is what a model is exported as, unless its `family` names one
    TORCH_TWIN             the script in benchmarks/peers/ that takes the same step in PyTorch, the fields of Config it takes, and
                           those that it knows in their usual values only

Nothing else in barellm knows an architecture by name, so a new one is a new file here. Loading one loads no NumPy. A module that
lies anywhere else is one too, once `user_model.add` or the program has imported it; it may be without PRESETS."""

import shlex
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from barellm.config import Config, ModelConfig
from barellm.config.aliases import PRESETS
from barellm.errors import UserError, check_known, nearest

HELPERS = {  # files of this folder that are no architecture
    "adapters", "decoders", "families", "hf_mapping", "speedrun_schedule", "stages", "training_schedule", "unit", "user_model",
}  # fmt: skip
HIDDEN = "h.*"  # hidden matrices of a model whose module does not say
BEFORE_NAMES = "gpt2"  # what a configuration is that does not name its architecture: there was one
ADDED: dict[str, Path] = {}  # by `user_model.add`: name -> its file


def names() -> list[str]:
    return [*(m.name for m in iter_modules(__path__) if m.name not in HELPERS), *ADDED]


def module(name: str) -> ModuleType:
    """The module of an architecture: from this folder, or one already imported that defines a `Config`. Never imported by name, so
    a file that names it cannot make code run. UserError for other names."""
    known = names()
    loaded = sys.modules.get(name)
    config = getattr(loaded, "Config", None)
    if name not in known and isinstance(config, type) and issubclass(config, ModelConfig):
        assert loaded is not None
        return loaded
    if name not in known:
        hint = "one of your own is found with --model FILE.py, or once its module is imported"
        raise UserError(f"unknown architecture {name!r}{nearest(name, known)} (known: {', '.join(known)}; {hint})")
    return sys.modules[name] if name in ADDED else import_module(f"{__name__}.{name}")


def name_of(model: ModelConfig) -> str:
    """The architecture of a configuration; of a program's own model the whole name of its module."""
    return type(model).__module__.removeprefix(f"{__name__}.")


def of(model: ModelConfig) -> Any:
    """The module that a configuration belongs to: anywhere, so that a program's own model needs no file here."""
    return import_module(type(model).__module__)


def whole(model: ModelConfig) -> bool:
    """Whether the program "decode" is given the text from its beginning each time."""
    module = of(model)
    return getattr(module, "WHOLE", False) or not hasattr(module, "decode")


def masks_documents(model: ModelConfig) -> bool:
    return "documents" in signature(of(model).forward).parameters


def hidden(model: ModelConfig) -> str:
    """Patterns of the names of a model's hidden matrices."""
    return getattr(of(model), "HIDDEN", HIDDEN)


def loss_gradient(model: ModelConfig) -> float | None:
    """What the gradient of each target's loss is multiplied by in training; None: one over the number of targets."""
    chosen = getattr(of(model), "loss_gradient", None)
    return None if chosen is None else chosen(model)


def begins_uniform(model: ModelConfig) -> bool:
    """Whether new weights give all tokens nearly equal probabilities, by a loss that is the mean over the targets."""
    scaled = getattr(model, "unit_scaling", False) or getattr(model, "embedding_multiplier", 1.0) != 1.0
    own = not type(model).__module__.startswith(f"{__name__}.")
    return not (scaled or own or hasattr(of(model), "training_schedule"))


def presets() -> dict[str, Any]:
    return {name: make for architecture in names() for name, make in _presets_of(architecture).items()}


def option(model: ModelConfig) -> str:
    """What a command line needs for this model beside the name of its run: " --model FILE", or nothing."""
    file = ADDED.get(name_of(model))
    return f" --model {shlex.quote(str(file))}" if file else ""


def usual() -> str:
    """The preset of a command that names none: of the architectures that were added the first, else "default"."""
    return next((name for architecture in ADDED for name in _presets_of(architecture)), "default")


def _presets_of(architecture: str) -> dict[str, Any]:
    return getattr(module(architecture), "PRESETS", {})


def preset(name: str) -> Config:
    """The preset of that name or alias; an unknown one is refused with the nearest known name."""
    known, name = presets(), PRESETS.get(name, name)
    check_known("preset", name, known)
    return known[name]()


def named(words: Iterable[str]) -> str | None:
    """The first of some words that is a preset or an alias of one."""
    known = presets()
    return next((name for word in words if (name := PRESETS.get(word, word)) in known), None)
