"""Texts side by side beside one by one, and HellaSwag's pace beside that of the forward pass: gpt2-124m of random weights.

python -m benchmarks.side_by_side --processor NAME --out benchmarks/results/side-by-side.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from barellm import models
from barellm.assembly.build import CompiledModel, open_model
from barellm.cpu.threads import thread_count
from barellm.data.tokenizers import Ids
from barellm.evaluation.scoring import Scorer, Text, shape_for
from barellm.generation.decode import open_decoder
from barellm.generation.samplers import Sampling

ROWS, PROMPT, TOKENS, ROUNDS = (1, 2, 4, 8, 16), 64, 33, 3
TEXTS, SHORTEST, LONGEST = 80, 40, 160  # HellaSwag's endings with their contexts have about so many tokens of GPT-2
SEQ, BATCH = 256, 4


def decoding(compiled: CompiledModel) -> dict[int, list[float]]:
    """Tokens a second of all texts together after their first tokens, by how many there are; the sizes take turns."""
    model = compiled.config.model
    decoder = open_decoder(compiled.session, model, Ids(model.vocab_size), positions=256)
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, PROMPT).tolist()
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(ROUNDS):
        for rows, rates in found.items():
            hows = [Sampling(seed=i) for i in range(rows)]
            times = [perf_counter() for _ in decoder.together([prompt] * rows, count=TOKENS, hows=hows)]
            rates.append((len(times) - rows) / (times[-1] - times[rows - 1]))
    return found


def scoring(scored: CompiledModel, compiled: CompiledModel, texts: list[Text], shape: tuple[int, int]) -> dict[str, list[float]]:
    """Tokens a second, those of padding not counted, of HellaSwag's texts and of full windows in the program "eval"."""
    session, r = compiled.session, np.random.default_rng(2)
    scorer, fed = Scorer(scored.session, batch=shape[0], seq=shape[1]), sum(len(text.ids) - 1 for text in texts)
    windows = r.integers(0, 50257, (BATCH, SEQ)).astype(np.int32)
    found: dict[str, list[float]] = {"hellaswag": [], "eval": []}
    for _ in range(ROUNDS):
        begin = perf_counter()
        scorer.run(texts)
        found["hellaswag"].append(fed / (perf_counter() - begin))
        session.write("tokens", windows)
        session.write("targets", windows)
        begin = perf_counter()
        for _ in range(4):
            session.run("eval", batch=BATCH, seq=SEQ, inv_targets=1.0)
            session.read("loss")
        found["eval"].append(4 * BATCH * SEQ / (perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processor", required=True)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    preset = models.preset("gpt2-124m")
    config = replace(preset, train=replace(preset.train, micro_batch_size=BATCH, seq=SEQ, dtype=args.dtype))
    r = np.random.default_rng(1)
    texts = [Text(r.integers(0, 50257, n).tolist(), 9) for n in r.integers(SHORTEST, LONGEST, TEXTS)]
    shape = shape_for(texts, tokens=BATCH * SEQ, most_seq=1024)
    with open_model(config, device="cpu", training=False, positions=256, rows=max(ROWS)) as compiled:
        compiled.initialize(1)
        written = decoding(compiled)
    with (
        open_model(config, device="cpu", training=False, positions=0, scoring=shape) as one,
        open_model(config, device="cpu", training=False, positions=0) as other,
    ):
        one.initialize(1)
        other.initialize(1)
        scored = scoring(one, other, texts, shape)
    row = {"what": "side by side", "processor": args.processor, "threads": thread_count(), "dtype": args.dtype}
    row |= {"decode_tokens_per_s": written, "score_tokens_per_s": scored, "score_shape": shape}
    args.out.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
