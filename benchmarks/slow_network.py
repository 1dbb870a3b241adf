"""Steps of several ranks on one machine, and on machines of their own joined by a slow network, plain and compressed. Needs root.

    python -m benchmarks.slow_network --out FILE [--ranks 2] [--rate 1gbit] [--delay-ms 1] [PRESET and its keys ...]

Each run is `barellm train` with one thread a rank; the machines are network namespaces (benchmarks/namespaces.py). Runs with other
options of compression and other networks take turns. A time is the median of a run's steps but for the first two. "alone" is a
rank with its rows and nobody to talk to: as many such processes run side by side as there are ranks, for they share the machine's
memory. With `--predict` the file gets beside all of them what `barellm plan --interconnect` would say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from barellm import models
from barellm.assembly.build import resolved
from barellm.config import Config, overrides
from barellm.distributed.launch import mpiexec
from barellm.tools.plan import scale
from barellm.tools.plan.roofline import measured_ceiling
from benchmarks.namespaces import Network, command

WARM = 2  # steps that are not counted
QUIET = ("--train.eval_every", "0", "--train.eval_tokens", "256", "--optim.warmup", "1")
# What MPI is told: messages by TCP, between namespaces that share nothing.
MESSAGES = {"UCX_TLS": "tcp", "BARELLM_THREADS": "1"}


def step_seconds(folder: Path) -> list[float]:
    """Seconds of each step of a run, those of WARM left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["tokens"] / row["step"] / row["tokens_per_s"] for row in rows if row["kind"] == "train"][WARM:]


def start(words: Sequence[str], out: Path, before: Sequence[str]) -> subprocess.Popen[bytes]:
    full = [*before, sys.executable, "-m", "barellm", "train", *words, *QUIET, "--steps", "100000", "--out", str(out)]
    return subprocess.Popen(full, env=os.environ | MESSAGES, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def until(folders: Sequence[Path], running: Sequence[subprocess.Popen[bytes]], steps: int) -> list[list[float]]:
    """The times of so many steps of runs that go on for ever; then they are ended, before they evaluate or save anything."""
    try:
        while True:
            time.sleep(0.5)
            if ended := [process for process in running if process.poll() is not None]:
                raise SystemExit(f"a run has ended: {ended[0].args}")
            found = [step_seconds(folder) if (folder / "metrics.jsonl").exists() else [] for folder in folders]
            if min(map(len, found)) >= steps:
                return found
    finally:
        for process in running:
            process.kill()  # the launcher, whose ranks end with it
            process.wait()


def trained(words: Sequence[str], out: Path, before: Sequence[str], steps: int) -> list[float]:
    return until([out], [start(words, out, before)], steps)[0]


def alone(words: Sequence[str], folder: Path, count: int, steps: int) -> list[float]:
    """Steps of `count` processes side by side that do not know of each other: those of the slowest."""
    cores = sorted(os.sched_getaffinity(0))
    folders = [folder / str(i) for i in range(count)]
    found = [start(words, out, ["taskset", "-c", str(cores[i % len(cores)])]) for i, out in enumerate(folders)]
    return max(until(folders, found, steps), key=median)


def configured(words: Sequence[str], *, powersgd: int, batch: int) -> Config:
    """The configuration that these words of a command mean."""
    base = models.preset(words[0])
    given = dict(zip(words[1::2], words[2::2], strict=True))
    short = {"data": "data.source", "dtype": "train.dtype"}
    found = {short.get(key.removeprefix("--"), key.removeprefix("--")): value for key, value in given.items()}
    found |= {"optim.powersgd": str(powersgd), "train.micro_batch_size": str(batch)}
    return resolved(overrides.changed(base, found), "cpu")


def predict(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add to each row what `plans.scale` says, with the utilisation that gives the step of a rank alone, without compression."""
    ceiling, words, ranks = measured_ceiling(threads=1), about["preset"], about["ranks"]

    def config(powersgd: int) -> Config:
        return configured(words, powersgd=powersgd, batch=about["batch"])

    alone = next(r["median_s"] for r in rows if (r["where"], r["powersgd"]) == ("alone", 0))
    utilisation = scale.reached(scale.rows_of(config(0), ranks), ceiling, alone)
    about |= {"utilisation": utilisation, "ceiling": ceiling.to_json()}
    for row in rows:
        name = {"memory": "memory", "network": about["link"], "alone": "memory"}[row["where"]]
        one = row["where"] == "alone"
        found = config(row["powersgd"])
        given = {"ceiling": ceiling, "utilisation": utilisation}
        if one:
            row["predicted_s"] = scale.work(scale.rows_of(found, ranks), 1, **given)[0].seconds
        else:
            step = "overlapped_step_s" if row["overlap"] else "step_s"
            row["predicted_s"] = scale.prediction(found, ranks, name, **given)["ways"]["direct"][step]
        off = row["predicted_s"] / row["median_s"] - 1
        print(f"{said(row)} {row['median_s'] * 1e3:9.1f} ms, predicted {row['predicted_s'] * 1e3:9.1f} ({off:+.1%})")


def variants(powersgd: str, overlap: str, places: Sequence[str]) -> list[tuple[int, int, str]]:
    """The runs: columns of factors, whether gradients travel early, where. Early is only what goes by messages as it is."""
    found = itertools.product(map(int, powersgd.split(",")), map(int, overlap.split(",")), places)
    return list(dict.fromkeys((rank, int(early and not rank and where == "network"), where) for rank, early, where in found))


def said(row: dict[str, Any]) -> str:
    return f"powersgd {row['powersgd']:>3}  {'early' if row['overlap'] else 'behind':<7} {row['where']:<8}"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no run outlives this one
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--predict", action="store_true", help="run nothing: say what was to be expected of the file's runs")
    parser.add_argument("--link", default="1gbit-1ms", help="what plans.scale calls this network")
    parser.add_argument("--powersgd", default="0,4", help="ranks of compression, with commas; 0: none")
    parser.add_argument("--overlap", default="1,0", help="with commas: 1 and 0, gradients that travel early or not")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="that are counted, of each run")
    parser.add_argument("--where", default="alone,memory,network", help="the runs that are done; the file keeps the others")
    args, words = parser.parse_known_args()
    about = {
        "preset": words,
        "ranks": args.ranks,
        "batch": args.batch,
        "rate": args.rate,
        "delay_ms": args.delay_ms,
        "link": args.link,
    }
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        before = json.loads(args.out.read_text())
        about, requested = {key: before[key] for key in about}, about
        if about != requested and not args.predict:
            raise SystemExit(f"{args.out} is about other runs: expected a new file")
        rows = before["rows"]
    if args.predict:
        predict(about, rows)
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        return
    network = Network(args.ranks, args.rate, args.delay_ms / 1e3)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        places = [where for where in args.where.split(",") if where]
        launcher = stack.enter_context(network.up()) if "network" in places else Path()
        before_words = {"memory": [mpiexec(), "-n", str(args.ranks)], "network": command(launcher, network.names(), [])}
        for rank, early, where in variants(args.powersgd, args.overlap, places):
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                folder = Path(name) / "run"
                own = [*words, "--optim.powersgd", str(rank), "--optim.overlap", str(early), "--train.micro_batch_size"]
                if where == "alone":
                    seconds = alone([*own, str(args.batch // args.ranks)], folder, args.ranks, args.steps)
                else:
                    seconds = trained([*own, str(args.batch)], folder, before_words[where], args.steps)
                key = {"powersgd": rank, "overlap": early, "where": where}
                rows = [row for row in rows if not key.items() <= row.items()]
                rows.append(key | {"median_s": median(seconds), "seconds": seconds})
                print(f"{said(key)} {median(seconds) * 1e3:9.1f} ms {seconds}", flush=True)
                args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
