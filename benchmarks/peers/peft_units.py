"""The adapter of docs/finetuning.md's example by PEFT: from the same weights, on the same examples in the same steps, with the same
learning rates. Each example has a row of its own here, which is what packing with a mask gives.

    barellm export base --format hf --out base-hf
    python benchmarks/peers/peft_units.py base-hf tuned tuned-peft     # tuned: the run of `barellm train --adapt`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from barellm.checkpoint import checkpoint
from barellm.config import overrides
from barellm.data.examples import ExampleRows
from barellm.data.kinds import load_tokenizer
from barellm.data.sources import prepare


def alone(tokens: np.ndarray, targets: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of packed rows that have targets, each in a row, as long as the longest."""
    found = []
    for row in range(len(tokens)):
        for first in np.unique(starts[row]):
            own = starts[row] == first
            if (targets[row][own] >= 0).any():
                found.append((tokens[row][own], targets[row][own]))
    most = max(len(one) for one, _ in found)
    padded = [
        [np.pad(part, (0, most - len(part)), constant_values=fill) for part, fill in zip(one, (0, -1), strict=True)]
        for one in found
    ]
    both = torch.as_tensor(np.array(padded), dtype=torch.long)
    return both[:, 0], both[:, 1]


def main() -> None:
    base, run, out = map(Path, sys.argv[1:])
    config = overrides.from_json(json.loads((run / "config.json").read_text()))
    tokenizer = load_tokenizer(checkpoint.steps(run / "checkpoints")[0])
    train, optim, adapter = config.train, config.optim, config.adapter
    data = prepare(config.data, tokenizer=tokenizer)
    assert data.examples is not None and config.data.document_mask == "on"
    rows = ExampleRows(data.examples[0], seq=train.seq, seed=train.seed, fill=tokenizer.start, masked=True)
    torch.manual_seed(train.seed)
    how = {"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.rslora, "target_modules": adapter.targets}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **how))
    model.eval()  # without dropout, which GPT-2's folder asks for
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)
    ours = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [row for row in ours if row["kind"] == "train"]
    size, begin = train.micro_batch_size * train.gradient_accumulation_steps, time.perf_counter()
    for step, row in enumerate(ours):
        tokens, targets = rows.batch(step * size, size, seq=train.seq, document=0)
        starts = rows.starts(step * size, size, tokens)
        assert starts is not None
        inputs, wanted = alone(tokens, targets, starts)
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
        if not step or (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, barellm {row['loss']:.4f}", flush=True)
    print(f"{len(ours)} steps in {time.perf_counter() - begin:.1f} s")
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
