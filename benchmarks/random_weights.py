"""A model of random weights at a preset's size, for timings of whole programs, barellm's and others':

    python -m benchmarks.random_weights smollm2-135m --out models/smollm2-135m

writes models/smollm2-135m/hf, a folder of Hugging Face in bf16 whose tokenizer was trained here for as many ids, and bf16.gguf, the
same for llama.cpp, where `barellm export` has that architecture.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import numpy as np

from barellm import models
from barellm.checkpoint.weights import Weights, parameters
from barellm.config import ModelConfig
from barellm.data import tokenizers
from barellm.interop import gguf_writer, huggingface, vocabulary


def random_weights(model: ModelConfig, tokenizer: tokenizers.Tokenizer | None = None) -> Weights:
    """Norms of ones, matrices of normal numbers with a deviation of 0.02. Without a tokenizer the text is bare ids."""
    arrays, r = {}, np.random.default_rng(0)
    for name, t in parameters(model).items():
        shape = (t.valid_rows, *(int(n) for n in t.shape[1:]))
        arrays[name] = np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * r.standard_normal(shape, np.float32)
    return Weights(Path("random"), model, arrays, tokenizer or tokenizers.Ids(model.vocab_size))


def trained_tokenizer(ids: int) -> tokenizers.Tokenizer:
    """Byte-level pairs of the standard library's sources, digits apart as SmolLM has them; names that no text has fill the rest of
    the ids."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds

    pairs = Tokenizer(kinds.BPE())
    digits, in_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ids, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pairs.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    content = json.loads(pairs.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"unused{i}": i for i in range(len(vocab), ids)}
    return vocabulary.of_one_file(Path("tokenizer.json"), json.dumps(content).encode(), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    model = models.preset(args.preset).model
    weights = random_weights(model, trained_tokenizer(model.vocab_size))
    args.out.mkdir(parents=True, exist_ok=True)
    print(huggingface.write(weights, args.out / "hf", dtype="bf16", card=f"Random weights of {args.preset}'s size."))
    if why := gguf_writer.refused(model):
        print(f"no GGUF: {why}")
    else:
        print(gguf_writer.write(weights, args.out / "bf16.gguf", dtype="bf16", name=args.preset, licence=None) or "bf16.gguf")


if __name__ == "__main__":
    main()
