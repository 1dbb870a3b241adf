"""Tokenize a corpus into shards, with the tokenizer and a manifest beside them. An interrupted job can be resumed."""

import contextlib
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from barellm import __version__
from barellm.data import cache, encoding, tokenizers
from barellm.data.corpus import Corpus
from barellm.data.shards import FORMATS, HEADER_BYTES, SHARD_TOKENS, inspect_shard, magic_for, open_shard, shard_header
from barellm.errors import UserError
from barellm.jsontext import loads

MANIFEST = "shards.json"  # beside shards that barellm wrote: which there are, and what they were made of
FORMAT = 2  # of the manifest and of the state
FIRST = {"val": 0, "train": 1}  # numbers of the first shards, as llm.c has them
STATE = "state.json"
SYNC_S = 5.0  # seconds of work that a killed process may lose


class ShardWriter:
    """Writes shards `stem_val_000000.bin`, `stem_train_000001.bin` and so on, one after the other. `counts`: the tokens of each
    part that earlier runs completed; files are truncated to them, which drops what a killed process wrote after its last state."""

    def __init__(self, folder: Path, stem: str, *, magic: int, shard_tokens: int, counts: dict[str, int]) -> None:
        """Truncate the shards to `counts` and remove shards beyond them, which a killed process left."""
        self.folder, self.stem, self.magic, self.shard_tokens = folder, stem, magic, shard_tokens
        self.dtype = FORMATS[magic][1]
        self.counts = dict(counts)
        self._file: BinaryIO | None = None
        for path, tokens in self._expected().items():
            size = HEADER_BYTES + tokens * self.dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise UserError(f"{path} is shorter than {STATE} beside it says: remove {folder.parent} and begin again")
            os.truncate(path, size)
        for path in set(folder.glob(f"{glob.escape(stem)}_*.bin")) - set(self._expected()):
            path.unlink()

    def _expected(self) -> dict[Path, int]:
        found = {}
        for part, count in self.counts.items():
            for number, begin in enumerate(range(0, count, self.shard_tokens), FIRST[part]):
                found[self._path(part, number)] = min(self.shard_tokens, count - begin)
        return found

    def _path(self, part: str, number: int) -> Path:
        return self.folder / f"{self.stem}_{part}_{number:06d}.bin"

    def write(self, part: str, tokens: np.ndarray) -> None:
        """Append tokens (n,) to a part ("val" or "train"), beginning a new shard whenever one is full. Headers are zeros so far."""
        while len(tokens):
            number, offset = divmod(self.counts[part], self.shard_tokens)
            piece, tokens = np.split(tokens, [self.shard_tokens - offset])
            path = self._path(part, FIRST[part] + number)
            with cache.writing(path):
                if self._file is None or self._file.name != str(path):
                    self.sync()
                    self._file = open(path, "ab")  # noqa: SIM115
                    if self._file.tell() == 0:
                        self._file.write(bytes(HEADER_BYTES))
                self._file.write(piece.astype(self.dtype).tobytes())
            self.counts[part] += len(piece)

    def sync(self) -> None:
        if self._file is not None:
            with cache.writing(Path(self._file.name)), self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self._file = None

    def finish(self) -> list[Path]:
        """The shards, with their headers."""
        self.sync()
        for path, tokens in self._expected().items():
            with cache.writing(path), open(path, "r+b") as file:
                file.write(shard_header(self.magic, tokens))
                file.flush()
                os.fsync(file.fileno())
        return sorted(self._expected())


@dataclass(frozen=True)
class Job:
    """What is to be written. `val_tokens` > 0: so many tokens, the first of all, are for validation, as in llm.c's shards of
    FineWeb; the corpus then has none of its own."""

    corpus: Corpus
    tokenizer: tokenizers.Tokenizer
    stem: str
    shard_tokens: int = SHARD_TOKENS
    val_tokens: int = 0

    @property
    def identity(self) -> str:
        made_of = [FORMAT, self.corpus.hash, self.tokenizer.hash, self.stem, self.shard_tokens, self.val_tokens]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


@dataclass
class State:
    """How far a job is: what a killed process's successor needs to know."""

    identity: str
    piece: int = 0
    at: int = -1
    begins: bool = True
    val: int = 0
    train: int = 0
    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    val_bytes: int = 0

    @property
    def place(self) -> encoding.Place:
        return encoding.Place(self.piece, self.at, self.begins)

    @property
    def counts(self) -> dict[str, int]:
        return {"val": self.val, "train": self.train}


def write_split(
    folder: Path, job: Job, *, state: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Tokenize a job's corpus into `folder` and return the manifest's content. `state`: file in which progress is saved and from
    which it resumes; UserError if it belongs to another job. `progress` gets the bytes of text done and in all (0: unknown)."""
    corpus, tokenizer = job.corpus, job.tokenizer
    done = _read_state(state, job) if state and state.exists() else State(job.identity)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, job.stem, magic=magic_for(tokenizer.vocab_size), shard_tokens=job.shard_tokens, counts=done.counts)
    pieces = [*corpus.val, *corpus.train]

    def save() -> None:
        if state:
            writer.sync()
            with cache.new_file(state) as file:
                file.write(json.dumps(asdict(done)).encode())
        corpus.forget(pieces[: done.piece])

    saved = time.monotonic()
    try:
        for group in encoding.encoded(corpus, tokenizer, pieces, done.place):
            is_val = group.first < len(corpus.val)
            # With `val_tokens` the first so many are for validation, wherever a document ends; else the corpus's own split counts.
            val_room = job.val_tokens - writer.counts["val"] if job.val_tokens else len(group.tokens) * is_val
            writer.write("val", group.tokens[: max(0, val_room)])
            writer.write("train", group.tokens[max(0, val_room) :])
            done = State(
                job.identity,
                *(group.next.piece, group.next.at, group.next.begins, writer.counts["val"], writer.counts["train"]),
                documents=done.documents + group.documents,
                empty_documents=done.empty_documents + group.empty,
                text_bytes=done.text_bytes + group.bytes,
                # of a group that is split, by its share of the tokens
                val_bytes=done.val_bytes + round(group.bytes * min(1, max(0, val_room) / max(1, len(group.tokens)))),
            )
            progress(done.text_bytes, corpus.bytes)
            if time.monotonic() - saved > SYNC_S:
                save()
                saved = time.monotonic()
    except BaseException:
        with contextlib.suppress(Exception):  # what stopped the work is what the user hears of
            save()
        raise
    save()
    paths = writer.finish()
    tokenizer.save(folder)
    return _write_manifest(folder, job, done, paths)


def _read_state(path: Path, job: Job) -> State:
    """The saved progress of a job; UserError if it is damaged or belongs to another job."""
    try:
        found = State(**loads(path.read_bytes()))
        if any(type(value) is not type(getattr(State(""), name)) for name, value in asdict(found).items()):
            raise TypeError("a value of another kind")
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: remove {path.parent} and begin again") from error
    if found.identity != job.identity:
        found = f"{path.parent} was begun with another text, tokenizer or options, or the text has changed"
        raise UserError(f"{found}: repeat that command, or remove the folder")
    return found


def _write_manifest(folder: Path, job: Job, done: State, paths: list[Path]) -> dict[str, Any]:
    """Write shards.json: what the shards hold, their digests, and what they were made from (`done` counts). Returns its content."""
    tokenizer = job.tokenizer
    content = {
        "format": FORMAT, "barellm": __version__, "made_from": job.identity,
        "tokenizer": {"kind": tokenizer.name, "vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash},
        "layout": asdict(job.corpus.layout), "documents": done.documents, "empty_documents": done.empty_documents,
        "text_bytes": done.text_bytes, "val_bytes": done.val_bytes, "tokens": done.counts,
        "shards": {path.name: {"tokens": len(open_shard(path)), "xxh3_128": inspect_shard(path)[1]} for path in paths},
        "inputs": [{"path": one.path, "bytes": one.bytes, one.hashed: one.digest} for one in job.corpus.inputs],
    }  # fmt: skip
    with cache.new_file(folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode())
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's shards.json, with types verified for `check_manifest`. UserError if it is damaged."""
    path = folder / MANIFEST
    try:
        content = loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise UserError(f"{path} has format {content['format']}, this version reads {FORMAT}: prepare the text again")
        digests = [content["tokenizer"]["hash"], content["made_from"]]
        for one in content["shards"].values():
            digests.append(one["xxh3_128"])
            if type(one["tokens"]) is not int:
                raise TypeError(one["tokens"])
        if not all(isinstance(digest, str) for digest in digests):
            raise TypeError(digests)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: not what barellm writes beside shards") from error
    return content


def check_manifest(folder: Path, digests: dict[Path, tuple[int, str]], tokenizer: tokenizers.Tokenizer) -> None:
    """Raise a UserError unless the shards, {path: (tokens, digest)}, and the tokenizer are those of the folder's manifest."""
    content = read_manifest(folder)
    listed, path = content["shards"], folder / MANIFEST
    if missing := sorted(set(listed) - {shard.name for shard in digests}):
        raise UserError(f"{folder} lacks {missing[0]}, which its {MANIFEST} lists")
    for shard, (count, digest) in digests.items():
        expected = listed.get(shard.name)
        if expected is None:
            raise UserError(f"{shard} is no shard that {MANIFEST} beside it lists")
        if expected["tokens"] != count:
            raise UserError(f"{shard} has {count} tokens, {MANIFEST} lists {expected['tokens']}")
        if expected["xxh3_128"] != digest:
            raise UserError(f"{shard} is damaged: its tokens have xxh3_128 {digest}, {MANIFEST} lists {expected['xxh3_128']}")
    if content["tokenizer"]["hash"] != tokenizer.hash:
        listed_hash = content["tokenizer"]["hash"][:16]
        raise UserError(f"{path} lists a tokenizer with hash {listed_hash}, used is {tokenizer.name} ({tokenizer.hash[:16]})")
