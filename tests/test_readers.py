"""Files of strangers: whatever a file holds, its reader returns, or refuses it in one line that names it. Of a valid file one
thing at a time is changed, by a seeded generator. What the headers of safetensors say is compared with the library's reader in
tests/checkpoint/test_tensorfile.py."""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import random
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from barellm import models
from barellm.checkpoint import checkpoint, quantized, tensorfile
from barellm.checkpoint.weights import of_checkpoint, parameters
from barellm.cli import plot, sample
from barellm.config import AdapterConfig, Config, overrides
from barellm.cpu import isa, tuning
from barellm.data import writing
from barellm.data.bpe import BytePairs
from barellm.data.corpus import text_corpus
from barellm.data.forms import read_examples
from barellm.data.gpt2 import find_vocabulary
from barellm.data.kinds import load_tokenizer, make_tokenizer
from barellm.data.shards import inspect_shard, write_shard
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.evaluation import hellaswag
from barellm.interop import adapters, card, huggingface, llmc, llmc_state, llmc_tokenizer, sources, vocabulary
from barellm.models import llama3
from barellm.models.adapters import targeted
from barellm.program.quantization import scheme
from barellm.runtime.tuner.database import Database
from barellm.training import curve, metrics, resume, trackers
from tests.data.llama import llama_json
from tests.interop.models import TINY, checkpoint_of, hugging_face, llmc_file, random_arrays, their_tensors, weights_of

ROOM = 64 << 20  # bytes that reading any small file may take
CPU_SECONDS = 30  # of a case: a reader that needs more would go on for ever

# --- what is changed ---

DEEP = 100_000
ODD = (  # JSON of every kind, and what only looks like it
    *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP),
    *("0", "1", "-1", "1.5", "1e400", "-1e400", "1e300", "NaN", "Infinity", "-Infinity", "null", "true", "false"),
    *(str(1 << 27), str(1 << 31), str(1 << 63), str(-(1 << 63)), "9" * 400, "9" * 5000),
    *("[]", "{}", "[1]", '[""]', "[null]", "[[1]]", '{"a": 1}', '{"": null}', '[{"a": {}}]'),
    *('""', '"a"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"../a"', '"/"', '"' + "a" * 3000 + '"', "", ",", "nul"),
)
MARK, NAME = "@mark@", "@name@"


def change_json(text: bytes, draw: random.Random) -> bytes:
    """One node of a tree is another one, its key is another one or there twice, or it is gone."""
    tree = json.loads(text)
    places: list[tuple[Any, Any]] = [([tree], 0)]
    for held, at in places:
        inside = held[at]
        if isinstance(inside, dict | list):
            # Of a long list of equal things a few are enough, so that other places are met as often.
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            places += [(inside, key) for key in draw.sample(list(keys), min(len(keys), 12))]
    held, at = draw.choice(places)
    kind = draw.choice(("value",) * 6 + ("drop", "name", "twice"))
    if kind == "value" or not isinstance(held, dict):
        if held == [tree]:
            return draw.choice(ODD).encode()
        held[at] = MARK
        return json.dumps(tree).replace(f'"{MARK}"', draw.choice(ODD), 1).encode()
    value = held.pop(at)
    if kind == "drop":
        return json.dumps(tree).encode()
    if kind == "name":
        held[NAME] = value
        return json.dumps(tree).replace(f'"{NAME}"', draw.choice([x for x in ODD if x.startswith('"')]), 1).encode()
    held[at], held[NAME] = value, MARK
    return json.dumps(tree).replace(f'"{NAME}"', json.dumps(at)).replace(f'"{MARK}"', draw.choice(ODD), 1).encode()


def change_lines(text: bytes, draw: random.Random) -> bytes:
    """JSON lines."""
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    lines[at] = change_json(lines[at], draw) + b"\n"
    return b"".join(lines)


def change_toml(text: bytes, draw: random.Random) -> bytes:
    lines = text.decode().splitlines()
    at = draw.randrange(len(lines))
    name, _, _ = lines[at].partition(" = ")
    value = draw.choice((*ODD, "inf", "-nan", "1979-05-27", "07:32:00", '"""a\nb"""', "{a = 1}", "0x" + "f" * 300))
    name = draw.choice((name,) * 5 + (".".join("a" * DEEP), '"a\\nb"', "model", "train.steps.a", f"[{'a.' * DEEP}a]"))
    lines[at] = draw.choice((f"{name} = {value}", f"{name} = {value}", f"[{name}]", f"[[{name}]]", lines[at] * 2))
    return "\n".join(lines).encode(errors="surrogatepass")


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """A byte, a word or a range is another one, or gone, or there twice; the words of a header to their extremes."""
    kind, at = draw.randrange(7), draw.randrange(max(1, len(content)))
    if kind == 0:
        return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    if kind == 1:
        return content[: draw.choice((0, 1, at))]
    if kind == 2:
        return content + draw.randbytes(draw.choice((1, 7, 4096)))
    if kind == 3:
        return content[:at] + content[at + draw.randrange(1, 64) :]
    if kind == 4:
        end = at + draw.randrange(1, 64)
        return content[:end] + content[at:]
    size = draw.choice((2, 4, 8))
    word = draw.choice((0, 1, -1, 2, 256, 1 << 15, 1 << 27, (1 << 31) - 1, -(1 << 31), 1 << 62, -(1 << 63)))
    at = draw.randrange(48) * 4 if kind == 5 else at
    return content[:at] + (word & ((1 << 8 * size) - 1)).to_bytes(size, "little") + content[at + size :]


def change_text(content: bytes, draw: random.Random) -> bytes:
    """Lines with what no text has, and bytes."""
    kind = draw.randrange(4)
    if kind < 2:
        return change_bytes(content, draw)
    if kind == 2:
        return content.decode(errors="replace").encode(draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig")))
    at = draw.randrange(len(content))
    piece = draw.choice((b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"\r", b"\n\n", b",", b"a" * 5000, b"#version: 9\n", b"[" * DEEP))
    return content[:at] + piece + content[at:]


# --- what is read ---


@dataclass(frozen=True)
class Reader:
    """`make` writes a valid file into a folder; `read` takes it and a generator for what else is drawn."""

    make: Callable[[Path], Path]
    read: Callable[[Path, random.Random], object]
    changes: tuple[Callable[[bytes, random.Random], bytes], ...]


READERS: dict[str, Reader] = {}
TEXT, BYTES = (change_text,), (change_bytes,)
JSON, LINES = (change_json,) * 3 + TEXT, (change_lines,) * 3 + TEXT


def reader(name: str, make: Callable[[Path], Path], *changes: Callable[[bytes, random.Random], bytes]) -> Any:
    def add(read: Callable[[Path, random.Random], object]) -> Callable[[Path, random.Random], object]:
        READERS[name] = Reader(make, read, changes)
        return read

    return add


def written(name: str, content: bytes | str | Any) -> Callable[[Path], Path]:
    """A maker of a file with this content: bytes, a text, JSON, or lines of JSON of a list."""

    def make(folder: Path) -> Path:
        found = content() if callable(content) else content
        if not isinstance(found, bytes | str):
            lines = name.endswith("jsonl")
            found = "".join(f"{json.dumps(one)}\n" for one in found) if lines else json.dumps(found)
        (folder / name).write_bytes(found if isinstance(found, bytes) else found.encode())
        return folder / name

    return make


def whole(found: Iterable[object]) -> None:
    for _ in found:
        pass


# Configurations.


@reader("config.json", written("config.json", overrides.to_json(models.preset("default"))), *JSON)
def _(path: Path, draw: random.Random) -> None:
    (draw.choice((lambda: overrides.of_file(overrides.read_file(path)), lambda: resume.resume_from(
        path.parent, preset=None, requested=lambda config: {}, console=Silent()))))()  # fmt: skip


class Silent:
    def line(self, text: str) -> None:
        assert "\n" not in text


TOML = """preset = "default"
architecture = "gpt2"
[model]
layers = 2
dropout = 0.1
bias = true
[train]
steps = 10
minutes = 0.0
"""


@reader("config.toml", written("config.toml", TOML), change_toml, change_toml, change_text)
def _(path: Path, draw: random.Random) -> None:
    overrides.of_file(overrides.read_file(path))


# Checkpoints.


def a_checkpoint(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        step = checkpoint_of(folder / "run", TINY, random_arrays(TINY))
        meta = json.loads((step / "meta.json").read_text())
        more: dict[str, Any] = {"samples": 8, "tokens": 64, "seconds": 1.5, "machine": {"isa": "avx2"}, "milestone": False}
        detector = {"values": [0.5] * 3, "next": 0}
        more |= {"data": {"hash": "a", "name": "b"}, "spikes": {"skipped": 1, "loss": detector, "norm": detector}}
        more |= {"llmc": {"processes": 1, "shuffled": True, "shard": 0, "sample": 1, "shards": [0]}}
        (step / "meta.json").write_text(json.dumps(meta | more))
        (step / "optimizer.safetensors").write_bytes(b"")
        return step / file

    return make


@reader("meta.json", a_checkpoint("meta.json"), *JSON)
def _(path: Path, draw: random.Random) -> None:
    step = path.parent
    of_checkpoint(step)
    found = checkpoint.read_meta(step)
    if draw.random() < 0.5:
        with pytest.MonkeyPatch.context() as patch:  # of a folder that somebody made the checksums agree
            patch.setattr(checkpoint, "problem", lambda path, optimizer=True: None)
            resume.resume_from(step.parents[1], preset=None, requested=lambda config: {}, console=Silent())  # pyright: ignore
        return
    quantized.stored_scheme(step, found)
    card.text(of_checkpoint(step), dtype="fp32", licence=None)
    assert type(found["step"]) is int and isinstance(found.get("total_steps", 0), int | None)


@reader("meta.json of few bits", lambda folder: copied("nf4_v1", folder) / "meta.json", *JSON)
def _(path: Path, draw: random.Random) -> None:
    quantized.stored_scheme(path.parent, checkpoint.read_meta(path.parent))
    with pytest.raises(UserError) as refused:
        checkpoint.need_numbers(path.parent)
    raise refused.value


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(Path(__file__).parent / "checkpoint" / name / "step-000004", folder / "step-000004")


class Loading:
    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None: ...
    def write_codes(self, name: str, lo: int, codes: np.ndarray, scales: np.ndarray) -> None: ...


@reader("weights of few bits", lambda folder: copied("nf4_v1", folder) / "weights.safetensors", *BYTES)
def _(path: Path, draw: random.Random) -> None:
    content = json.loads((path.parent / "meta.json").read_text())
    own = parameters(overrides.from_json(content["config"]).model)
    file = checkpoint.WEIGHTS
    codes = tensorfile.mapped(Path(__file__).parent / "checkpoint" / "nf4_v1" / "step-000004" / file)
    schemes = {name: scheme(content["weights"]) for name in own if f"{name}.codes" in codes}
    assert schemes
    quantized.load(path.parent, Loading(), own, schemes)


@reader("manifest.json", a_checkpoint("manifest.json"), *JSON)
def _(path: Path, draw: random.Random) -> None:
    found = checkpoint.problem(path.parent)
    assert found is None or ("\n" not in found and len(found) < 500)
    checkpoint.find(path.parents[1])


@reader("tracking.json", written(trackers.IDENTITY, {"id": "abc"}), *JSON)
def _(path: Path, draw: random.Random) -> None:
    trackers.subject(path.parent, project="a", step=1, config={})


# Tokenizers.

WORDS = "the cat sat on the mat, and the dog did not; it's 12 o'clock\n" * 40


def a_bpe() -> BytePairs:
    return make_tokenizer("bpe", lambda: [WORDS], bpe_vocab=280)  # pyright: ignore[reportReturnType]


def a_tokenizer(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_tokenizer(kind, lambda: [WORDS], bpe_vocab=280).save(folder)
        return folder / "tokenizer.json"

    return make


for kind in ("bytes", "chars", "bpe"):

    @reader(f"tokenizer of {kind}", a_tokenizer(kind), *JSON)
    def _(path: Path, draw: random.Random) -> None:
        load_tokenizer(path.parent).prompt("at the ")


def whole_gpt2() -> dict[str, Any]:
    """A tokenizer.json of GPT-2's kind."""
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer()
    library.train_from_iterator([WORDS], vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    return json.loads(library._tokenizer.to_str())


@reader("tokenizer.json of llama", written("tokenizer.json", lambda: llama_json(WORDS, vocab=270)), *JSON)
@reader("tokenizer.json of gpt2", written("tokenizer.json", whole_gpt2), *JSON)
def _(path: Path, draw: random.Random) -> None:
    found = draw.choice((load_tokenizer, lambda folder: vocabulary.read(folder, 280) or Bytes()))(path.parent)
    found.decode(found.prompt("at the "))
    assert found.ends >= set() and vocabulary.files(found, 16)


def two_files(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for file, content in vocabulary.files(a_bpe(), 16).items():
            (folder / file).write_bytes(content)
        return folder / name

    return make


@reader("merges.txt", two_files("merges.txt"), *TEXT)
@reader("vocab.json", two_files("vocab.json"), *JSON)
def _(path: Path, draw: random.Random) -> None:
    found = vocabulary.read(path.parent, 280)
    assert found is not None
    found.prompt("at the ")


@reader("llm.c's tokenizer", written("a.bin", lambda: llmc_tokenizer.content(a_bpe())), *BYTES)
def _(path: Path, draw: random.Random) -> None:
    llmc_tokenizer.read(path).prompt("at the ")


@reader("gpt2.tiktoken", written("gpt2.tiktoken", b"".join(b"%s %d\n" % (b"YWI=", i) for i in range(60))), *TEXT)
@reader("vocab.bpe", written("vocab.bpe", "#version: 0.2\n" + "t h\nth e\n" * 40), *TEXT)
def _(path: Path, draw: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_GPT2_VOCAB", str(path.parent))
        find_vocabulary()


# What runs write.

ROWS = [
    *({"kind": "train", "step": i, "loss": 3.0 / i, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 9, "seconds": i, "tokens": 8 * i}
      for i in range(1, 9)),
    {"kind": "eval", "step": 8, "val_nats": 2.0, "val_bits_per_byte": 1.5},
    {"kind": "hellaswag", "step": 8, "acc": 0.2, "acc_norm": 0.3, "total": 9},
    {"kind": "sample", "step": 8, "text": "a"},
    {"kind": "result", "step": 8, "val_nats": 2.0, "val_bits_per_byte": 1.5, "gzip_bits_per_byte": 2.5},
]  # fmt: skip


@reader("metrics.jsonl", written("metrics.jsonl", ROWS), *LINES)
def _(path: Path, draw: random.Random) -> None:
    axis, y, log = draw.choice(curve.AXES), draw.choice(list(curve.QUANTITIES)), draw.choice(("", "x", "y", "xy"))
    (path.parent / "config.json").write_text(json.dumps(overrides.to_json(models.preset("default"))))
    for found in plot._read(str(path.parent), axis=axis, y=y):
        assert "\n" not in curve.summary(found, axis=axis)
        curve.terminal(found, axis=axis, log=log, ascii_only=draw.random() < 0.5)


@reader("metrics.jsonl of a run that goes on", written("metrics.jsonl", ROWS), *LINES)
def _(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        metrics.truncate(path, step=4)
        return
    step = checkpoint_of(path.parent / "run", TINY, random_arrays(TINY)) if not (path.parent / "run").exists() else None
    step = step or path.parent / "run" / "checkpoints" / "step-000000"
    shutil.copy(path, path.parent / "run" / "metrics.jsonl")
    patched = checkpoint.read_meta(step) | {"step": 9}
    (step / "meta.json").write_text(json.dumps(patched))
    card.text(of_checkpoint(step), dtype="fp32", licence=None)


def a_range(**more: Any) -> dict[str, Any]:
    found = {"name": "wte", "what": "weight", "shape": [4, 4], "dtype": "bf16", "size": 16, "zeros": 1, "not_finite": 1}
    return found | {"mean": 0.1, "mean_abs": 0.2, "rms": 0.3, "max": 1.5, "first": -3, "counts": [2, 5, 7]} | more


RANGES = [a_range(), a_range(name="b", what="gradient")]


@reader(
    "exponent_stats.jsonl",
    written("exponent_stats.jsonl", [{"kind": "exponent_stats", "step": i, "tensors": RANGES} for i in (1, 2)]),
    *LINES,
)
def _(path: Path, draw: random.Random) -> None:
    said = Silent()
    said.line, said.can_show = lambda text: None, lambda text: True  # pyright: ignore[reportAttributeAccessIssue]
    args = {"runs": [str(path.parent)], "json": draw.random() < 0.5, "out": None}
    with contextlib.redirect_stdout(io.StringIO()):
        plot._exponent_stats(argparse.Namespace(**args), said)  # pyright: ignore[reportArgumentType]


CHOICE = {"tile": [4, 2], "rows": [8, 8], "columns": 4, "order": "rows", "part": 64, "ahead": "fetch"}
TUNED = {"version": "a", "entries": {"a": CHOICE, "b": {"spans": 1, "together": 2, "fetch": 1}}}


@reader("a tuning database", written("a.json", TUNED), *JSON)
def _(path: Path, draw: random.Random) -> None:
    for entry in Database(path.parent, "a").entries.values():
        for role in ("nt", "few"):
            with contextlib.suppress(ValueError):  # it is said, and the default is taken
                tuning.from_entry(entry, isa.host(), role, "fp32", 64)


def prepared(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "a.txt").write_text(WORDS)
        corpus = text_corpus([folder / "a.txt"], 0.1, name="a")
        (folder / "out").mkdir()
        writing.write_split(folder / "out", writing.Job(corpus, Bytes(), "tokens"))
        state = {"identity": "a"}
        (folder / "out" / "state.json").write_text(json.dumps(vars(writing.State(**state))))
        return folder / "out" / name

    return make


@reader("the manifest of shards", prepared(writing.MANIFEST), *JSON)
def _(path: Path, draw: random.Random) -> None:
    shards = sorted(path.parent.glob("*.bin"))
    writing.check_manifest(path.parent, {shard: (1, "a") for shard in shards}, Bytes())


@reader("the state of prepare", prepared("state.json"), *JSON)
def _(path: Path, draw: random.Random) -> None:
    corpus = text_corpus([path.parents[1] / "a.txt"], 0.1, name="a")
    writing._read_state(path, writing.Job(corpus, Bytes(), "tokens"))


# Texts.

RECORDS = [{"text": f"{i} {WORDS[:90]}", "prompt": "a b", "answer": "c"} for i in range(8)]
TURNS = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c", "weight": 1}]
CHATS = [{"messages": TURNS, "tools": None} for _ in range(3)] + [{"prompt": "a", "answer": "b", "weight": 1}]


def a_table(delimiter: str) -> str:
    held = io.StringIO()
    rows = csv.DictWriter(held, list(RECORDS[0]), delimiter=delimiter)
    rows.writeheader()
    rows.writerows(RECORDS)
    return held.getvalue()


def parquet() -> bytes:
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = io.BytesIO()
    library.write_table(arrow.table({name: [str(row[name]) for row in RECORDS] for name in RECORDS[0]}), held)
    return held.getvalue()


def zstd() -> bytes:
    return pytest.importorskip("zstandard").compress(WORDS.encode())


FILES: dict[str, tuple[Any, tuple]] = {
    "a.txt": (WORDS, TEXT),
    "a.jsonl": (RECORDS, LINES),
    "a.json": (RECORDS, JSON),
    "a.csv": (a_table(","), TEXT),
    "a.tsv": (a_table("\t"), TEXT),
    "a.parquet": (parquet, BYTES),
    "a.txt.gz": (gzip.compress(WORDS.encode(), mtime=0), BYTES),
    "a.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99, mtime=0), BYTES),
    "a.txt.zst": (zstd, BYTES),
}
for name, (content, changes) in FILES.items():

    @reader(f"text of {name}", written(name, content), *changes)
    def _(path: Path, draw: random.Random) -> None:
        if draw.random() < 0.3:
            sample._prompts(str(path))
        else:
            corpus = text_corpus([path], 0.1, name=str(path))
            whole(corpus.texts(corpus.train + corpus.val))


for name, content, changes in (
    ("a.jsonl", RECORDS, LINES),
    ("chats.jsonl", CHATS, LINES),
    ("chats.json", CHATS, JSON),
    ("a.csv", a_table(","), TEXT),
):

    @reader(f"examples of {name}", written(name, content), *changes)
    def _(path: Path, draw: random.Random) -> None:
        read_examples([path])


ENDINGS = [{"ctx": "a b", "endings": ["c", "d", "e", "f"], "label": 1, "ind": i} for i in range(4)]


@reader("hellaswag.jsonl", written("a.jsonl", ENDINGS), *LINES)
def _(path: Path, draw: random.Random) -> None:
    hellaswag.read(path, Bytes())


class LikeGpt2(Bytes):
    name = "gpt2"


def hellaswag_bin() -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = hellaswag.MAGIC, hellaswag.VERSION, 3
    one = np.array([hellaswag.BEGINS, 0, 0, 1, 2, 2, 7, 8, 1, 9, 2, 3, 4], "<u2")
    one[1] = one.nbytes
    return header.tobytes() + one.tobytes() * 3


@reader("hellaswag.bin", written("a.bin", hellaswag_bin), *BYTES)
def _(path: Path, draw: random.Random) -> None:
    hellaswag.read(path, LikeGpt2())


def a_shard(folder: Path) -> Path:
    write_shard(folder / "a.bin", [np.arange(90) % 7], magic=20240520)
    return folder / "a.bin"


@reader("a shard", a_shard, *BYTES)
def _(path: Path, draw: random.Random) -> None:
    inspect_shard(path)


# Models of other programs.


def gguf_model(folder: Path) -> Path:
    """A small Llama with a tokenizer of bytes."""
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(folder / "a.gguf", "llama")
    sizes = {"block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1, "embedding_length": 8, "context_length": 16}
    for key, value in (sizes | {"feed_forward_length": 12, "vocab_size": 258, "rope.dimension_count": 4}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    names = [*(chr(i) if i > 32 else f"<0x{i:02X}>" for i in range(256)), "<s>", "</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * 258)
    writer.add_token_types([6] * 33 + [1] * 223 + [3] * 2)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    shapes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "attn_norm": (8,), "ffn_norm": (8,)}
    shapes = {
        f"blk.0.{name}": shape for name, shape in (shapes | {"ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}).items()
    }
    for name, shape in (shapes | {"token_embd": (258, 8), "output_norm": (8,)}).items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "a.gguf"


@reader("a GGUF file", gguf_model, *BYTES)
def _(path: Path, draw: random.Random) -> None:
    found = sources.open_weights(path)
    for name, t in found.tensors.items():
        found.read_rows(name, 0, int(t.shape[0]))
    if found.tokenizer is not None:
        found.tokenizer.encode("at the ")


def llmc_model(folder: Path) -> Path:
    return llmc_file(folder / "model_00000007.bin", TINY, random_arrays(TINY), version=3, padded=256)


def llmc_training(folder: Path) -> Path:
    from tests.interop.test_llmc_state import loader, state_files

    llmc_model(folder)
    state_files(folder, [random_arrays(TINY, seed) for seed in (2, 3, 4)], step=7, tail=loader(3).tail())
    return folder / "state_00000007_00000.bin"


@reader("llm.c's model", llmc_model, *BYTES)
def _(path: Path, draw: random.Random) -> None:
    read_all(sources.open_weights(path))


def read_all(weights: Any) -> None:
    for name, t in weights.tensors.items():
        weights.read_rows(name, 0, int(t.shape[0]))


@reader("llm.c's state", llmc_training, *BYTES)
def _(path: Path, draw: random.Random) -> None:
    llmc_state.read(llmc_state.beside(path.parent / "model_00000007.bin"), llmc.read(path.parent / "model_00000007.bin"))


def peft_folder(file: str) -> Callable[[Path], Path]:
    """An adapter of TINY, as it is written here."""

    def make(folder: Path) -> Path:
        pairs = {m: adapters.Pair(np.ones((2, 12), np.float32), np.ones((m.rows, 2), np.float32), 4.0) for m in targeted(TINY, "")}
        config = Config("made", TINY, adapter=AdapterConfig("lora:2"))
        adapters.write(adapters.Adapter(folder, pairs, {}), folder / "peft", config=config, base="base")
        return folder / "peft" / file

    return make


@reader("PEFT's adapter_config.json", peft_folder(adapters.CONFIG), *JSON)
@reader("PEFT's adapter_model.safetensors", peft_folder(adapters.FILE), *BYTES)
def _(path: Path, draw: random.Random) -> None:
    found = adapters.merged(weights_of(TINY, random_arrays(TINY)), adapters.read(path.parent, TINY))
    read_all(found)


def gpt2_folder(file: str, *, shards: int = 0) -> Callable[[Path], Path]:
    return lambda folder: hugging_face(folder / "hf", TINY, their_tensors(random_arrays(TINY)), shards=shards) / file


SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "kv_heads": 1, "d_model": 16, "d_ff": 24, "vocab_size": 99, "max_seq": 32}
LLAMAS: dict[str, dict[str, Any]] = {  # families whose config.json differs, each with another kind of scaled RoPE
    "llama": {"rope_factor": 8.0},
    "qwen3": {
        "qk_norm": "head", "head_dim": 4, "rope_type": "longrope", "rope_factor": 2.0, "rope_short": "1,2", "rope_long": "2,3",
    },
    "smollm3": {"nope_layers": "1", "rope_type": "yarn", "rope_factor": 2.0},
    "gpt_neox": {
        "norm": "layer", "mlp": "plain", "activation": "gelu_erf", "mlp_bias": True, "attention_bias": "all", "kv_heads": 2,
        "parallel_residual": True, "rotary_fraction": 0.5, "tied": False, "rope_type": "dynamic", "rope_factor": 2.0,
        "rope_old_seq": 16,
    },
}  # fmt: skip


def family_folder(family: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        cfg = llama3.Config(**SIZES | LLAMAS[family])
        huggingface.write(weights_of(cfg, random_arrays(cfg)), folder / "hf", dtype="bf16", card="a")
        assert json.loads((folder / "hf" / "config.json").read_text())["model_type"] == family
        return folder / "hf" / "config.json"

    return make


@reader("Hugging Face's config.json of gpt2", gpt2_folder("config.json"), *JSON)
@reader("Hugging Face's config.json of llama", family_folder("llama"), *JSON)
@reader("Hugging Face's config.json of qwen3", family_folder("qwen3"), *JSON)
@reader("Hugging Face's config.json of smollm3", family_folder("smollm3"), *JSON)
@reader("Hugging Face's config.json of gpt_neox", family_folder("gpt_neox"), *JSON)
@reader("Hugging Face's index", gpt2_folder("model.safetensors.index.json", shards=2), *JSON)
@reader("Hugging Face's tensors", gpt2_folder("model.safetensors"), *BYTES)
def _(path: Path, draw: random.Random) -> None:
    read_all(sources.open_weights(path.parent, tokenizer="bytes" if path.name != "config.json" else ""))


# --- the tests ---


def problem(read: Callable[[], object], path: Path) -> str:
    """What is wrong with how a reader ended; "" if nothing is."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError(f"goes on after {CPU_SECONDS} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    tracemalloc.reset_peak()
    start, said = tracemalloc.get_traced_memory()[0], ""
    try:
        read()
    except UserError as error:
        said = str(error)
        if "\n" in said or len(said) > 1000:
            return f"a line that is none: {said[:300]!r} ({len(said)} characters)"
        if path.name not in said and str(path.parent) not in said:
            return f"the line does not name {path.name}: {said}"
    except OSError as error:
        if not error.filename or not error.strerror:
            return f"an OSError without a name: {error!r:.300}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None and "barellm/" in frame.tb_next.tb_frame.f_code.co_filename:
            frame = frame.tb_next
        assert frame is not None
        where = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        return f"{type(error).__name__} at {where}: {str(error)[:200]!r}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    taken = tracemalloc.get_traced_memory()[1] - start
    return f"{taken:,} bytes for a file of {path.stat().st_size:,}" if taken > ROOM + 64 * path.stat().st_size else ""


def fuzz(name: str, folder: Path, *, seed: int, cases: int) -> None:
    one, draw = READERS[name], random.Random(f"{seed} {name}")
    path = one.make(folder)
    content, wrong = path.read_bytes(), {}
    assert not (found := problem(lambda: one.read(path, random.Random(0)), path)) or "few bits" in name, found
    tracemalloc.start()
    try:
        for number in range(cases):
            changed = draw.choice(one.changes)(content, draw)
            path.write_bytes(changed)
            if found := problem(partial(one.read, path, random.Random(number)), path):
                wrong.setdefault(found, f"case {number}: {shown(content, changed)}")
    finally:
        tracemalloc.stop()
    assert not wrong, "\n".join(f"{found}  [{case}]" for found, case in wrong.items())


def shown(before: bytes, after: bytes) -> str:
    """Where a file was changed, and what stands there now."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"{len(after)} bytes, at {at}: {after[max(0, at - 20) : at + 60]!r}"


@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_read_or_refused_in_one_line(own_cache, tmp_path, name):
    fuzz(name, tmp_path, seed=1, cases=40)


@pytest.mark.extended
@pytest.mark.parametrize("name", READERS)
def test_each_of_400_changed_files_is_read_or_refused_in_one_line(own_cache, tmp_path, name):
    fuzz(name, tmp_path, seed=2, cases=400)
