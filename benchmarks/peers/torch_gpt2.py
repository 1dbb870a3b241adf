"""The peer: a GPT-2 training step in PyTorch (forward, backward, clip, fused AdamW) on random tokens, on the CPU or a GPU.

Serves turns, so that several variants can be measured interleaved: after the first step it prints a JSON line, then reads lines
"N" from standard input, runs N steps for each and prints their seconds and its peak memory so far.

    echo 5 | python torch_gpt2.py --mode compile --dtype bf16 --batch 4 --seq 64
    echo 20 | python torch_gpt2.py --mode compile --device cuda --batch 32 --seq 1024

On a GPU nobody waits for it between the steps of a turn; each of them gets the mean, loss and memory are read at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time


def since_start() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def build(a: argparse.Namespace):
    """nanoGPT's model in few lines: pre-norm blocks, fused qkv, flash attention, tied classifier, GPT-2's initialisation."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    C, H = a.channels, a.heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=a.bias), nn.LayerNorm(C, bias=a.bias)
            self.qkv, self.proj = nn.Linear(C, 3 * C, bias=a.bias), nn.Linear(C, C, bias=a.bias)
            self.fc, self.fcproj = nn.Linear(C, 4 * C, bias=a.bias), nn.Linear(4 * C, C, bias=a.bias)

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = (y.view(B, T, H, C // H).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(a.vocab, C), nn.Embedding(a.seq, C)
            self.blocks = nn.ModuleList([Block() for _ in range(a.layers)])
            self.ln_f = nn.LayerNorm(C, bias=a.bias)
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02 / ((2 * a.layers) ** 0.5 if "proj" in name else 1))

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, a.vocab).float(), targets.view(-1))

    return GPT()


def main() -> None:
    p = argparse.ArgumentParser()
    for name, default in {"layers": 12, "heads": 12, "channels": 768, "vocab": 50304, "batch": 4, "seq": 64}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--bias", type=int, default=1)
    p.add_argument("--mode", choices=("eager", "compile"), default="eager")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=int, default=0)
    a = p.parse_args()
    a.bias = bool(a.bias)

    import torch

    imported = since_start()
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = build(a).to(a.device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if a.mode == "compile" else model
    tokens, targets = torch.randint(0, a.vocab, (2, a.batch, a.seq), device=a.device)

    def step():
        with torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def steps(count: int) -> tuple[list[float], list[float]]:
        """Losses and seconds of so many steps."""
        if a.device == "cuda":
            start = time.perf_counter()
            losses = [step() for _ in range(count)]
            torch.cuda.synchronize()
            seconds = [(time.perf_counter() - start) / count] * count
            return [x.item() for x in losses], seconds
        losses, seconds = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(step().item())
            seconds.append(time.perf_counter() - start)
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
    machine = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if a.device == "cuda" else {}
    print(json.dumps({"first_step_s": since_start(), "import_s": imported, "step_s": seconds, "loss": loss, **machine,
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


if __name__ == "__main__":
    main()
