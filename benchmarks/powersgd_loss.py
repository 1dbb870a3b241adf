"""What compressed gradients cost in loss: `python -m benchmarks.powersgd_loss --runs FOLDER --out FILE`.

Trains shakespeare-char for 1000 steps on 4 ranks, plain and with PowerSGD of several ranks, from several seeds. Runs that the
folder has already are not done again. Beside the losses stand the bytes that a rank sends in a step, by `plans.scale`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import models
from barellm.assembly.build import build_programs, resolved
from barellm.distributed.launch import mpiexec
from barellm.tools.plan import scale

RANKS, STEPS, PRESET = 4, 1000, "shakespeare-char"
COMPRESSED, SEEDS = (0, 1, 2, 4, 8, 16, 32), (1337, 7)


def trained(folder: Path, text: str, powersgd: int, seed: int) -> dict[str, Any]:
    """The last line of a run's metrics."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or '"kind": "result"' not in metrics.read_text():
        words = [mpiexec(), "-n", str(RANKS), sys.executable, "-m", "barellm", "train", PRESET, "--data", text]
        words += ["--steps", str(STEPS), "--train.eval_every", "250", "--train.seed", str(seed)]
        words += ["--optim.powersgd", str(powersgd), "--out", str(folder)]
        subprocess.run(words, check=True, env=os.environ | {"BARELLM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return json.loads(metrics.read_text().splitlines()[-1])


def sent(powersgd: int) -> float:
    """Bytes that a rank sends in a step, as a mean over the ranks."""
    preset = models.preset(PRESET)
    config = resolved(replace(preset, optim=replace(preset.optim, powersgd=powersgd)), "cpu")
    store = build_programs(config)["forward_backward"].store
    return sum(c.nbytes for c in scale.collectives(config, store, RANKS)) * (RANKS - 1) / RANKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--text", default="", help="Shakespeare's text (default: the preset's own source)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for powersgd in COMPRESSED:
        found = [trained(args.runs / f"r{powersgd}-s{seed}", args.text, powersgd, seed) for seed in SEEDS]
        losses = [row["val_nats"] for row in found]
        rows.append({"powersgd": powersgd, "sent_bytes": sent(powersgd), "val_nats": losses})
        print(f"powersgd {powersgd:>3}  {sent(powersgd) / 1e3:9.1f} kB  {' '.join(f'{loss:.4f}' for loss in losses)}")
    about = {name: found[0][name] for name in ("isa", "processor", "dtype", "parameters")}
    about |= {"preset": PRESET, "ranks": RANKS, "steps": STEPS, "seeds": SEEDS}
    args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
