"""llm.c's model files: a header of 256 int32, then sixteen tensors, each of all layers, (out, in), little-endian.

Version 3 is fp32, 5 is bf16. The vocabulary is padded with rows of zeros, to a multiple of 128 where llm.c itself writes."""

from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from barellm.checkpoint import storage, tensorfile
from barellm.checkpoint.weights import Weights, parameters
from barellm.data.gpt2 import VOCAB, Gpt2
from barellm.data.mapping import mapped
from barellm.errors import UserError
from barellm.models import gpt2

MAGIC = 20240326
VERSIONS = {"fp32": 3, "bf16": 5}
DTYPES = {3: np.dtype("<f4"), 5: np.dtype(ml_dtypes.bfloat16)}
HEADER = 1024  # bytes
PADDING = 128


def read(path: Path) -> Weights:
    """The weights of a llm.c model file, memory-mapped: a header of HEADER bytes (int32), then the tensors in llm.c's order, wte
    with its padded rows. GPT-2's tokenizer if the vocabulary is as large. UserError unless it is llm.c's GPT-2 and complete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        words = np.frombuffer(file.read(HEADER).ljust(HEADER, b"\0"), "<i4").tolist()
    magic, version, positions, vocab, layers, heads, channels, padded = words[:8]
    if magic != MAGIC:
        raise UserError(f"{path} is not a model of llm.c: it begins with {magic}, expected {MAGIC}")
    if version not in DTYPES:
        raise UserError(f"{path} has version {version}, expected 3 (fp32) or 5 (bf16)")
    try:
        model = gpt2.Config(layers=layers, heads=heads, d_model=channels, vocab_size=vocab, max_seq=positions)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if padded < vocab:
        raise UserError(f"{path}: its padded vocabulary is {padded}, expected at least {vocab}")
    dtype = DTYPES[version]
    shapes = {name: t.shape for name, t in parameters(model).items()} | {"wte": (padded, channels)}
    expected = HEADER + dtype.itemsize * sum(map(prod, shapes.values()))
    if size != expected:
        raise UserError(f"{path} has {size} bytes, expected {expected} by its header")
    data = mapped(path, dtype, offset=HEADER)
    arrays, begin = {}, 0
    for name in gpt2.llmc_order(model):
        end = begin + prod(shapes[name])
        arrays[name] = data[begin:end].reshape(shapes[name])
        begin = end
    return Weights(path, model, arrays, Gpt2() if vocab == VOCAB else None)


def pad(model: gpt2.Config) -> int:
    """Rows of zeros behind the embedding in a file that we write."""
    return -model.vocab_size % PADDING


def write(weights: Weights, out: Path, *, dtype: str) -> None:
    """Write a llm.c model file, which appears only when complete: `dtype` fp32 or bf16, padded rows 0. OSError: nothing is left."""
    model, version = weights.model, VERSIONS[dtype]
    assert isinstance(model, gpt2.Config)  # `exported` refuses
    words = [MAGIC, version, model.max_seq, model.vocab_size, model.layers, model.heads, model.d_model]
    pad_rows = pad(model)
    words.append(model.vocab_size + pad_rows)
    values = sum(t.trained for t in weights.tensors.values()) + pad_rows * model.d_model
    with storage.new_file(out, size=HEADER + values * DTYPES[version].itemsize) as file:
        file.write(np.array(words + [0] * (HEADER // 4 - len(words)), "<i4"))
        for name in gpt2.llmc_order(model):
            t = weights.tensors[name]
            for lo, hi in tensorfile.pieces((t.valid_rows, *t.shape[1:]), itemsize=4):
                file.write(weights.read_rows(name, lo, hi).astype(DTYPES[version], order="C").view(np.uint8))
            if name == "wte":
                file.write(bytes(pad_rows * model.d_model * DTYPES[version].itemsize))
