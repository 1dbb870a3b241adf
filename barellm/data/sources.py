"""From what the user names (`stdlib`, text, shards, examples) to a data set: training tokens, validation tokens and a tokenizer."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from barellm.chat import templates
from barellm.config import DataConfig
from barellm.data import cache, forms, kinds, loader, reading, writing
from barellm.data.corpus import Corpus, stdlib_corpus, text_corpus
from barellm.data.examples import Examples, ExampleValidation, split
from barellm.data.files import Skipped, existing, find_files, has_text
from barellm.data.shards import TokenStream, inspect_shard, open_shard
from barellm.data.tokenizers import FILE, Ids, Tokenizer
from barellm.errors import UserError

FORMAT = 2  # of the cache: counts up when the same text would give other tokens
BLOCK = 1 << 20  # tokens that are counted at once
Report = Callable[[str], None]
Progress = Callable[[int, int], None]


def nobody(done: int, total: int) -> None:
    """Do nothing: nobody wants to know how far it is."""


@dataclass(frozen=True)
class Dataset:
    """Training and validation tokens. `hash` covers both and the tokenizer: equal hashes mean equal batches."""

    name: str
    tokenizer: Tokenizer
    train: TokenStream
    val: TokenStream
    hash: str
    text_bytes: tuple[int, int] | None = None  # of the text that `train` and `val` are made of, where it is known
    examples: tuple[Examples, Examples] | None = None  # of prompts and answers, whose tokens are those of `train` and `val`
    masked: bool = False  # whether a token sees its own document or example alone

    def validation(self, *, seq: int, max_tokens: int = 0, first: bool = False) -> loader.Validation | ExampleValidation:
        """Rows to evaluate on: all tokens of a text, or the answers of examples. `max_tokens` > 0: about that many, spread evenly
        over the data; with `first` exactly the first ones, or all if there are fewer."""
        if self.examples is None and first and 0 < max_tokens < len(self.val):
            return loader.Validation(self.val.slice(0, max_tokens + 1, name=self.val.name), seq=seq, separator=self.separator)
        if self.examples is None:
            return loader.Validation(self.val, seq=seq, max_tokens=0 if first else max_tokens, separator=self.separator)
        if first:
            raise UserError(f"{self.name} are rows of their own, which have no first tokens: expected a text")
        how = {"max_tokens": max_tokens, "fill": self.tokenizer.start, "masked": self.masked}
        return ExampleValidation(self.examples[1], seq=seq, **how)

    @property
    def separator(self) -> int | None:
        """The token that begins a document of a text, where tokens see their own alone."""
        return self.tokenizer.eot if self.masked else None

    @property
    def prompt(self) -> list[int]:
        """The ids that a sample goes on from."""
        return [self.tokenizer.start] if self.examples is None else self.examples[1].prompt()

    @property
    def prompt_text(self) -> str | None:
        """The text of a prompt of the examples, "" where they are messages; None: there are no examples."""
        if self.examples is None or self.examples[1].talks:
            return None if self.examples is None else ""
        ids = self.prompt
        return self.tokenizer.decode(ids[ids[0] == self.tokenizer.conventions.begin :])

    @cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of text per token id, (vocab_size,); None if unknown (shards may have no tokenizer). For a tokenizer that
        normalizes text the lengths are rescaled so that the validation tokens add up to the bytes of the original text."""
        try:
            lengths = self.tokenizer.byte_lengths
        except UserError:
            return None
        if self.tokenizer.exact:
            return lengths
        if self.text_bytes is None:
            return None
        if self.examples is None:
            ends = ((at, min(at + BLOCK, len(self.val))) for at in range(0, len(self.val), BLOCK))
            decoded_bytes = sum(int(lengths[self.val.array(*part)].sum()) for part in ends)
        else:
            decoded_bytes = int(lengths[self.examples[1].tokens[self.examples[1].answer]].sum())
        return lengths * (self.text_bytes[1] / max(1, decoded_bytes))

    @property
    def no_text(self) -> str:
        """Why `byte_lengths` is None."""
        known = {"gpt2": "GPT-2's vocabulary is not on this machine", Ids.name: "the model has no tokenizer"}
        return known.get(self.tokenizer.name, "the bytes of the shards' text are unknown")


def prepare(
    data: DataConfig, *, tokenizer: Tokenizer | None = None, requested: bool = True, whole: bool = False,
    report: Report | None = None, progress: Progress | None = None,
) -> Dataset:  # fmt: skip
    """The data set that a configuration names; text is tokenized once and cached.
    `tokenizer`: use this one (a checkpoint's) instead of making it. `requested` False: `data.tokenizer` is only a preset's default,
    so shards with a saved tokenizer use that. `whole`: no training split, everything is in `val`. `report` gets a line for each
    slow task, `progress` (bytes done, bytes in all) during tokenization. UserError for whatever is wrong with the source."""
    if tokenizer is None:
        kinds.check_kind(data.tokenizer)
    report = report or (lambda line: None)
    shards = find_shards(data.source)
    if not shards and (paths := forms.example_files(data.source)):
        return _from_examples(data, paths, tokenizer, whole)
    if shards:
        dataset = _from_shards(data, shards, tokenizer, requested)
        return _whole(dataset) if whole else dataset
    corpus = _uncut(data.source, report) if whole else find_text([data.source], data.val_fraction, report=report)
    tokenizer = tokenizer or corpus_tokenizer(corpus, data.tokenizer, bpe_vocab=data.bpe_vocab, report=report)
    return _from_text(corpus, tokenizer, report, progress or nobody)


def _from_examples(data: DataConfig, paths: list[Path], tokenizer: Tokenizer | None, whole: bool) -> Dataset:
    """The data set of fine-tuning examples, which are small enough to be tokenized anew each time. `tokenizer` None: the one that
    data.tokenizer names; `whole`: all examples are for validation (eval --split all)."""
    if data.order not in ("epoch", "random"):
        raise UserError(f"data.order is {data.order!r}, and {data.source} has prompts and answers, expected epoch or random")
    path = data.source

    def make(texts: Callable[[], Iterator[str]]) -> Tokenizer:
        return tokenizer or kinds.make_tokenizer(data.tokenizer, texts, bpe_vocab=data.bpe_vocab)

    train, val, used, digest = split(paths, path, 1.0 if whole else data.val_fraction, make)
    parts = []
    for examples, what in ((train, "training"), (val, "validation")):
        arrays = [examples.tokens] if len(examples) else []
        parts.append(TokenStream(arrays, name=f"{what} part of {path}"))
    answer_tokens = int(train.answer.sum() + val.answer.sum())
    name = f"{path}: {len(train) + len(val):,} examples; the loss is of their answers alone, {answer_tokens:,} tokens"
    template = sorted(used.conventions.templates.items()) or ""
    template = f"{template} marked" if templates.has_marks(used.conventions.templates.get("default", "")) else template
    key = hashlib.sha256(f"examples {digest} {len(train)} {used.hash}{template}".encode()).hexdigest()[:32]
    both = (train, val)
    sizes = (int(train.text_bytes.sum()), int(val.text_bytes.sum()))
    return Dataset(name=name, tokenizer=used, train=parts[0], val=parts[1], hash=key, text_bytes=sizes, examples=both)


def _uncut(source: str, report: Report) -> Corpus:
    """All of a text as its validation part. It is tokenized in one piece: a word at a cut would become two tokens."""
    if source != "stdlib":
        return find_text([source], 1.0, report=report)
    corpus = stdlib_corpus(0.5)
    return replace(corpus, train=(), val=corpus.train + corpus.val, hash=f"{corpus.hash} whole")


def _whole(data: Dataset) -> Dataset:
    stream = TokenStream([*data.train.parts, *data.val.parts], name=data.name)
    sizes = None if data.text_bytes is None else (0, sum(data.text_bytes))
    return replace(data, train=TokenStream([], name=data.name), val=stream, text_bytes=sizes)


def find_text(
    sources: list[str],
    val_fraction: float,
    *,
    layout: reading.Layout = reading.Layout(),  # noqa: B008
    report: Report = lambda line: None,
    reported: Progress = nobody,
) -> Corpus:
    """The corpus of `stdlib`, or of the files that the sources name, in that order. `report` gets a line about files that were
    skipped, `reported` the bytes scanned so far and in all."""
    if "stdlib" in sources:
        if len(sources) > 1:
            raise UserError("source 'stdlib' stands alone: it is split by files, text files by characters")
        return stdlib_corpus(val_fraction)
    skipped = Skipped()
    files = find_files(sources, layout, skipped)
    if str(skipped):
        report(str(skipped))
    return text_corpus(files, val_fraction, name=", ".join(sources), layout=layout, reported=reported)


def find_shards(source: str) -> list[Path]:
    """The .bin shards that a source names: one file, or a folder's, sorted; [] for text."""
    if source == "stdlib" or not Path(source or ".").expanduser().exists():
        return []
    path = existing(source)
    if path.is_file():
        return [path] if path.suffix == ".bin" else []
    shards = sorted(path.glob("*.bin"))
    if shards and has_text(path):
        raise UserError(f"folder {path} has both .bin shards and text: name the ones to use")
    return shards


def corpus_tokenizer(corpus: Corpus, name: str, *, bpe_vocab: int, report: Report) -> Tokenizer:
    """The tokenizer of a kind for a corpus: "chars" takes the characters of all text, "bpe" is trained on the training split."""

    def training_texts() -> Iterator[str]:
        report(f"training a BPE of {bpe_vocab} tokens on {corpus.name}")
        yield from corpus.texts(corpus.train)

    every = corpus.train + corpus.val
    return kinds.make_tokenizer(name, lambda: corpus.texts(every), train=training_texts, bpe_vocab=bpe_vocab, key=corpus.hash)


def _from_text(corpus: Corpus, tokenizer: Tokenizer, report: Report, progress: Progress) -> Dataset:
    """Open the cached tokens of a corpus; tokenize it first if they are missing or damaged. The key: both hashes and the FORMAT."""
    key = hashlib.sha256(f"tokens {FORMAT} {corpus.hash} {tokenizer.hash}".encode()).hexdigest()[:32]
    folder = cache.cache_folder("tokens")
    target = folder / key
    if target.exists():
        try:
            return _cached(corpus, tokenizer, target, key)
        except UserError:  # damaged: make it again
            shutil.rmtree(target, ignore_errors=True)
    report(f"tokenizing {corpus.name} ({tokenizer.name}, {tokenizer.vocab_size} ids)")
    cache.sweep(folder)
    try:
        with cache.new_folder(target) as temporary:
            writing.write_split(temporary, writing.Job(corpus, tokenizer, "tokens"), progress=progress)
    except FileExistsError:
        pass  # another process made the same
    return _cached(corpus, tokenizer, target, key)


def _cached(corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str) -> Dataset:
    shards = sorted(folder.glob("*.bin"))
    writing.check_manifest(folder, _inspected(shards, tokenizer), tokenizer)
    train, val = _parts(shards)
    return Dataset(
        name=corpus.name, tokenizer=tokenizer, hash=key, text_bytes=_text_bytes(folder),
        train=TokenStream([open_shard(path) for path in train], name=f"training part of {corpus.name}"),
        val=TokenStream([open_shard(path) for path in val], name=f"validation part of {corpus.name}"),
    )  # fmt: skip


def _text_bytes(folder: Path) -> tuple[int, int] | None:
    """What a folder of shards says of the text that its parts are made of."""
    listed = writing.read_manifest(folder)
    whole, val = listed.get("text_bytes"), listed.get("val_bytes")
    return (whole - val, val) if isinstance(whole, int) and isinstance(val, int) else None


def _from_shards(data: DataConfig, shards: list[Path], tokenizer: Tokenizer | None, requested: bool) -> Dataset:
    """The data set of .bin shards. Names with `train` and `val` decide the split; without them the last `val_fraction` of the
    tokens is for validation. A manifest beside them, if there is one, is verified."""
    tokenizer = _shard_tokenizer(data.tokenizer, shards[0].parent, tokenizer, requested)
    folder = existing(data.source)
    has_manifest = folder.is_dir() and (folder / writing.MANIFEST).exists()
    if not folder.is_dir() and (part := _part(shards[0])):
        # The other part of tiny_shakespeare_train.bin is tiny_shakespeare_val.bin beside it.
        other_part = {"train": "val", "val": "train"}[part]
        sibling = shards[0].with_name(re.sub(rf"(?<![a-z]){part}(?![a-z])", other_part, shards[0].name.lower()))
        shards += [sibling] if sibling.is_file() else []
    train, val = _parts(shards)
    inspected = _inspected(shards, tokenizer)
    if has_manifest:
        writing.check_manifest(folder, inspected, tokenizer)
    digests = [digest for _, digest in inspected.values()]
    described = f"{data.source} ({len(shards)} shard{'s' if len(shards) > 1 else ''})"
    if train and val:
        if stray := [path for path in shards if _part(path) is None]:
            raise UserError(f"{stray[0]} is named neither train nor val, the shards beside it are")
        # `native.build` knows by these names that files decide the split.
        train_stream = TokenStream([open_shard(path) for path in train], name=f"training shards of {described}")
        val_stream = TokenStream([open_shard(path) for path in val], name=f"validation shards of {described}")
    else:  # nothing says which are for validation: the last tokens are
        whole = TokenStream([open_shard(path) for path in shards], name=described)
        cut = int(len(whole) * (1 - data.val_fraction))
        train_stream = whole.slice(0, cut, name=f"training part of {described}")
        val_stream = whole.slice(cut, len(whole), name=f"validation part of {described}")
    key = hashlib.sha256(f"shards {FORMAT} {digests} {len(train_stream)} {tokenizer.hash}".encode()).hexdigest()[:32]
    sizes = _text_bytes(folder) if has_manifest and train and val else None
    return Dataset(name=described, tokenizer=tokenizer, train=train_stream, val=val_stream, hash=key, text_bytes=sizes)


def _shard_tokenizer(name: str, folder: Path, given: Tokenizer | None, requested: bool) -> Tokenizer:
    """The tokenizer saved beside the shards (must equal a given or requested one); else one that can be made without text."""
    saved = kinds.load_tokenizer(folder) if (folder / FILE).is_file() else None
    if saved and given and given.name == Ids.name:  # weights that nothing is known of
        return kinds.fitting(saved, given.rows, folder)
    if saved and not given and (name == saved.name or not requested):
        return saved
    if not given and name in ("bpe", "chars"):
        how = f"were made with tokenizer {saved.name!r}" if saved else f"have no {FILE} beside them (llm.c's: gpt2)"
        raise UserError(f"shards in {folder} {how}, data.tokenizer is {name!r}")
    wanted = given or kinds.make_tokenizer(name, list)
    if saved and saved.hash != wanted.hash:
        mismatch = f"{saved.name} ({saved.hash[:16]}), not {wanted.name} ({wanted.hash[:16]})"
        raise UserError(f"shards in {folder} were made with tokenizer {mismatch}")
    return wanted


def _part(path: Path) -> str | None:
    """'train' or 'val' where the file's name says so as a word: fineweb_train_000001.bin, tiny_shakespeare_val.bin."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((part for part in ("train", "val") if part in words), None)


def _parts(shards: list[Path]) -> tuple[list[Path], list[Path]]:
    return [path for path in shards if _part(path) == "train"], [path for path in shards if _part(path) == "val"]


def _inspected(shards: list[Path], tokenizer: Tokenizer) -> dict[Path, tuple[int, str]]:
    """Scan the shards: {path: (tokens, digest)}. UserError for a token id beyond the tokenizer or the model's embedding."""
    inspected = {}
    for path in shards:
        count = len(open_shard(path))
        largest, digest = inspect_shard(path)
        if largest >= min(tokenizer.vocab_size, tokenizer.rows or tokenizer.vocab_size):
            vocabulary = f"tokenizer {tokenizer.name} ({tokenizer.vocab_size} ids)"
            if largest < tokenizer.vocab_size:
                vocabulary = f"the model ({tokenizer.rows} rows)"
            raise UserError(f"{path} has token id {largest}, beyond the vocabulary of {vocabulary}")
        inspected[path] = count, digest
    return inspected
