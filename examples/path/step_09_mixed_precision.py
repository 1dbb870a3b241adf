"""9. Mixed precision and gradient accumulation: matmuls in bf16, and a batch as large as the optimizer wants it.

In bf16 activations and gradients take half the memory, and processors with instructions for it multiply faster; sums, the master
weights and Adam's moments stay fp32. A batch that does not fit goes in micro-batches, whose gradients are summed: two of 8 are one
of 16. So the model is that of program 8, and only the run changes: a step takes 28 sequences, as two micro-batches of 14."""

from __future__ import annotations

from common import BATCH, report, steps_asked, train
from step_08_positions import GPT, Config

MIXED = {"dtype": "bf16", "micro_batch_size": 14, "gradient_accumulation_steps": 2}


def difference(steps: int) -> float:
    """The largest difference between the losses of one batch and of the same batch in two halves, in fp32."""
    whole = train(Config(**GPT), steps, "whole", micro_batch_size=BATCH)
    halves = train(Config(**GPT), steps, "halves", micro_batch_size=BATCH // 2, gradient_accumulation_steps=2)
    return max(abs(a - b) for a, b in zip(whole.losses, halves.losses, strict=True))


def main(steps: int) -> float:
    few = min(steps, 10)
    print(f"{few} steps of {BATCH} sequences and of 2 x {BATCH // 2}: losses differ by at most {difference(few):.0e}")
    return report(train(Config(**GPT), steps, "mixed", **MIXED).val_nats)


if __name__ == "__main__":
    main(steps_asked())
