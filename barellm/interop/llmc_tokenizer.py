"""llm.c's tokenizer file, with which its programs print text: a header of 256 int32, then of each id its length in a byte and its
bytes. Version 2 says which id ends a text; version 1 is GPT-2's."""

from pathlib import Path

import numpy as np

from barellm.data import cache
from barellm.data.bpe import BytePairs
from barellm.data.gpt2 import EOT, HASH, Gpt2
from barellm.data.tokenizers import Tokenizer, vocabulary_hash
from barellm.errors import UserError

MAGIC, HEADER = 20240328, 1024
END_OF_TEXT = b"<|endoftext|>"


def read(path: Path) -> BytePairs:
    """The tokenizer of a file: GPT-2's, or a byte-level BPE with ids in merge order. UserError for any other."""
    with cache.reading(path):
        content = path.read_bytes()
    magic, version, count, eot = np.frombuffer(content[:16].ljust(16, b"\0"), "<i4").tolist()
    if magic != MAGIC or version not in (1, 2):
        raise UserError(f"{path} begins with [{magic}, {version}], expected [{MAGIC}, 2], a tokenizer of llm.c")
    eot = EOT if version == 1 else eot
    tokens, offset = [], HEADER
    while offset < len(content):
        tokens.append(content[offset + 1 : offset + 1 + content[offset]])
        offset += 1 + content[offset]
    if offset != max(len(content), HEADER) or len(tokens) != count or not 0 <= eot < count:
        raise UserError(f"{path} has {len(tokens)} tokens, expected {count} whole ones by its header")
    tokens[eot] = b""
    if vocabulary_hash(Gpt2.name, eot, tokens) == HASH:
        return Gpt2(tokens)
    if {token for token in tokens if len(token) == 1} != {bytes([i]) for i in range(256)} or tokens.count(b"") != 1:
        raise UserError(f"{path} is not a BPE of bytes: it lacks some of the 256 bytes, or has empty tokens")
    return BytePairs(tokens, eot=eot)


def content(tokenizer: Tokenizer | None) -> bytes:
    """The bytes of a tokenizer file. UserError for a vocabulary that the format cannot hold."""
    if tokenizer is None or tokenizer.eot is None:
        raise UserError("llm.c's tokenizers have an end of text, expected gpt2, a bpe or a tokenizer.json that has one")
    # llm.c reads no token without bytes, so special ids have their names, and ids that nobody has a word that says so.
    names = {i: name.encode() for name, i in getattr(tokenizer, "special", {}).items()} | {tokenizer.eot: END_OF_TEXT}
    tokens = [token or names.get(i, f"[UNUSED{i}]".encode()) for i, token in enumerate(tokenizer.tokens)]
    longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
    if len(tokens[longest]) > 255:
        raise UserError(f"token {longest} has {len(tokens[longest])} bytes, llm.c's tokenizers have up to 255")
    header = np.zeros(HEADER // 4, "<i4")
    header[:4] = [MAGIC, 2, len(tokens), tokenizer.eot]
    return header.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens)
