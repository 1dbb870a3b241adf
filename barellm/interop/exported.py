"""The formats to which a checkpoint may be exported, and the checks before."""

import shlex
from pathlib import Path

from barellm import models
from barellm.checkpoint import checkpoint, storage
from barellm.checkpoint.weights import Weights
from barellm.config import aliases, overrides
from barellm.data.llmc import LlmcOrder
from barellm.data.sources import prepare
from barellm.errors import UserError, nearest
from barellm.interop import adapters, card, gguf, gguf_writer, huggingface, llmc, llmc_state, llmc_tokenizer, vocabulary
from barellm.interop.sources import is_checkpoint, open_weights
from barellm.training.batch_rampup import BatchRampup

TOKENIZER, TRAINING = "llmc-tokenizer", "llmc-checkpoint"
PEFT = "peft"  # an adapter without its base
FORMATS = {  # and what each may be stored in
    "huggingface": ("fp32", "bf16"), PEFT: ("fp32",), "llmc": ("fp32", "bf16"), "gguf": gguf_writer.DTYPES, TOKENIZER: ("fp32",),
    TRAINING: ("fp32", "bf16"),
}  # fmt: skip


def export(source: Path, out: Path, *, kind: str, dtype: str, licence: str | None = None, merge: bool = False) -> list[str]:
    """Export the weights that `source` names to `out` and return lines for the user. `kind`, `dtype`: a key of FORMATS and one of
    its dtypes; `licence`: for the model card, None: not said; `merge`: merge an adapter into its base first. All is checked before
    anything is written: UserError if the format cannot hold the model or `out` exists."""
    _check_options(out, kind=kind, dtype=dtype, licence=licence)
    if kind == PEFT:
        return _adapter(source, out, licence=licence, merge=merge)
    weights = open_weights(source)
    if kind == TOKENIZER:
        content = llmc_tokenizer.content(weights.tokenizer)
        out.parent.mkdir(parents=True, exist_ok=True)
        with storage.new_file(out, size=len(content)) as file:
            file.write(content)
        return [f"{out}: a tokenizer of {weights.model.vocab_size:,} ids for llm.c"]
    _check_model(weights, kind=kind, merge=merge)
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == TRAINING:
        return _training(weights, out, dtype=dtype)
    if kind == "llmc":
        llmc.write(weights, out, dtype=dtype)
        return [f"{out}: llm.c's version {llmc.VERSIONS[dtype]}, {dtype}"]
    if kind == "gguf":
        note = gguf_writer.write(weights, out, dtype=dtype, name=card.title(weights), licence=licence)
        return [f"{out}: {dtype}", *([note] if note else [])]
    names = huggingface.write(weights, out, dtype=dtype, card=card.text(weights, dtype=dtype, licence=licence))
    lines = [f"{out}: {', '.join(names)}, {dtype}"]
    if vocabulary.SETTINGS not in names:
        tokenizer = weights.tokenizer.name if weights.tokenizer else "unknown"
        missing = "GPT-2's vocabulary is not on this machine"
        reason = missing if tokenizer == "gpt2" else f"transformers has none of kind {tokenizer}"
        lines.append(f"without a tokenizer: {reason}")
    return lines


def _check_options(out: Path, *, kind: str, dtype: str, licence: str | None) -> None:
    """UserError for an unknown format, a dtype that it does not have, a licence that it cannot say, or `out` that exists."""
    for option, name, known in (("--format", kind, FORMATS), ("--dtype", dtype, FORMATS.get(kind, ()))):
        if name not in known:
            also = {of: f" or {other}" for other, of in reversed(aliases.FORMATS.items())}
            listed = ", ".join(f"{one}{also.get(one, '')}" for one in known)
            raise UserError(f"{option} is {name!r}{nearest(name, [*known, *aliases.FORMATS])} (known: {listed})")
    if licence is not None and kind.startswith("llmc"):
        raise UserError(f"--license is {licence!r}, and a file of --format {kind} has no place for it: leave it out")
    if out.exists():
        raise UserError(f"--out {out} exists, expected a new {'folder' if kind in ('huggingface', PEFT, TRAINING) else 'file'}")


def _check_model(weights: Weights, *, kind: str, merge: bool) -> None:
    """UserError where the format `kind` cannot hold the model, or `merge` is given without an adapter, or missing with one."""
    if is_checkpoint(weights):
        has_adapter = "base" in checkpoint.read_meta(weights.path)
    else:
        has_adapter = (weights.path / adapters.CONFIG).is_file()
    if has_adapter != merge:
        hint = "export it as peft, or add --merge" if has_adapter else "leave out --merge"
        raise UserError(f"{weights.path} {'was trained on top of' if has_adapter else 'has no adapter and no'} a base: {hint}")
    if not hasattr(models.of(weights.model), "llmc_order" if kind.startswith("llmc") else "HUGGING_FACE"):
        raise UserError(f"{weights.path} is {models.name_of(weights.model)}, which --format {kind} does not have")
    reason = huggingface.hugging_face(weights.model).refused(weights.model)
    if reason is None and kind == "gguf":
        reason = gguf_writer.refused(weights.model)
    if reason:
        raise UserError(f"{weights.path}: {reason}")
    if kind == "gguf":
        gguf.package()  # UserError where it is missing


def _adapter(source: Path, out: Path, *, licence: str | None, merge: bool) -> list[str]:
    """Export the adapter of the run or checkpoint `source` as the PEFT folder `out`; returns lines for the user, as `export`."""
    if merge or licence is not None:
        raise UserError(f"--format {PEFT} is the adapter alone: leave out {'--merge' if merge else '--license'}")
    others = source.exists() and not checkpoint.holds_any(source)  # another program's file or folder
    step, _ = (source, []) if others else checkpoint.find(source, optimizer=False)
    if others or "base" not in (meta := checkpoint.read_meta(step)):
        raise UserError(f"{step} has no adapter of barellm's, expected a run that trained one")
    config = overrides.from_json(meta["config"], step / checkpoint.META)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = adapters.of_checkpoint(step, config.model)
    base = meta["base"]["path"]
    names = adapters.write(found, out, config=config, base=base)
    lines = [f"{out}: {', '.join(names)}, {len(found.pairs)} modules, of the base {base}"]
    if not huggingface.is_folder(Path(base)):
        opened = f"""PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base-hf"), "{out}")"""
        lines.append("which transformers cannot open (AutoPeftModelForCausalLM would try): make a folder of it, and name both")
        lines += [f"         barellm export {shlex.quote(base)} --format huggingface --out base-hf", f"         {opened}"]
    return lines


def _training(weights: Weights, out: Path, *, dtype: str) -> list[str]:
    """Export a llm.c checkpoint with AdamW's moments, from which llm.c can resume. UserError if the source has none."""
    moments = weights.path / checkpoint.OPTIMIZER
    if not is_checkpoint(weights) or not moments.is_file() or "base" in checkpoint.read_meta(weights.path):
        raise UserError(f"{weights.path} has no state of an optimizer: export it as llmc, which is weights alone")
    meta = checkpoint.read_meta(weights.path)
    config = overrides.from_json(meta["config"], weights.path / checkpoint.META)
    if config.optim.name != "adamw":
        raise UserError(f"{weights.path} has the state of {config.optim.name}, llm.c goes on with that of adamw alone")
    train, data_position, data = config.train, None, "data from the beginning of its shards, not shuffled"
    if config.data.order == "llmc":
        tokens = prepare(config.data, tokenizer=weights.tokenizer).train
        order = LlmcOrder(tokens, batch=train.micro_batch_size, seq=train.seq)
        data_position = order.data_position(BatchRampup(train).before(meta["step"]))
        data = f"data in its own order, from sample {data_position.sample} of shard {data_position.shards[data_position.shard]}"
    names = llmc_state.write(weights, moments, out, dtype=dtype, step=meta["step"], data_position=data_position)
    tokens = train.micro_batch_size * train.seq
    options = f"-b {train.micro_batch_size} -t {train.seq} -d {tokens * train.gradient_accumulation_steps}"
    return [f"{out}: {', '.join(names)}, {dtype}; {data}", f"llm.c goes on with it by -o {out} -y 1 {options}"]
