"""Weights from whatever a path names: a barellm run or checkpoint, a Hugging Face folder, a GGUF file, an llm.c file."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import models
from barellm.checkpoint import checkpoint
from barellm.checkpoint.weights import Weights, of_checkpoint
from barellm.config import Config
from barellm.config.aliases import PRESETS
from barellm.data.kinds import check_kind, fitting, load_tokenizer, make_tokenizer
from barellm.data.tokenizers import Ids
from barellm.errors import UserError, nearest
from barellm.interop import adapters, gguf_reader, hub, huggingface, llmc, llmc_tokenizer, vocabulary

KNOWN = "a run or checkpoint of barellm, a folder of Hugging Face's, a file of llama.cpp (GGUF) or llm.c, or hf:OWNER/NAME"


def open_weights(path: Path, *, tokenizer: str = "") -> Weights:
    """Open the weights that `path` names (KNOWN lists the kinds); an adapter is merged into its base. `tokenizer`: a kind or
    folder, for sources without one. UserError for anything unreadable, and for a tokenizer that contradicts the source's."""
    weights = of_others(path, tokenizer=tokenizer)
    if weights is None:
        if not checkpoint.holds_any(path):
            raise UserError(f"{path} holds no model, expected {KNOWN}")
        weights = of_step(_newest(path))
    return _with_tokenizer(weights, tokenizer) if tokenizer else weights


def _newest(path: Path) -> Path:
    step, wrong = checkpoint.find(path, optimizer=False)
    for text in wrong:
        print(f"barellm: warning: skipped {text}", file=sys.stderr)
    return step


def of_step(step: Path) -> Weights:
    """The weights of a step folder that was verified; an adapter is merged into the base that it names."""
    if "base" not in checkpoint.read_meta(step):
        return of_checkpoint(step)
    base, found = _apart(step)
    return adapters.merged(base, found, path=step)


def _apart(step: Path) -> tuple[Weights, adapters.Adapter]:
    """The base that a checkpoint names, with the tokenizer of the run, and what was trained on top of it."""
    base = open_base(checkpoint.read_meta(step), step)
    return replace(base, tokenizer=load_tokenizer(step, rows=base.model.vocab_size)), adapters.of_checkpoint(step, base.model)


def begin_from(config: Config, changes: Mapping[str, Any]) -> tuple[Config, Weights]:
    """The weights that `config` says to begin with, and `config` with their sizes. An adapter, a run's or PEFT's, goes on being
    trained on top of its base where the run trains adapters; else it is merged. `changes`: what the user asked for."""
    path, tokenizer = Path(config.train.init_from), str(changes.get("data.tokenizer", ""))
    if config.adapter.method and (path / adapters.CONFIG).is_file():
        base = _base_of_peft(path, tokenizer)
        return adapters.continued(base, adapters.read(path, base.model), config, changes)
    if config.adapter.method and path.exists() and checkpoint.holds_any(path):
        step = _newest(path)
        if "base" in checkpoint.read_meta(step):
            base, found = _apart(step)
            if found.pairs:
                return adapters.continued(_with_tokenizer(base, tokenizer) if tokenizer else base, found, config, changes)
    weights = open_weights(path, tokenizer=tokenizer)
    return weights.configured(config, changes), weights


def starting_weights(config: Config, changes: Mapping[str, Any], start: Any = None) -> tuple[Config, Weights | None]:
    """`config` with the sizes of the weights that a run needs besides its checkpoint, and those: what a new run begins with, or
    what the checkpoint `start` (`training.resume.Start`) was trained on top of. `changes`: what the user asked for."""
    if start is None:
        return begin_from(config, changes) if config.train.init_from else (config, None)
    return config, open_base(start.meta, start.path) if config.adapter.active else None


def with_adapter(weights: Weights, path: str | Path) -> Weights:
    """Weights with the adapter of a run or of PEFT that was trained on top of them; as they are where `path` is empty."""
    if path and (Path(path) / adapters.CONFIG).is_file():  # which has no hash of its base, as runs have, but a name
        named = str(checkpoint.read_json(Path(path) / adapters.CONFIG).get("base_model_name_or_path") or "")
        names = [part for part in Path(named).parts if part != "checkpoints" and not part.startswith("step-")]
        if names and names[-1].lower() not in str(weights.path.resolve()).lower():
            print(f"barellm: warning: {path} names {named} as its base, and is laid over {weights.path}", file=sys.stderr)
    return adapters.merged(weights, adapters.open_adapter(Path(path), weights)) if path else weights


def open_base(meta: Mapping[str, Any], origin: Path) -> Weights:
    """The base weights that the checkpoint `origin` with this `meta` was trained on. UserError if missing or changed."""
    base = meta.get("base", {})
    path, known = base.get("path"), base.get("hash")
    if not isinstance(path, str) or not isinstance(known, str):
        raise UserError(f"{origin / checkpoint.META} names no base, expected its path and hash")
    if not Path(path).exists():
        raise UserError(f"{path} is not there, the weights that {origin} was trained on top of: put them there again")
    weights = open_weights(Path(path))
    if (found := weights.digest()) != known:
        whose = f"that of the weights that {origin} was trained on top of"
        raise UserError(f"{path} has the hash {found}, expected {known}, {whose}: put those there again")
    return weights


def of_others(path: Path, *, tokenizer: str = "") -> Weights | None:
    """Weights in another program's format, or on the hub; None for a folder that holds a barellm run, or nothing known."""
    path = hub.fetched(str(path)) if hub.is_name(path) else path
    if not path.exists():
        checkpoint.must_exist(path, expected=f"{KNOWN}{_elsewhere(path)}")
    if path.is_file():
        if _first_bytes(path) == gguf_reader.MAGIC:
            return gguf_reader.read(path, tokenizer=not tokenizer)
        return llmc.read(path)
    if (path / adapters.CONFIG).is_file():
        return with_adapter(_base_of_peft(path, tokenizer), path)
    if not huggingface.is_folder(path):
        return None
    weights = huggingface.read(path)
    if tokenizer not in ("", "bpe", "gpt2", "huggingface"):  # of other kinds such a folder has none, and its files do not matter
        return weights
    return replace(weights, tokenizer=vocabulary.read(path, weights.model.vocab_size))


def _base_of_peft(path: Path, tokenizer: str) -> Weights:
    base = checkpoint.read_json(path / adapters.CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).exists() or (Path(base) / adapters.CONFIG).is_file():
        raise UserError(f"{path} is an adapter of {base}, which is no model here: name that by its folder, and this with --adapter")
    return open_weights(Path(base), tokenizer=tokenizer)


def _elsewhere(path: Path) -> str:
    """A hint for the name of a model that is a preset, nearly one, or on the hub."""
    name = str(path)
    preset = PRESETS.get(name, name)
    public = [other for other, ours in PRESETS.items() if ours == preset]  # GPT-2's sizes, as the hub calls them
    public_name = public[0] if public else name if name.count("/") == 1 and name[:5] != "runs/" and not path.parent.exists() else ""
    words = [f"{name} is a preset, whose weights barellm.train({name!r}) makes"] * (preset in models.presets())
    words += [f"the one on the hub is hf:{public_name}"] * bool(public_name)
    return "".join(f"; {word}" for word in words) or nearest(name, models.presets())


def _first_bytes(path: Path) -> bytes:
    """The file's first four bytes. UserError for torch.save's files: unpickling executes code chosen by the file's author."""
    with path.open("rb") as file:
        begin = file.read(4)
    if begin[:2] in (b"PK", b"\x80\x02") or path.suffix in (".pt", ".pth", ".ckpt", ".pkl"):
        hint = "save the model with save_pretrained(folder), or its tensors as safetensors"
        raise UserError(f"{path} is a pickle of torch.save, which is never read, as it may run code: {hint}")
    return begin


def is_checkpoint(weights: Weights) -> bool:
    return (weights.path / checkpoint.MANIFEST).is_file()


def _with_tokenizer(weights: Weights, name: str) -> Weights:
    """The weights with the tokenizer that the user named; UserError if a checkpoint has another one."""
    from_llmc = Path(name).suffix == ".bin"
    if not from_llmc:
        check_kind(name)
    current, size = weights.tokenizer, weights.model.vocab_size
    if current is not None and name == current.name:
        return weights
    if current is not None and current.name != Ids.name and is_checkpoint(weights):
        raise UserError(f"data.tokenizer is {current.name!r} in {weights.path}, the command line says {name!r}")
    if name in ("bpe", "chars"):
        raise UserError(f"a tokenizer {name!r} is made from a text: name the folder with the one that {weights.path} has")
    chosen = llmc_tokenizer.read(Path(name)) if from_llmc else make_tokenizer(name, list)
    return replace(weights, tokenizer=fitting(chosen, size, name))
