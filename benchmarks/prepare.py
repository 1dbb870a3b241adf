"""How fast text becomes shards, beside the tokenizer's library alone.

    python -m benchmarks.prepare --out benchmarks/results/prepare.json

In turns: `barellm prepare` of JSON lines and of plain text, files of this Python's library repeated to `--megabytes`, from looking
through the text to the last rename; and tiktoken's `encode_ordinary_batch` over the same documents in memory on as many threads.
Needs GPT-2's vocabulary.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from barellm.cli.main import main as barellm
from barellm.cpu.isa import host
from barellm.data.bpe import processors
from barellm.data.corpus import stdlib_corpus
from barellm.data.gpt2 import Gpt2


def documents(megabytes: int) -> list[str]:
    corpus = stdlib_corpus(0.5)
    files = ["".join(corpus.texts([piece])) for piece in (*corpus.val, *corpus.train)]
    found, size = [], 0
    while size < megabytes * 1e6:
        found += files
        size += sum(map(len, files))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    texts, encoding, threads = documents(args.megabytes), Gpt2().encoding, processors()
    size = sum(len(text.encode()) for text in texts)
    samples: dict[str, list[float]] = {"jsonl": [], "text": [], "tiktoken": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "a.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "a.text").write_text("<|endoftext|>".join(texts))
        for _ in range(args.turns):
            for kind in ("jsonl", "text"):
                begin = time.perf_counter()
                options = ["--separator", "<|endoftext|>"] if kind == "text" else []
                assert barellm(["prepare", str(folder / f"a.{kind}"), "--out", str(folder / "out"), "--json", *options]) == 0
                samples[kind].append(time.perf_counter() - begin)
                shutil.rmtree(folder / "out")
            begin = time.perf_counter()
            encoding.encode_ordinary_batch(texts, num_threads=threads)
            samples["tiktoken"].append(time.perf_counter() - begin)
    speed = {kind: size / median(seconds) / 1e6 for kind, seconds in samples.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {"kind": "prepare", "processor": host().cpu, "threads": threads, "bytes": size, "documents": len(texts)}
    result = facts | {"seconds": samples, "megabytes_per_s": speed, "peak_rss_mb_of_both": peak}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(speed))


if __name__ == "__main__":
    main()
