"""What it costs in loss that Adam's weights are bf16 and nothing more (`model.adam_weights`), as in modded-nanogpt's record:
the small model of ablation.py from several seeds, with both, on the same text in the same order.

    python benchmarks/adam_weights.py --steps 120 --seeds 3

A busy machine does not change the losses. What the file has is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import ablation

from barellm.config.overrides import changed
from barellm.cpu.backend import default_dtype, describe
from barellm.data.sources import prepare
from barellm.training.inputs import with_vocabulary

FILE = Path(__file__).parent / "results" / "adam-weights-speedrun-small.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    config = changed(ablation.base(), {"model.bigram_first": "reserved"})
    data = prepare(config.data)
    config = with_vocabulary(config, data.tokenizer)
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    for seed in range(1, args.seeds + 1):
        for kept in ("bf16", "fp32"):
            key = {"adam_weights": kept, "steps": args.steps, "seed": seed}
            if any(row.items() >= key.items() for row in runs):
                continue
            one = changed(config, {"model.adam_weights": kept})
            loss, _ = ablation.trained(one, data, steps=args.steps, seed=seed, max_tokens=1 << 17)
            runs.append(key | {"loss": loss})
            print(json.dumps(runs[-1]), flush=True)
            facts = {"kind": "adam weights", "preset": "speedrun-small", "dtype": default_dtype(), "machine": describe()}
            FILE.write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n")
    losses = {k: [row["loss"] for row in runs if row["adam_weights"] == k] for k in ("bf16", "fp32")}
    p = ablation.p_value(losses["bf16"], losses["fp32"])
    print(f"bf16 {mean(losses['bf16']):.4f}, fp32 {mean(losses['fp32']):.4f} nats; p = {p:.3f}")


if __name__ == "__main__":
    main()
