"""Decoding by llama.cpp: a GPT-2 of a preset's sizes, with random weights, in one of its formats, as a process that decodes on
demand.

    python llamacpp_decode.py q4_0 --layers 36 --heads 20 --d_model 1280 --threads 2 --folder /tmp

It needs the packages llama-cpp-python and gguf, and no barellm. Every matrix, the tied embedding included, has the format. The
model's file is written to the folder unless it is there. It prints "ready" and what it was built with; then each line of two
numbers on its input, POSITION and COUNT, makes it decode so many tokens from that position on, one at a time, and print the
seconds. "prompt COUNT" makes it feed so many tokens at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

VOCAB, POSITIONS = 50257, 1024


def write_model(path: Path, kind: str, layers: int, heads: int, channels: int) -> None:
    import gguf
    import numpy as np

    C, dtype = channels, gguf.GGMLQuantizationType[kind.upper()]
    w = gguf.GGUFWriter(str(path), "gpt2")
    w.add_block_count(layers)
    w.add_context_length(POSITIONS)
    w.add_embedding_length(C)
    w.add_feed_forward_length(4 * C)
    w.add_head_count(heads)
    w.add_layer_norm_eps(1e-5)
    w.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([f"t{i}" for i in range(VOCAB)])
    w.add_token_types([1] * VOCAB)
    w.add_token_merges(["t 1"])
    w.add_bos_token_id(VOCAB - 1)
    w.add_eos_token_id(VOCAB - 1)
    r = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = r.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        w.add_tensor(f"{name}.weight", gguf.quants.quantize(values, dtype), raw_dtype=dtype)

    def vector(name: str, size: int, value: float) -> None:
        w.add_tensor(name, np.full(size, value, np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", C, 1.0)
        vector(f"{name}.bias", C, 0.0)

    matrix("token_embd", VOCAB, C)
    w.add_tensor("position_embd.weight", r.standard_normal((POSITIONS, C), dtype=np.float32) * np.float32(0.02))
    for i in range(layers):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        for name, rows, columns in (("attn_qkv", 3 * C, C), ("attn_output", C, C), ("ffn_up", 4 * C, C), ("ffn_down", C, 4 * C)):
            matrix(f"blk.{i}.{name}", rows, columns)
            vector(f"blk.{i}.{name}.bias", rows, 0.0)
    norm("output_norm")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("q4_0", "q8_0", "f16", "bf16", "f32"))
    for name in ("layers", "heads", "d_model", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    path = args.folder / f"gpt2-{args.layers}-{args.d_model}-{args.kind}.gguf"
    if not path.exists():
        write_model(path, args.kind, args.layers, args.heads, args.d_model)
    import llama_cpp

    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    model = llama_cpp.Llama(str(path), n_ctx=256, n_batch=256, verbose=False, use_mmap=False, **threads)
    built = llama_cpp.llama_print_system_info().decode().strip()
    print("ready", json.dumps({"llama_cpp_python": llama_cpp.__version__, "built": built}), flush=True)
    for line in sys.stdin:
        first, count = line.split()
        if first == "prompt":
            model.reset()
            start = time.perf_counter()
            model.eval([7 + i for i in range(int(count))])
        else:
            if model.n_tokens < int(first):
                model.eval([7 + i for i in range(int(first) - model.n_tokens)])
            model.n_tokens = int(first)
            start = time.perf_counter()
            for i in range(int(count)):
                model.eval([11 + i])
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
