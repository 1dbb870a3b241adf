"""The formats to which a checkpoint may be exported, and the checks before."""

from __future__ import annotations

from pathlib import Path

from barellm import models
from barellm.errors import UserError, nearest
from barellm.interop import huggingface, llmc, vocabulary
from barellm.interop.sources import open_weights

FORMATS, DTYPES = ("huggingface", "llmc"), ("fp32", "bf16")


def export(source: Path, out: Path, *, kind: str, dtype: str) -> list[str]:
    """Writes the weights that `source` names to `out`; returns what to tell. UserError for a model that the format cannot hold
    and for an `out` that is there."""
    for option, name, known in (("--format", kind, FORMATS), ("--dtype", dtype, DTYPES)):
        if name not in known:
            raise UserError(f"{option} is {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    weights = open_weights(source)
    module = models.of(weights.model)
    if not hasattr(module, {"huggingface": "HUGGING_FACE", "llmc": "llmc_order"}[kind]):
        raise UserError(f"{weights.path} is {models.name_of(weights.model)}, which --format {kind} does not have")
    if why := module.HUGGING_FACE.refused(weights.model):
        raise UserError(f"{weights.path}: {why}")
    if out.exists():
        raise UserError(f"--out {out} exists, expected a new {'folder' if kind == 'huggingface' else 'file'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "llmc":
        llmc.write(weights, out, dtype=dtype)
        return [f"{out}: llm.c's version {llmc.VERSIONS[dtype]}, {dtype}"]
    names = huggingface.write(weights, out, dtype=dtype)
    said = [f"{out}: {', '.join(names)}, {dtype}"]
    if vocabulary.SETTINGS not in names:
        kind = weights.tokenizer.name if weights.tokenizer else "unknown"
        why = "GPT-2's vocabulary is not on this machine" if kind == "gpt2" else f"transformers has none of kind {kind}"
        said.append(f"without a tokenizer: {why}")
    return said
