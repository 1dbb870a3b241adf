"""Vocabularies as Hugging Face's GPT2Tokenizer has them: vocab.json (ids) and merges.txt (pairs), in printable characters.

Newer versions write both into one tokenizer.json, which is read too. A BPE of bytes that cuts words in another way than GPT-2's, as
Llama-3's does, is kept as that file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from barellm.data.bpe import BytePairs, printable_bytes
from barellm.data.gpt2 import HASH, VOCAB, Gpt2
from barellm.data.huggingface import AFTER_TEXT, HuggingFace
from barellm.data.tokenizers import Tokenizer, vocabulary_hash
from barellm.errors import UserError
from barellm.jsontext import loads

IDS, MERGES, WHOLE, SETTINGS = "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"


def read(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer whose files lie in a folder; without them GPT-2's where the vocabulary is as large, else None. UserError for
    files that say something else than a BPE of bytes."""
    if (folder / IDS).is_file() and (folder / MERGES).is_file():
        path = folder / IDS
    elif (folder / WHOLE).is_file():
        path = folder / WHOLE
    else:
        return Gpt2() if vocab_size == VOCAB else None
    try:
        tokenizer = _of_ids(path, *_of_two_files(folder)) if path.name == IDS else _of_one_file(path)
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError):
        raise UserError(f"{path} is not a BPE of bytes with {END_OF_TEXT}") from None
    if tokenizer.vocab_size != vocab_size:
        raise UserError(f"{path} has {tokenizer.vocab_size} ids, the model {vocab_size}")
    return tokenizer


def _of_ids(path: Path, ids: dict[str, int], merges: list[str]) -> BytePairs:
    """GPT-2's way to cut words, and one special token anywhere. UserError where ids do not follow the merges."""
    byte_of = printable_bytes()
    names, eot = sorted(ids, key=ids.__getitem__), ids[END_OF_TEXT]
    tokens = [b"" if name == END_OF_TEXT else bytes(byte_of[c] for c in name) for name in names]
    if [ids[name] for name in names] != list(range(len(names))):
        raise UserError(f"{path} has gaps in its ids up to {ids[names[-1]]}, expected {len(names)} without gaps")
    if len({token for token in tokens if len(token) == 1}) < 256:
        raise UserError(f"{path} is not a BPE of bytes: it lacks some of the 256 bytes")
    if vocabulary_hash(Gpt2.name, eot, tokens) == HASH:
        return Gpt2(tokens)
    try:
        lines = _lines(tokens)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if merges != lines:
        raise UserError(f"{path}: its merges are not those that its ids say, expected them in the same order")
    return BytePairs(tokens, eot=eot)


def _of_two_files(folder: Path) -> tuple[dict[str, int], list[str]]:
    lines = (folder / MERGES).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    return loads((folder / IDS).read_bytes()), [line for line in lines[first:] if line]


def _of_one_file(path: Path) -> Tokenizer:
    """The tokenizer in a file that the library `tokenizers` wrote."""
    content = path.read_bytes()
    found = loads(content)
    whole = HuggingFace(content, path=path)
    words, normal = found["pre_tokenizer"], found.get("normalizer")
    as_gpt2 = words["type"] == "ByteLevel" and words.get("use_regex", True) and normal is None
    if not as_gpt2 or [token["content"] for token in found["added_tokens"]] != [END_OF_TEXT]:
        return whole
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]]
    return _of_ids(path, found["model"]["vocab"] | whole.special, merges)


def files(tokenizer: Tokenizer, max_seq: int) -> dict[str, bytes]:
    """{name: content} for transformers; empty where there is none: for bytes and characters, and for GPT-2's vocabulary where it
    is not on this machine."""
    if isinstance(tokenizer, HuggingFace):
        name_of = {i: name for name, i in tokenizer.special.items()}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq}
        begin, end = begin_and_end(tokenizer)
        if begin is not None and end is not None:
            settings |= {"bos_token": name_of[begin], "eos_token": name_of[end]}
        return {WHOLE: tokenizer.content, SETTINGS: json.dumps(settings).encode()}
    if not isinstance(tokenizer, BytePairs):
        return {}
    try:
        tokens = tokenizer.tokens
    except UserError:
        return {}
    names = [END_OF_TEXT if i == tokenizer.eot else _printed(token) for i, token in enumerate(tokens)]
    settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return {
        IDS: json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False).encode(),
        MERGES: "\n".join(["#version: 0.2", *_lines(tokens), ""]).encode(),
        SETTINGS: json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer", "model_max_length": max_seq}).encode(),
    }


def begin_and_end(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The ids that stand before and after a text: one for both, unless the tokenizer knows another that ends texts."""
    begin = tokenizer.eot
    if begin is None or not isinstance(tokenizer, HuggingFace):
        return begin, begin
    return begin, next((tokenizer.special[name] for name in AFTER_TEXT if name in tokenizer.special), begin)


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
