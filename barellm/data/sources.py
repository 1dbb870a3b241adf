"""The way from what the user names (`stdlib`, text, shards) to two streams of tokens and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from barellm.config import DataConfig
from barellm.data.cache import cache_folder, new_file, new_folder, sweep
from barellm.data.corpus import Corpus, Piece, stdlib_corpus, text_corpus, texts
from barellm.data.kinds import check_kind, load_tokenizer, make_tokenizer
from barellm.data.shards import TokenStream, inspect_shard, magic_for, open_shard, write_shards
from barellm.data.tokenizers import FILE, Tokenizer
from barellm.errors import UserError

MANIFEST = "shards.json"  # beside shards that barellm wrote: which there are, and how many tokens in each
FORMAT = 1  # of the cache: counts up when the same text would give other tokens
GROUP = 1 << 22  # characters tokenized at once, by all cores together
Report = Callable[[str], None]
Progress = Callable[[int, int], None]


def nobody(done: int, total: int) -> None:
    """Do nothing: nobody wants to know how far it is."""


@dataclass(frozen=True)
class Dataset:
    """The tokens to train on and the tokens to validate on. `hash` is that of both and the tokenizer: equal hashes mean equal
    batches."""

    name: str
    tokenizer: Tokenizer
    train: TokenStream
    val: TokenStream
    hash: str

    @cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """(vocab_size,) bytes of text in each id; None where GPT-2's vocabulary is missing (shards train without)."""
        try:
            return self.tokenizer.byte_lengths
        except UserError:
            return None


def prepare(
    data: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    asked: bool = True,
    whole: bool = False,
    report: Report | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """The data set that a configuration names; text is tokenized once and cached.

    `tokenizer`: use this one (a checkpoint's) instead of making it. `asked` False: `data.tokenizer` is only what a preset has, so
    shards that say their own are taken with that. `whole`: nothing is cut off for training, all of it is in `val`. `report`
    gets a line for each thing that takes seconds, `progress` (bytes done, bytes in all) while text is tokenized. UserError for
    whatever is wrong with the source.
    """
    if tokenizer is None:
        check_kind(data.tokenizer)
    report = report or (lambda line: None)
    shards = find_shards(data.source)
    if shards:
        found = _from_shards(data, shards, tokenizer, asked)
        return _whole(found) if whole else found
    corpus = _uncut(data.source) if whole else find_text([data.source], data.val_fraction)
    tokenizer = tokenizer or corpus_tokenizer(corpus, data.tokenizer, bpe_vocab=data.bpe_vocab, report=report)
    return _from_text(corpus, tokenizer, report, progress or nobody)


def _uncut(source: str) -> Corpus:
    """All of a text as its validation part. It is tokenized in one piece: a word at a cut would become two tokens."""
    if source != "stdlib":
        return find_text([source], 1.0)
    corpus = stdlib_corpus(0.5)
    return replace(corpus, train=(), val=corpus.train + corpus.val, hash=f"{corpus.hash} whole")


def _whole(data: Dataset) -> Dataset:
    stream = TokenStream([*data.train.parts, *data.val.parts], name=data.name)
    return replace(data, train=TokenStream([], name=data.name), val=stream)


def find_text(sources: list[str], val_fraction: float) -> Corpus:
    """The corpus of `stdlib`, or of text files and folders (their .txt files at any depth, sorted), in that order."""
    if "stdlib" in sources:
        if len(sources) > 1:
            raise UserError("source 'stdlib' stands alone: it is split by files, text files by characters")
        return stdlib_corpus(val_fraction)
    files: list[Path] = []
    for source in sources:
        path = existing(source)
        if path.is_dir():
            inside = texts_of(path)
            if not inside:
                raise UserError(f"folder {path} has neither .txt files nor .bin shards")
            files += inside
        else:
            files.append(path)
    return text_corpus(files, val_fraction, name=", ".join(sources))


def texts_of(folder: Path) -> list[Path]:
    """The .txt files of a folder at any depth, sorted. UserError for a folder inside that cannot be read: what is left of a text
    is another text."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    walk = os.walk(folder, onerror=refuse)
    paths = (Path(inside, name) for inside, _, names in walk for name in names if name.endswith(".txt"))
    return sorted(path for path in paths if path.is_file())


def existing(source: str) -> Path:
    """The path that a source names; UserError if nothing is there or it cannot be read."""
    if not source:
        raise UserError("no text to train on: pass --data FILE_OR_FOLDER (or 'stdlib' for Python's own source)")
    path = Path(source).expanduser()
    try:
        if not path.exists():
            raise UserError(f"no such file or folder: {source} (expected text, .bin shards, a folder, or 'stdlib')")
        if path.is_dir():
            next(path.iterdir(), None)
        elif not path.is_file():
            raise UserError(f"{source} is neither a file nor a folder")
        elif path.stat().st_size == 0:
            raise UserError(f"{source} is empty, expected text or tokens")
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    return path


def find_shards(source: str) -> list[Path]:
    """The .bin files that a source names: one, or those of a folder, sorted; none for text."""
    if source == "stdlib":
        return []
    path = existing(source)
    if path.is_file():
        return [path] if path.suffix == ".bin" else []
    shards = sorted(path.glob("*.bin"))
    if shards and texts_of(path):
        raise UserError(f"folder {path} has both .bin shards and .txt files: name the ones to use")
    return shards


def corpus_tokenizer(corpus: Corpus, name: str, *, bpe_vocab: int, report: Report) -> Tokenizer:
    """The tokenizer of that kind for a corpus: chars knows all its characters, bpe learns from the training part."""

    def training_texts() -> Iterator[str]:
        report(f"training a BPE of {bpe_vocab} tokens on {corpus.name}")
        yield from _texts(corpus.train)

    def all_texts() -> Iterator[str]:
        return _texts(corpus.train + corpus.val)

    return make_tokenizer(name, all_texts, train=training_texts, bpe_vocab=bpe_vocab, key=corpus.hash)


def _texts(pieces: Iterable[Piece]) -> Iterator[str]:
    for piece in pieces:
        yield from texts(piece)


def token_blocks(
    tokenizer: Tokenizer, pieces: Iterable[Piece], *, told: Callable[[int], None] = lambda nbytes: None
) -> Iterator[np.ndarray]:
    """The pieces' ids, each document led by the end-of-text id where the tokenizer has one. `told` hears of each group of texts
    that is done, by its bytes."""
    eot = np.array([] if tokenizer.eot is None else [tokenizer.eot], np.int32)
    group: list[str | None] = []  # None: a document begins
    size = 0

    def encoded() -> Iterator[np.ndarray]:
        ids = iter(tokenizer.encode_many([text for text in group if text is not None]))
        for text in group:
            yield eot if text is None else next(ids)
        told(sum(len(text.encode()) for text in group if text is not None))

    for piece in pieces:
        if piece.begins:
            group.append(None)
        for text in texts(piece):
            group.append(text)
            size += len(text)
            if size >= GROUP:
                yield from encoded()
                group, size = [], 0
    yield from encoded()


def _from_text(corpus: Corpus, tokenizer: Tokenizer, report: Report, progress: Progress) -> Dataset:
    """Opens the cached tokens of a corpus; makes them first if they are not there or not whole."""
    key = hashlib.sha256(f"tokens {FORMAT} {corpus.hash} {tokenizer.hash}".encode()).hexdigest()[:32]
    folder = cache_folder("tokens")
    found = folder / key
    if found.exists():
        try:
            return _cached(corpus, tokenizer, found, key)
        except UserError:  # damaged: make it again
            shutil.rmtree(found, ignore_errors=True)
    report(f"tokenizing {corpus.name} ({tokenizer.name}, {tokenizer.vocab_size} ids)")
    sweep(folder)
    try:
        with new_folder(found) as made:
            write_split(made, "tokens", corpus, tokenizer, progress=progress)
    except FileExistsError:
        pass  # another process made the same
    return _cached(corpus, tokenizer, found, key)


def write_split(
    folder: Path, stem: str, corpus: Corpus, tokenizer: Tokenizer, *, progress: Progress = nobody, **sizes: int
) -> dict[str, int]:
    """Writes `stem_val_000000.bin`, `stem_train_000001.bin`, ... (llm.c's names and numbers) and tokenizer.json.

    Returns how many tokens each part has.
    """
    total, done = sum(piece.stop - piece.start for piece in corpus.train + corpus.val), 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    magic = magic_for(tokenizer.vocab_size)
    counts: dict[str, int] = {}
    listed: dict[str, int] = {}
    for part, pieces, first in (("val", corpus.val, 0), ("train", corpus.train, 1)):
        blocks = token_blocks(tokenizer, pieces, told=told)
        paths = write_shards(folder, f"{stem}_{part}", blocks, magic=magic, first=first, **sizes)
        written = {path.name: len(open_shard(path)) for path in paths}
        counts[part] = sum(written.values())
        listed |= written
    tokenizer.save(folder)
    with new_file(folder / MANIFEST) as file:
        file.write(json.dumps(listed, indent=1).encode())
    return counts


def check_manifest(folder: Path, shards: list[Path]) -> None:
    """Refuses a folder whose shards are not those that its manifest lists."""
    path = folder / MANIFEST
    try:
        listed = json.loads(path.read_bytes())
        names = set(listed)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: not a list of shards that barellm wrote") from error
    there = {shard.name: len(open_shard(shard)) for shard in shards}
    if missing := sorted(names - set(there)):
        raise UserError(f"{folder} lacks {missing[0]}, which its {MANIFEST} lists")
    for name, count in there.items():
        if listed.get(name) != count:
            expected = f"{listed[name]} tokens" if name in names else "no such shard"
            raise UserError(f"{folder / name} has {count} tokens, {MANIFEST} lists {expected}")


def _cached(corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str) -> Dataset:
    shards = sorted(folder.glob("*.bin"))
    check_manifest(folder, shards)
    train, val = _parts(shards)
    _check_ids(train + val, tokenizer)
    return Dataset(
        name=corpus.name,
        tokenizer=tokenizer,
        train=TokenStream([open_shard(path) for path in train], name=f"training part of {corpus.name}"),
        val=TokenStream([open_shard(path) for path in val], name=f"validation part of {corpus.name}"),
        hash=key,
    )


def _from_shards(data: DataConfig, shards: list[Path], tokenizer: Tokenizer | None, asked: bool) -> Dataset:
    tokenizer = _shard_tokenizer(data.tokenizer, shards[0].parent, tokenizer, asked)
    if existing(data.source).is_dir():
        if (shards[0].parent / MANIFEST).exists():
            check_manifest(shards[0].parent, shards)
    elif part := _part(shards[0]):  # the other part of tiny_shakespeare_train.bin is tiny_shakespeare_val.bin beside it
        other = {"train": "val", "val": "train"}[part]
        sibling = shards[0].with_name(re.sub(rf"(?<![a-z]){part}(?![a-z])", other, shards[0].name.lower()))
        shards += [sibling] if sibling.is_file() else []
    train, val = _parts(shards)
    digests = _check_ids(shards, tokenizer)
    described = f"{data.source} ({len(shards)} shard{'s' if len(shards) > 1 else ''})"
    if train and val:
        if stray := [path for path in shards if _part(path) is None]:
            raise UserError(f"{stray[0]} is named neither train nor val, the shards beside it are")
        train_stream = TokenStream([open_shard(path) for path in train], name=f"training shards of {described}")
        val_stream = TokenStream([open_shard(path) for path in val], name=f"validation shards of {described}")
    else:  # nothing says which are for validation: the last tokens are
        whole = TokenStream([open_shard(path) for path in shards], name=described)
        cut = int(len(whole) * (1 - data.val_fraction))
        train_stream = whole.slice(0, cut, name=f"training part of {described}")
        val_stream = whole.slice(cut, len(whole), name=f"validation part of {described}")
    identity = f"shards {FORMAT} {digests} {len(train_stream)} {tokenizer.hash}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return Dataset(name=described, tokenizer=tokenizer, train=train_stream, val=val_stream, hash=key)


def _shard_tokenizer(name: str, folder: Path, given: Tokenizer | None, asked: bool) -> Tokenizer:
    """The tokenizer saved beside the shards, which must be the one asked for, if one is; else one that needs no text."""
    saved = load_tokenizer(folder) if (folder / FILE).is_file() else None
    if saved and not given and (name == saved.name or not asked):
        return saved
    if not given and name in ("bpe", "chars"):
        made = f"were made with tokenizer {saved.name!r}" if saved else f"have no {FILE} beside them (llm.c's: gpt2)"
        raise UserError(f"shards in {folder} {made}, data.tokenizer is {name!r}")
    wanted = given or make_tokenizer(name, list)
    if saved and saved.hash != wanted.hash:
        both = f"{saved.name} ({saved.hash[:16]}), not {wanted.name} ({wanted.hash[:16]})"
        raise UserError(f"shards in {folder} were made with tokenizer {both}")
    return wanted


def _part(path: Path) -> str | None:
    """'train' or 'val' where the file's name says so as a word: fineweb_train_000001.bin, tiny_shakespeare_val.bin."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((part for part in ("train", "val") if part in words), None)


def _parts(shards: list[Path]) -> tuple[list[Path], list[Path]]:
    train = [path for path in shards if _part(path) == "train"]
    return train, [path for path in shards if _part(path) == "val"]


def _check_ids(shards: list[Path], tokenizer: Tokenizer) -> list[str]:
    """Refuses shards with an id that the tokenizer does not have; returns their digests."""
    digests = []
    for path in shards:
        open_shard(path)
        largest, digest = inspect_shard(path)
        if largest >= tokenizer.vocab_size:
            known = f"tokenizer {tokenizer.name} ({tokenizer.vocab_size} ids)"
            raise UserError(f"{path} has token id {largest}, beyond the vocabulary of {known}")
        digests.append(digest)
    return digests
