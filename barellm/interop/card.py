"""The model card of an exported folder: what it is, its numbers, how to load it. Its head is what Hugging Face's hub reads."""

import json
from pathlib import Path, PurePath
from typing import Any

from barellm import __version__
from barellm.checkpoint import checkpoint
from barellm.checkpoint.weights import Weights
from barellm.config import overrides
from barellm.errors import UserError
from barellm.interop import huggingface
from barellm.interop.sources import is_checkpoint
from barellm.training import metrics

NO_LICENCE = "unknown"  # the hub's word where nobody says one
HEAD = """---
license: {licence}
library_name: transformers
pipeline_tag: text-generation
tags:
- barellm
---

# {title}

{what}, exported from barellm {version} in {dtype}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH OF THIS FOLDER")
{tokenizer}
```

"""
TOKENIZER = 'tokenizer = AutoTokenizer.from_pretrained("PATH OF THIS FOLDER")'


def text(weights: Weights, *, dtype: str, licence: str | None) -> str:
    """The model card (README.md) of these weights, with the training data of the run that they are from, if there is one."""
    model, tokenizer = weights.model, weights.tokenizer
    count = sum(t.trained for t in weights.tensors.values())
    loads = "# it has no tokenizer that transformers knows" if tokenizer is None or tokenizer.eot is None else TOKENIZER
    head = HEAD.format(
        licence=json.dumps(licence or NO_LICENCE), title=title(weights), version=__version__, dtype=dtype, tokenizer=loads,
        what=f"A model of {huggingface.hugging_face(model).model_type}'s architecture with {count:,} parameters",
    )  # fmt: skip
    rows = {"parameters": f"{count:,}", "positions": f"{model.max_seq:,}", "vocabulary": f"{model.vocab_size:,} ids"}
    if tokenizer is not None:
        rows["tokenizer"] = tokenizer.name
    details = ""
    if is_checkpoint(weights):
        meta = checkpoint.read_meta(weights.path)
        config = overrides.from_json(meta["config"], weights.path / checkpoint.META)
        try:
            rows |= _training(weights.path, meta, config.train)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{weights.path}: its meta.json or its run's metrics.jsonl has what no run wrote") from None
        details = "\n## Configuration\n\n```json\n" + json.dumps(_public(meta["config"]), indent=2) + "\n```\n"
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"{head}| | |\n|---|---|\n{table}{details}"


def _public(value: Any) -> Any:
    """The same without the folders of files: they are the author's, and a card is for everyone."""
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    return PurePath(value).name if isinstance(value, str) and "/" in value else value


def title(weights: Weights) -> str:
    """The name of the run that the weights are from, where there is one, else that of their own folder or file."""
    run = _run_of(weights.path) if is_checkpoint(weights) else None
    return (run or weights.path.resolve()).name


def _run_of(step: Path) -> Path | None:
    """The folder of the run whose checkpoint a step is; None for a step that lies somewhere else."""
    checkpoints = step.resolve().parent
    return checkpoints.parent if checkpoints.name == "checkpoints" else None


def _training(step: Path, meta: dict[str, Any], train: Any) -> dict[str, str]:
    """Table rows {title: text} about a checkpoint, from its meta.json and the metrics up to its step; of each kind the last one."""
    rows = {"step": f"{meta['step']:,}"}
    if "samples" in meta:
        rows["tokens trained on"] = f"{meta.get('tokens', meta['samples'] * train.seq):,}"
        rows["text"] = _public(meta["data"]["name"])
    run = _run_of(step)
    found = [] if run is None else metrics.read(run / "metrics.jsonl")
    for row in (row for row in found if row.get("step", 0) <= meta["step"]):
        if row["kind"] == "eval":
            rows["validation loss"] = f"{row['val_nats']:.4f} nats per token"
            if row["val_bits_per_byte"] is not None:
                rows["validation loss"] += f", {row['val_bits_per_byte']:.4f} bits per byte"
        elif row["kind"] == "hellaswag":
            rows["HellaSwag"] = f"acc {row['acc']:.4f}, acc_norm {row['acc_norm']:.4f} ({row['total']:,} examples)"
    return rows
