"""Vocabularies as Hugging Face's GPT2Tokenizer has them: vocab.json (ids) and merges.txt (pairs), in printable characters.

Newer versions write both into one tokenizer.json, which is read too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from barellm.data.bpe import BytePairs, printable_bytes
from barellm.data.gpt2 import EOT, HASH, VOCAB, Gpt2
from barellm.data.tokenizers import Tokenizer, vocabulary_hash
from barellm.errors import UserError

IDS, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


def read(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer whose files lie in a folder; without them GPT-2's where the vocabulary is as large, else None. UserError for
    files that say something else than a BPE of bytes whose ids follow its merges."""
    if (folder / IDS).is_file() and (folder / MERGES).is_file():
        path = folder / IDS
    elif (folder / WHOLE).is_file():
        path = folder / WHOLE
    else:
        return Gpt2() if vocab_size == VOCAB else None
    byte_of = printable_bytes()
    try:
        ids, merges = _of_two_files(folder) if path.name == IDS else _of_one_file(path)
        names = sorted(ids, key=ids.__getitem__)
        tokens = [bytes(byte_of[c] for c in name) for name in names[:-1]] + [b""]
    except (ValueError, TypeError, AttributeError, LookupError):
        raise UserError(f"{path} is not a BPE of bytes with {END_OF_TEXT} as its last id") from None
    if names[-1] != END_OF_TEXT or [ids[name] for name in names] != list(range(len(names))):
        raise UserError(f"{path} ends with {names[-1]!r}, expected ids without gaps and {END_OF_TEXT} last")
    if len(tokens) != vocab_size:
        raise UserError(f"{path} has {len(tokens)} ids, the model {vocab_size}")
    if vocabulary_hash(Gpt2.name, EOT, tokens) == HASH:
        return Gpt2(tokens)
    if merges != _lines(tokens):
        raise UserError(f"{path}: its merges are not those that its ids say, expected them in the same order")
    return BytePairs(tokens)


def _of_two_files(folder: Path) -> tuple[dict[str, int], list[str]]:
    lines = (folder / MERGES).read_bytes().decode().split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    return json.loads((folder / IDS).read_bytes()), [line for line in lines[first:] if line]


def _of_one_file(path: Path) -> tuple[dict[str, int], list[str]]:
    """Of what the library `tokenizers` writes."""
    found = json.loads(path.read_bytes())
    model, words = found["model"], found["pre_tokenizer"]
    if (model["type"], words["type"], words["add_prefix_space"]) != ("BPE", "ByteLevel", False):
        raise ValueError(path)
    ids = model["vocab"] | {token["content"]: token["id"] for token in found["added_tokens"]}
    return ids, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def files(tokenizer: Tokenizer, max_seq: int) -> dict[str, bytes]:
    """{name: content} for transformers; empty where there is none: for bytes and characters, and for GPT-2's vocabulary where it
    is not on this machine."""
    if not isinstance(tokenizer, BytePairs):
        return {}
    try:
        tokens = tokenizer.tokens
    except UserError:
        return {}
    names = [*map(_printed, tokens[:-1]), END_OF_TEXT]
    settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return {
        IDS: json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False).encode(),
        MERGES: "\n".join(["#version: 0.2", *_lines(tokens), ""]).encode(),
        "tokenizer_config.json": json.dumps(
            settings | {"tokenizer_class": "GPT2Tokenizer", "model_max_length": max_seq}
        ).encode(),
    }


def _printed(token: bytes) -> str:
    return token.decode("latin-1").translate(_PRINTED)


_PRINTED = {byte: character for character, byte in printable_bytes().items()}


def _lines(tokens: Sequence[bytes]) -> list[str]:
    return [f"{_printed(a)} {_printed(b)}" for a, b in _merges(tokens)]


def _merges(tokens: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each id beyond the bytes was merged from: what is left of its bytes when all earlier pairs are merged."""
    ranks = {token: i for i, token in enumerate(tokens) if token}
    for token, own in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, own) for a, b in pairwise(parts)]
            first = min(range(len(joined)), key=joined.__getitem__)
            if joined[first] >= own:
                raise UserError(f"the token {token!r} is not made of earlier ones: no order of merges gives it")
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
