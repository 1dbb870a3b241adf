"""Vocabularies as Hugging Face's GPT2Tokenizer has them: vocab.json (ids) and merges.txt (pairs), in printable characters.

Newer versions write both into one tokenizer.json, which counts where it is there. Any but GPT-2's kind is kept as that file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from barellm.chat import conventions
from barellm.data.bpe import BytePairs, printable_bytes
from barellm.data.gpt2 import HASH, VOCAB, Gpt2
from barellm.data.huggingface import HuggingFace
from barellm.data.kinds import fitting
from barellm.data.tokenizers import END_OF_TEXT, Tokenizer, vocabulary_hash
from barellm.errors import UserError
from barellm.jsontext import loads

UNREAD = ("tokenizer.model", "spiece.model", "tekken.json")  # SentencePiece's, Mistral's
IDS, MERGES, WHOLE, SETTINGS = "vocab.json", "merges.txt", "tokenizer.json", conventions.SETTINGS


def read(folder: Path, rows: int) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, with its chat conventions: of tokenizer.json, else of vocab.json and merges.txt; if
    there is none, GPT-2's for a model with as many `rows` of the embedding, else None. UserError for damaged or other files."""
    if (folder / WHOLE).is_file():
        path = folder / WHOLE
    elif (folder / IDS).is_file() and (folder / MERGES).is_file():
        path = folder / IDS
    else:
        if found := [name for name in UNREAD if (folder / name).is_file()]:
            raise UserError(
                f"{folder} has {found[0]}, and what is read is {WHOLE}, which transformers below 5 makes (5 writes other ids): "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) behind pip install 'transformers<5' sentencepiece "
                f"protobuf; or name another with --tokenizer"
            )
        return Gpt2().with_files(conventions.collect(folder), rows=rows) if rows == VOCAB else None
    files = conventions.collect(folder)
    try:
        tokenizer = _of_ids(path, *_of_two_files(folder)) if path.name == IDS else of_one_file(path, path.read_bytes(), files)
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError):
        kind = f"BPE of bytes with {END_OF_TEXT}" if path.name == IDS else "tokenizer that the library tokenizers wrote"
        raise UserError(f"{path} is not a {kind}") from None
    return fitting(tokenizer.with_files(files), rows, path)


def _of_ids(path: Path, ids: dict[str, int], merges: list[str]) -> BytePairs:
    """BytePairs from vocab.json's ids and merges.txt's merges (one special token). UserError if they disagree."""
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


def of_one_file(path: Path, content: bytes, files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of a tokenizer.json. If it equals GPT-2's kind on every text and has no chat template, it becomes a
    `BytePairs`, so that shards of GPT-2's ids fit it."""
    parsed = loads(content)
    general = HuggingFace(content, path=path)
    pre_tokenizer = parsed["pre_tokenizer"] or {}
    as_gpt2 = general.exact and pre_tokenizer["type"] == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    only_eot = [token["content"] for token in parsed["added_tokens"]] == [END_OF_TEXT] == list(general.special)
    if not as_gpt2 or not only_eot or parsed["model"].get("ignore_merges") or general.with_files(files).conventions.templates:
        return general
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in parsed["model"]["merges"]]
    try:
        return _of_ids(path, parsed["model"]["vocab"] | general.special, merges)
    except UserError:  # ids in another order than the merges
        return general


def files(tokenizer: Tokenizer, max_seq: int) -> dict[str, bytes]:
    """{name: content} of tokenizer files for transformers, with the chat files that came with the tokenizer. {} for bytes and
    characters, and for GPT-2's vocabulary if it is not on this machine."""
    if isinstance(tokenizer, HuggingFace):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq}
        texts = tokenizer.conventions
        roles = {"bos_token": texts.begin, "eos_token": texts.end, "pad_token": texts.pad}
        settings |= {purpose: tokenizer.name_of[i] for purpose, i in roles.items() if i in tokenizer.name_of}
        written = {WHOLE: tokenizer.content, SETTINGS: json.dumps(settings).encode()}
    elif isinstance(tokenizer, BytePairs):
        try:
            tokens = tokenizer.tokens
        except UserError:
            return {}
        names = [END_OF_TEXT if i == tokenizer.eot else _printed(token) for i, token in enumerate(tokens)]
        # Without add_bos_token transformers puts nothing before a prompt, and answers it otherwise than the model was trained.
        settings = {"add_bos_token": tokenizer.conventions.begin is not None}
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        written = {
            IDS: json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False).encode(),
            MERGES: "\n".join(["#version: 0.2", *_lines(tokens), ""]).encode(),
            SETTINGS: json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer", "model_max_length": max_seq}).encode(),
        }
    else:
        return {}
    came_with = {name: content for name, content in tokenizer.files.items() if name != conventions.IDS}
    flat, folder = f"{conventions.NAMED}.", f"{conventions.NAMED}/"
    return written | {name.replace(flat, folder): content for name, content in came_with.items()}


def ids_of_config(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json's special token ids: the imported ones, else those that begin and end a text."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    texts = tokenizer.conventions
    if texts.ids:
        return dict(texts.ids)
    ends = sorted(texts.ends - {texts.begin}, key=lambda i: (i != texts.end, i)) or [texts.end]
    # None is written too: without the key transformers takes a default of the family, which may be an id that the model lacks.
    return {"bos_token_id": texts.begin, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": texts.pad}


def _printed(token: bytes) -> str:
    return token.decode("latin-1").translate(_PRINTED)


_PRINTED = {byte: character for character, byte in printable_bytes().items()}


def _lines(tokens: Sequence[bytes]) -> list[str]:
    return [f"{_printed(a)} {_printed(b)}" for a, b in _merges(tokens)]


def _merges(tokens: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each multi-byte token was merged from: what is left of its bytes after applying all merges of lower rank."""
    ranks = {token: i for i, token in enumerate(tokens) if token}
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            merge_ranks = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(range(len(merge_ranks)), key=merge_ranks.__getitem__)
            if merge_ranks[best] >= rank:
                raise UserError(f"the token {token!r} is not made of earlier ones: no order of merges gives it")
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
