"""What every PyTorch twin of a model does as a peer: training steps on random tokens (forward, backward, and what ends a step: clip
and fused AdamW unless a twin says otherwise), on the CPU or a GPU, in a process that waits for its turns.

After the first step it prints a JSON line, on a GPU also which backend of attention a step uses. Then it reads lines "N" from
standard input, runs N steps for each and prints their seconds and its peak memory so far. On a GPU nobody waits for it between
the steps of a turn: each of them gets the mean, and the losses and the memory are read at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

COMMON = {"layers": 12, "heads": 12, "d_model": 768, "vocab": 50304, "batch": 4, "seq": 64}

KERNELS = re.compile(r"^(?!aten::|autograd::|\W).*(flash_|fmha|sdpa)")  # on a GPU: flash attention's, xFormers', cuDNN's


def since_start() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def initialise(model: nn.Module, *, layers: int, residual: tuple[str, ...]) -> None:
    """GPT-2's initialisation: std 0.02, of the matrices whose names have a word of `residual` less with the depth."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02 / ((2 * layers) ** 0.5 if any(word in name for word in residual) else 1))


def adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """It decays the matrices. Not `fused`: a loop over parameters with an operation for each term."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=fused, foreach=False)


def attention_of(step: Callable[[], object], device: str) -> dict[str, list[str]]:
    """Which backends of scaled_dot_product_attention a step uses: those of PyTorch's ops that it calls ("flash", "efficient",
    "cudnn", "math"), and on a GPU the names of the kernels that are those of attention."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages()}
    ops = {found[1] for name in names if (found := re.match(r"aten::_scaled_dot_product_(?:attention_)?([a-z]+)", name))}
    return {"ops": sorted(ops), "kernels": sorted(name[:120] for name in names if KERNELS.search(name))}


def arguments(own: dict[str, Any], words: list[str] | None = None) -> argparse.Namespace:
    """The options that all twins have, and `own` of this one: name -> default. Flags are 0 or 1."""
    p = argparse.ArgumentParser()
    for name, default in (COMMON | own).items():
        p.add_argument(f"--{name}", type=type(default), default=default)
    p.add_argument("--mode", choices=("eager", "compile"), default="eager")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--attention", action="store_true", help="also on the CPU, tell which backend of attention ran")
    return p.parse_args(words)


def clipped_adamw(model: nn.Module, *, fused: bool = True) -> Callable[[], None]:
    """What ends a step: clip, AdamW, and no gradients for the next."""
    optimizer = adamw(model, fused=fused)

    def end() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return end


def serve(
    build: Callable[[argparse.Namespace], nn.Module],
    own: dict[str, Any],
    *,
    ending: Callable[[Any], Callable[[], None]] = clipped_adamw,
    cycle: int = 1,
) -> None:
    """`build(a)`: the model, which is called with tokens and targets (B, T) and returns the loss. `ending(model)`: what ends
    a step. Where steps differ, `cycle` of them are timed together, and the mean of theirs counts as one step."""
    imported = since_start()
    a = arguments(own)
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = build(a).to(a.device)
    end = ending(model)
    run = torch.compile(model) if a.mode == "compile" else model
    tokens, targets = torch.randint(0, a.vocab, (2, a.batch, a.seq), device=a.device)

    def step():
        with torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(tokens, targets)
        loss.backward()
        end()
        return loss

    def steps_of_a_cycle():
        return [step() for _ in range(cycle)][-1]

    def steps(count: int) -> tuple[list[float], list[float]]:
        """Losses and seconds of so many steps."""
        if a.device == "cuda":
            start = time.perf_counter()
            losses = [steps_of_a_cycle() for _ in range(count)]
            torch.cuda.synchronize()
            seconds = [(time.perf_counter() - start) / count / cycle] * count
            return [x.item() for x in losses], seconds
        losses, seconds = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(steps_of_a_cycle().item())
            seconds.append((time.perf_counter() - start) / cycle)
        return losses, seconds

    def memory() -> dict[str, int]:
        if a.device == "cpu":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "device_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_device_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total - free,  # of all processes
        }

    (loss,), (seconds,) = steps(1)
    first_step_s, facts = since_start(), {}
    if a.device == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    if a.device == "cuda" or a.attention:
        facts |= {"attention": attention_of(step, a.device)}
    print(json.dumps({"first_step_s": first_step_s, "import_s": imported, "step_s": seconds, "loss": loss, **facts,
                      "version": torch.__version__, "threads": torch.get_num_threads()}), flush=True)  # fmt: skip
    for line in sys.stdin:
        before = resource.getrusage(resource.RUSAGE_SELF)
        losses, seconds = steps(int(line))
        after = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps({
            "step_s": seconds,
            "losses": losses,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "minor_faults": after.ru_minflt - before.ru_minflt,
            "peak_rss_bytes": peak_rss_bytes(),
            **memory(),
        }), flush=True)  # fmt: skip
