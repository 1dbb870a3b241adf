"""What simulated number formats of matmuls cost in loss: `shakespeare-char` in bf16, and with operands rounded to short formats.

python benchmarks/matmul_formats.py TEXT     the runs that the file has not yet; TEXT: tinyshakespeare.txt
python benchmarks/matmul_formats.py --write  the table of docs/fp8.md
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "fp8.md", ROOT / "benchmarks" / "results" / "matmul-formats.json"
RUNS = (  # matmul_formats, exponent_bias, stochastic_rounding
    ("", "", ""),
    ("e4m3,e4m3,e5m2", "static", ""),
    ("e4m3,e4m3,e5m2b31", "static", ""),
    ("e4m3,e4m3,e5m2", "floating", ""),
    ("e4m3,e4m3,e5m2", "delayed", ""),
    ("e4m3,e4m3,e5m2", "learned", ""),
    ("e3m2", "floating", ""),
    ("e2m1", "floating", ""),
    ("e2m1", "floating", "gradients"),
    ("e4m3", "static", ""),
)


def options(run: tuple[str, str, str]) -> list[str]:
    keys = ("matmul_formats", "exponent_bias", "stochastic_rounding")
    return [word for key, value in zip(keys, run, strict=True) if value for word in (f"--train.{key}", value)]


def measure(text: Path, steps: int, seeds: int) -> None:
    from barellm.cpu.backend import describe

    found: dict[str, Any] = {"kind": "matmul_formats", "preset": "shakespeare-char", "machine": describe(), "runs": []}
    found = json.loads(FILE.read_text()) if FILE.exists() else found
    for seed in range(1, seeds + 1):
        for run in RUNS:
            key = {"run": list(run), "steps": steps, "seed": seed}
            if any({k: row[k] for k in key} == key for row in found["runs"]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "barellm", "train", "shakespeare-char", "--data", str(text), "--dtype", "bf16"]
                command += ["--steps", str(steps), "--train.seed", str(seed), "--train.eval_tokens", "0", "--out", folder, "--json"]
                said = subprocess.run([*command, *options(run)], check=True, capture_output=True, text=True).stdout
                curve = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            losses = [round(row["loss"], 4) for row in curve if row["kind"] == "train"]
            nats = float(re.findall(r'"val_nats": ([0-9.]+)', said)[-1])
            found["runs"].append(key | {"val_nats": nats, "losses": losses})
            print(json.dumps(key | {"val_nats": nats}), flush=True)
            FILE.write_text(json.dumps(found) + "\n")


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| `matmul_formats` | `exponent_bias` | `stochastic_rounding` | validation loss, nats | beside bf16 |",
        "|---|---|---|---|---|",
    ]
    of = {run: [row["val_nats"] for row in rows if tuple(row["run"]) == run] for run in RUNS}
    for run, losses in of.items():
        names = [f"`{word}`" if word else "" for word in run] if run[0] else ["none: bf16", "", ""]
        each = ", ".join(f"{nats:.3f}" for nats in losses)
        lines.append(f"| {' | '.join(names)} | {each} | {f'{mean(losses) - mean(of[RUNS[0]]):+.3f}' if run[0] else ''} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write:
        table = markdown(json.loads(FILE.read_text())["runs"])
        between = r"(<!-- formats -->\n).*?(<!-- end -->)"
        PAGE.write_text(re.sub(between, lambda m: f"{m[1]}{table}\n{m[2]}", PAGE.read_text(), flags=re.DOTALL))
    else:
        measure(args.text, args.steps, args.seeds)


if __name__ == "__main__":
    main()
