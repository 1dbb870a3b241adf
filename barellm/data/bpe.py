"""Byte-level BPE: trained by `tokenizers`, encoded by tiktoken."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from barellm.data.tokenizers import Tokenizer, utf8
from barellm.errors import UserError

if TYPE_CHECKING:
    import tiktoken

# GPT-2's rule for cutting text into words before pairs are merged, in tiktoken's faster and equivalent form.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
SHARE = 1 << 16  # characters that a thread encodes in one go
TRAIN_CHARACTERS = 1 << 26  # more text than this changes no merge that matters


class BytePairs(Tokenizer):
    """Ids in merge order: the pair whose id is lowest is merged first, inside words of PATTERN. `eot` stands last unless it is
    given: the library `tokenizers` puts it first."""

    name = "bpe"

    def __init__(self, tokens: Sequence[bytes], *, eot: int | None = None) -> None:
        self.tokens = tokens
        self.eot = len(tokens) - 1 if eot is None else eot

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        """tiktoken's encoder without special tokens: what looks like one in a text is text."""
        import tiktoken

        ranks = {token: i for i, token in enumerate(self.tokens) if i != self.eot}
        return tiktoken.Encoding(self.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        if special:
            return super().encode(text, special=True)
        utf8(text)
        return self.encoding.encode_to_numpy(text, disallowed_special=()).view(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts in parallel, in shares of about SHARE characters per thread; ids (n,) of each text, in the texts' order."""
        from concurrent.futures import ThreadPoolExecutor

        _ = self.encoding  # made, perhaps downloaded, once and not by each thread
        shares, size = [[]], 0  # short texts go to a thread many at once
        for text in texts:
            if size >= SHARE:
                shares.append([])
                size = 0
            shares[-1].append(text)
            size += len(text)
        with ThreadPoolExecutor(processors()) as pool:  # tiktoken releases the interpreter lock
            found = pool.map(lambda share: [self.encode(text) for text in share], shares)
            return [ids for one in found for ids in one]


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trained_bpe(texts: Callable[[], Iterable[str]], *, vocab: int) -> BytePairs:
    """A BPE of at most `vocab` ids (256 bytes, merges, eot), the same for the same texts."""
    if vocab < 257:
        raise UserError(f"data.bpe_vocab is {vocab}, expected at least 257 (256 bytes and the end of text)")
    return BytePairs(_train(texts, vocab))


def _train(texts: Callable[[], Iterable[str]], vocab: int) -> list[bytes]:
    """Train a byte-level BPE and return the byte strings of its ids, in merge order. The training runs in a thread of its own,
    because the library ignores Ctrl-C until it is done."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False)  # 1: the end of text
    failure: list[BaseException] = []  # of the thread

    def work() -> None:
        try:
            library.train_from_iterator(_limited(texts()), trainer)
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join()
    if failure:
        raise failure[0]
    byte_of = printable_bytes()
    ids = library.get_vocab()
    return [bytes(byte_of[c] for c in token) for token in sorted(ids, key=ids.__getitem__)] + [b""]


def _limited(texts: Iterable[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total > TRAIN_CHARACTERS:
            return


def printable_bytes() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters: character -> byte."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
