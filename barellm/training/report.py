"""The summary of a run on the screen: before its first step and after its last one."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, exp
from pathlib import Path
from typing import Any

from barellm import __version__, models
from barellm.assembly.build import CompiledModel
from barellm.config import Config, OptimConfig
from barellm.data import examples, sources
from barellm.errors import visible
from barellm.models.adapters import targeted
from barellm.models.training_schedule import model_schedule
from barellm.training.batch_rampup import BatchRampup
from barellm.training.console import duration, in_words, short

FEW_WINDOWS = 8  # a loss over fewer windows than these says little
LONG_S = 30 * 86400.0  # a run of a month is rarely meant
MIB = 1 << 20
LONGEST_PROMPT = 60  # characters of the prompt in a command to try


def header(compiled: CompiledModel, data: sources.Dataset, folder: Path, kept: str = "config.json has every setting") -> list[str]:
    """The lines printed before a run: model, data, machine, batch and output `folder`. config.json has every setting."""
    config, found = compiled.config, compiled.meta()
    model, train = config.model, config.train
    units = f"{found['threads']} threads" if "threads" in found else found["processor"]
    memory = f"{compiled.plan.arena_bytes / MIB:,.1f} MiB of memory"
    sizes = f"{models.name_of(model)}, d_model {model.d_model}, vocabulary {model.vocab_size:,}"
    batch = f"batch size {train.micro_batch_size} x gradient accumulation {train.gradient_accumulation_steps}"
    tokens = train.micro_batch_size * train.gradient_accumulation_steps * train.seq
    lines = [
        f"barellm {__version__}, preset {config.preset}",
        f"model    {short(compiled.parameters)} parameters: {sizes}, context {model.max_seq:,}",
        *_adapter(compiled),
        f"dataset  {data.name}",
        f"         {short(len(data.train))} train tokens, {short(len(data.val))} validation tokens "
        f"(tokenizer {data.tokenizer.name})",
        f"machine  {found['device']}, {found['isa']}, {found['dtype']}, {units}; {memory}",
        f"lr       {_rates(config)}",
        f"batch    {batch} x {train.seq:,} = {tokens:,} tokens a step",
        *_roofline(compiled),
        f"output   {folder}, where {kept}",
    ]
    if data.byte_lengths is None:
        lines.append(f"         no samples, no bits per byte: {data.no_text}")
    elif not data.tokenizer.exact:
        lines.append("         bits per byte are of the source's bytes: this tokenizer does not give every text back as it was")
    return lines


def _adapter(compiled: CompiledModel) -> list[str]:
    """The header line about the adapter or the trained subset of parameters; [] if all weights are trained."""
    adapter = compiled.config.adapter
    if not adapter.active:
        return []
    store = compiled.programs["forward_backward"].store
    what = f"parameters {adapter.train_only}"
    if adapter.method:
        leaves = ", ".join(dict.fromkeys(m.leaf for m in targeted(compiled.config.model, adapter.targets)))
        what = f"LoRA of rank {adapter.rank}, scale {adapter.scale:.4g}, on {leaves}"
    frozen = adapter.codes or store.frozen_dtype or "fp32"
    return [f"adapter  {short(store.counts[1])} trained: {what}; all else is frozen, matrices in {frozen}"]


def _rates(config: Config) -> str:
    """The peak learning rates and their schedule in words; a model's own schedule (stages) comes before `optim.schedule`."""
    optim, highest = config.optim, config.optim.rates(lambda high, low: high)
    words = f"{optim.lr:.4g}"
    if optim.has_muon:
        ratio = f" ({optim.muon_lr_ratio:.4g} times that)" if optim.lr else ""
        words += f" (AdamW), Muon {highest['muon_lr']:.4g}{ratio}"
    if model_schedule(config) is not None:
        return f"{words}, times the lr of each stage"
    fall = "" if optim.schedule == "constant" else f" to {optim.min_lr:.4g}"
    warmup = f" after {optim.warmup:,} steps of warmup" if optim.warmup else ""
    return f"{words}, {optim.schedule}{fall}{warmup}"


def rates(found: Mapping[str, float]) -> str:
    muon = f"  muon_lr {found['muon_lr']:.1e}" if "muon_lr" in found else ""
    return f"lr {found['lr']:.1e}{muon}"


def rate_options(optim: OptimConfig) -> str:
    """The options that give a run the learning rates of `optim`, whatever else its command line says."""
    return f"--lr {optim.lr:.12g}" + (f" --optim.muon_lr {optim.muon_lr:.12g}" if optim.has_muon else "")


def lower_rates(optim: OptimConfig) -> str:
    """The options of half the learning rates, with the lowest one where it would be above them."""
    half = replace(optim, lr=optim.lr / 2, muon_lr=optim.muon_lr / 2, min_lr=min(optim.min_lr, optim.lr / 2))
    return rate_options(half) + (f" --optim.min_lr {half.min_lr:g}" if half.min_lr != optim.min_lr else "")


def _roofline(compiled: CompiledModel) -> list[str]:
    """The header lines about a step's time at the machine's peak, which is MFU's reference."""
    flops, peak = compiled.flops_per_step, compiled.peak()
    if not peak.value:
        return [f"         {flops / 1e9:,.2f} GFLOP a step"]
    time = f"{flops / peak.value * 1e3:,.1f} ms a step (estimate)"
    lines = [f"roofline {time}: {flops / 1e9:,.2f} GFLOP at {peak.value / 1e9:,.0f} GFLOP/s (measured)"]
    if peak.noisy:
        lines.append(f"         rough, and MFU too: measurements differ by {peak.spread:.0%} (doctor --measure)")
    return lines


def intentions(
    config: Config, epoch_tokens: int, *, batch_rampup: BatchRampup, done: int, total: int | None, bound_s: float
) -> list[str]:
    """The budget lines: steps, tokens, epochs, least time, and warnings about settings that can hardly be meant. `epoch_tokens`:
    tokens of one pass over the data. `done`, `total`: steps; `total` None: `minutes` decides. `bound_s`: roofline seconds of a step
    at its full batch, 0 if unmeasured."""
    train, optim = config.train, config.optim
    if total is None:
        most = f", at most {train.steps:,}" if train.steps else ""
        steps = f"as many steps as fit into {train.minutes:g} min{most}"
        return [f"budget   {steps}: other machines do more or fewer"]
    tokens = batch_rampup.tokens(total) - batch_rampup.tokens(done)
    epochs = "" if train.overfit else f", {short(tokens / max(1, epoch_tokens))} epochs"
    least = (batch_rampup.before(total) - batch_rampup.before(done)) / train.gradient_accumulation_steps * bound_s
    time = f"; {in_words(least)} at the roofline" if least >= 1 else ""
    batches = f"{train.overfit:,} micro-batches" if train.overfit > 1 else "micro-batch"
    lines = [f"overfit  the first {batches} again and again: the loss should go to 0"] if train.overfit else []
    if train.overfit > (available := -(-epoch_tokens // (train.micro_batch_size * train.seq))):
        found = f"the text has {available:,} micro-batches: this is all of them"
        lines.append(f"warning: train.overfit is {train.overfit}, and {found}")
    steps = f"{total - done:,} step{'s' * (total - done != 1)}"
    lines += [f"budget   {steps}, {short(tokens)} tokens{epochs}{time}"]
    if train.batch_rampup_from:
        most = train.gradient_accumulation_steps
        full = next((step for step in range(total) if batch_rampup.count(step) == most), None)
        last = f"{batch_rampup.count(total - 1)} in the last" if full is None else f"{most} from step {full + 1:,} on"
        lines.append(f"rampup   {train.batch_rampup_from} micro-batches in the first step, {last}")
    if optim.warmup >= total:
        lines.append(warmup_warning(config, total))
    if least > LONG_S:
        lines.append(months_warning(f"even at this machine's measured peak this run takes {in_words(least)}"))
    return lines


def warmup_warning(config: Config, total: int) -> str:
    return (
        f"warning: the warmup of {config.optim.warmup:,} steps is not over after {total:,}: the learning rate never reaches "
        f"{config.optim.lr:g} (--optim.warmup {ceil(total / 20)} would be {ceil(total / 20) / total:.0%})"
    )


def months_warning(words: str) -> str:
    return f"warning: {words}: fewer --steps, a smaller preset, or --minutes"


def perplexity(nats: float) -> str:
    return f"{exp(min(nats, 700)):,.4g}"


def packing(packed: examples.Packed) -> list[str]:
    """Lines about sequence packing: efficiency, and truncated or dropped examples."""
    share = sum(last - first for row in packed.rows for first, last in row) / (len(packed.rows) * (packed.seq + 1))
    kept = sum(map(len, packed.rows))
    sees = "each sees itself alone" if packed.masked else "each sees those before it in its sequence"
    lines = [f"packing  {kept:,} examples in {len(packed.rows):,} sequences of {packed.seq} tokens, {share:.0%} efficiency; {sees}"]
    if packed.cut:
        lines.append(f"warning: {packed.cut:,} examples are longer than a sequence and cut: use a larger --seq")
    if packed.dropped:
        why = "their prompts fill a sequence; a larger --seq takes them in"
        lines.append(f"warning: {packed.dropped:,} examples are left out: {why}")
    return lines


def few_windows(windows: int, seq: int, key: str) -> str:
    """A warning, or "" where validation has enough windows."""
    if windows >= FEW_WINDOWS:
        return ""
    several = f"only {windows} windows" if windows > 1 else "a single window"
    return f"warning: validation has {several} of {seq} tokens, so its loss is noisy: more text, or a larger {key}"


def closing(result: dict[str, Any], folder: Path, config: Config, *, prompt_text: str | None = None) -> list[str]:
    """The report at the end of a run: loss, time, files, and commands to try next. `prompt_text`: of one on examples, a prompt of
    theirs, or "" where they are messages."""
    nats, bits = result["val_nats"], result["val_bits_per_byte"]
    loss = f"{nats:.4f} nats per token (perplexity {perplexity(nats)})"
    lines = ["", f"done     {result['steps']:,} steps in {duration(result['seconds'])}, {result['tokens_per_s']:,.0f} tokens/s"]
    if result["seconds_all_sessions"] > result["seconds"] + 1:
        lines[-1] += f"; {duration(result['seconds_all_sessions'])} with the sessions before"
    if bits is None:
        lines.append(f"loss     {loss} on validation tokens")
    else:
        lines.append(f"loss     {loss}, {bits:.3f} bits per byte")
        gzip = f"; gzip -9: {zipped:.3f} bits per byte" if (zipped := result.get("gzip_bits_per_byte")) else ""
        lines.append(f"         on {result['val_bytes']:,} bytes of validation text{gzip}")
    if "tokenize_share" in result:
        lines.append(
            f"python   {result['tokenize_share']:.0%} of {result['tokenize_lines']} sampled lines parse, "
            f"{result['tokenize_share_of_validation']:.0%} of the library's own"
        )
    run = shlex.quote(str(folder)) + models.option(config.model)
    prompt = ' --prompt "def main("' if config.data.source == "stdlib" else ' --prompt "..."'
    try_it = (f"sample {run}{prompt}", f"eval {run} --data FILE --split all")
    if prompt_text is not None:
        short = prompt_text if len(prompt_text) <= LONGEST_PROMPT else f"{prompt_text[:LONGEST_PROMPT]}..."
        words = shlex.quote(visible(short.replace("\\", r"\\").replace("\n", r"\n")))
        try_it = (f"sample {run} --prompt {words} --temperature 0" if prompt_text else f"chat {run}", f"eval {run}")
    return [
        *lines, f"saved    {result['checkpoint']}", f"         {folder} has metrics.jsonl, loss.png and config.json too",
        f"next     barellm {try_it[0]}", f"         barellm {try_it[1]}",
        f"         barellm train --out {run} --resume --steps {2 * result['steps']}",
    ]  # fmt: skip
