"""GPT-2's own vocabulary, from files on this machine or tiktoken's download."""

import base64
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from barellm.data import bpe, cache, tokenizers
from barellm.errors import UserError

VOCAB = 50257
EOT = 50256
# Of the 50257 byte strings, computed from the vocab.bpe whose sha256 tiktoken publishes (below).
HASH = "6d38e52e6b2d91ad0112c8589c5551ca0a8d6b2e4ba4335635da45ac29662781"
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
URL_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# OpenAI's name, the name in a data folder, Hugging Face's, tiktoken's for the same ranks.
NAMES = ("vocab.bpe", "gpt2_vocab.bpe", "merges.txt", "gpt2.tiktoken", "r50k_base.tiktoken")


class Gpt2(bpe.BytePairs):
    """GPT-2's tokenizer. The table is looked for when it is first needed: training on shards works without it."""

    name = "gpt2"
    eot = EOT

    def __init__(self, tokens: Sequence[bytes] | None = None) -> None:
        if tokens is not None:
            self.tokens = _verified(tokens, "stored vocabulary")

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def hash(self) -> str:
        return HASH

    @cached_property
    def tokens(self) -> Sequence[bytes]:
        return find_vocabulary()

    @property
    def found(self) -> bool:
        """Whether the table was looked for and is here."""
        return "tokens" in vars(self)

    def save(self, folder: Path) -> None:
        """Write the tokenizer; without the vocabulary on this machine only its name and hash, enough to find it elsewhere."""
        try:
            super().save(folder)
        except UserError:
            if self.found:
                raise
            self._write(folder, None)


def find_vocabulary() -> list[bytes]:
    """Byte strings of GPT-2's ids, from BARELLM_GPT2_VOCAB, the cache, or a download that is then cached."""
    chosen = os.environ.get("BARELLM_GPT2_VOCAB")
    if chosen:
        found = _read_folder(Path(chosen))
        if found is None:
            raise UserError(f"BARELLM_GPT2_VOCAB is {chosen}, expected a folder with one of {', '.join(NAMES)}")
        return found
    folder = cache.cache_folder("gpt2")
    return _read_folder(folder) or _download(folder)


def _read_folder(folder: Path) -> list[bytes] | None:
    """Parse and verify the first vocabulary file in a folder that has one of the known NAMES; None if there is none."""
    for path in (folder / name for name in NAMES):
        if path.is_file():
            parse = _from_ranks if path.suffix == ".tiktoken" else _from_merges
            try:
                tokens = parse(path.read_bytes())
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}") from error
            except (LookupError, ValueError) as error:
                raise UserError(f"{path} is not GPT-2's vocabulary: it cannot be parsed") from error
            return _verified(tokens, str(path))
    return None


def _from_merges(content: bytes) -> list[bytes]:
    """Parse vocab.bpe: a version line, then a merge per line, in GPT-2's alphabet. Ids: bytes, merges in order, <|endoftext|>."""
    byte_of = bpe.printable_bytes()
    end = "\uffff"  # of a line: a byte of a merge may be a line feed
    latin = str.maketrans({c: chr(b) for c, b in byte_of.items()} | {" ": None, "\r": None, "\n": end})
    lines = content.decode().translate(latin).split(end)[1:]  # one translation: 50,000 cost as much as all else here
    return [bytes([b]) for b in byte_of.values()] + [line.encode("latin-1") for line in lines if line] + [b""]


def _from_ranks(content: bytes) -> list[bytes]:
    """Parse a .tiktoken file: base64 of the bytes and the id (rank) on each line."""
    pairs = [line.split() for line in content.splitlines() if line]
    ranked = {int(pair[1]): base64.b64decode(pair[0]) for pair in pairs}
    return [ranked[i] for i in range(len(ranked))] + [b""]


def _verified(tokens: Sequence[bytes], what: str) -> list[bytes]:
    found = tokenizers.vocabulary_hash("gpt2", EOT, tokens)
    if found != HASH:
        raise UserError(f"{what} is not GPT-2's: {len(tokens)} ids with hash {found[:16]}, expected {HASH[:16]}")
    return list(tokens)


def _download(folder: Path) -> list[bytes]:
    """Download vocab.bpe (SHA-256 checked) and cache it; the UserError says where to put the file by hand."""
    from tiktoken.load import read_file_cached

    print(f"downloading GPT-2's vocabulary ({URL})", file=sys.stderr, flush=True)
    try:
        content = read_file_cached(URL, URL_SHA256)
    except (OSError, ValueError, ImportError) as error:  # requests' errors are OSErrors
        found = f"GPT-2's vocabulary is not on this machine and its download failed ({type(error).__name__})"
        expected = f"put vocab.bpe or gpt2.tiktoken into {folder}, or set BARELLM_GPT2_VOCAB to a folder that has it"
        raise UserError(f"{found}: {expected}") from error
    with cache.new_file(folder / "vocab.bpe") as file:
        file.write(content)
    return _verified(_from_merges(content), URL)
