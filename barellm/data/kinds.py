"""Which tokenizers there are: made by name, trained on a text, loaded from a folder."""

import base64
import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from barellm.chat import conventions
from barellm.data import bpe, cache, gpt2, huggingface
from barellm.data.tokenizers import FILE, FORMAT, Bytes, Chars, Ids, Tokenizer
from barellm.errors import UserError, nearest
from barellm.jsontext import loads

KINDS = ("bytes", "chars", "bpe", "gpt2")


def check_kind(name: str) -> None:
    """Raise a UserError that suggests the nearest name unless `name` is a kind of tokenizer or a folder that holds one."""
    if name in KINDS or (name and (Path(name) / FILE).is_file()):
        return
    known = f"known: {', '.join(KINDS)}, or a folder with {FILE}"
    raise UserError(f"unknown tokenizer {name!r}{nearest(name, KINDS)} ({known})")


def make_tokenizer(name: str, texts: Callable[[], Iterable[str]], *, train: Callable[[], Iterable[str]] | None = None,
                   bpe_vocab: int = 2048, key: str | None = None) -> Tokenizer:  # fmt: skip
    """Make the tokenizer of a kind (KINDS), or load it from the folder `name`. `texts()` iterates over the whole text, from which
    "chars" takes its vocabulary; `train()` over the part that BPE is trained on (default: all); `key` identifies that part in the
    cache of trained BPEs (None: not cached)."""
    check_kind(name)
    if name == "bytes":
        return Bytes()
    if name == "chars":
        characters: set[str] = set()
        for text in texts():  # one after the other: the whole text need not fit into memory
            characters.update(text)
        return Chars(characters)
    if name == "gpt2":
        return gpt2.Gpt2()
    if name == "bpe":
        return cached_bpe(train or texts, vocab=bpe_vocab, key=key)
    return load_tokenizer(Path(name))


def cached_bpe(texts: Callable[[], Iterable[str]], *, vocab: int, key: str | None) -> bpe.BytePairs:
    """A BPE tokenizer of `vocab` ids trained on texts(), cached on disk under `key`; None trains each time."""
    if key is None:
        return bpe.trained_bpe(texts, vocab=vocab)
    folder = cache.cache_folder("tokenizers")
    target = folder / hashlib.sha256(f"bpe {FORMAT} {vocab} {key}".encode()).hexdigest()[:32]
    try:
        cached = load_tokenizer(target)
        assert isinstance(cached, bpe.BytePairs)
        return cached
    except UserError:
        pass  # not there, or damaged: then it is replaced
    cache.sweep(folder)
    tokenizer = bpe.trained_bpe(texts, vocab=vocab)
    try:
        with cache.new_folder(target) as temporary:
            tokenizer.save(temporary)
    except FileExistsError:  # another process was first, or a damaged one lies there: overwrite it
        tokenizer.save(target)
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """{name: content} of what `save` writes."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save(Path(name))
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def load_tokenizer(folder: Path, *, rows: int | None = None) -> Tokenizer:
    """Load a tokenizer that `save` or the library `tokenizers` wrote, with the chat conventions beside it. `rows`: embedding rows
    of its model (None: unknown). UserError if it is missing, damaged or of a later format."""
    path = Path(folder) / FILE
    return _loaded(path).with_files(conventions.collect(path.parent), rows=rows)


def fitting(tokenizer: Tokenizer, rows: int | None, where: object) -> Tokenizer:
    """The tokenizer bound to a model of `rows` embedding rows, which may exceed its ids (padding) or miss added tokens' ids.
    UserError if the sizes differ so much that it must belong to another model."""
    known = getattr(tokenizer, "base_size", tokenizer.vocab_size)
    if rows is not None and (known > rows or 2 * tokenizer.vocab_size < rows):
        raise UserError(f"tokenizer {where} has {tokenizer.vocab_size} ids, the model {rows}: it is of another model")
    return tokenizer.with_files(tokenizer.files, rows=rows)


def _loaded(path: Path) -> Tokenizer:
    """Parse tokenizer.json: the library `tokenizers` format (key "model") or barellm's own, whose vocabulary hash is verified."""
    try:
        written = path.read_bytes()
        content = loads(written)
        if "format" not in content and "model" in content:
            return huggingface.HuggingFace(written, path=path)
        if content["format"] != FORMAT:
            raise UserError(f"{path} has format {content['format']}, this version reads {FORMAT}")
        kind, stored, eot = content["kind"], content["tokens"], content["eot"]
        tokens = None if stored is None else [base64.b64decode(token) for token in stored]
        tokenizer = Ids(content["count"]) if kind == Ids.name else _restored(kind, tokens, eot)
        if tokenizer.hash != content["hash"]:
            found, recorded = tokenizer.hash[:16], content["hash"][:16]
            raise UserError(f"{path} is damaged: its tokens have hash {found}, recorded is {recorded}")
        return tokenizer
    except OSError as error:
        raise UserError(f"cannot read tokenizer {path}: {error.strerror}") from error
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: not a tokenizer that barellm or the library tokenizers wrote") from error


def _restored(kind: str, tokens: list[bytes] | None, eot: int | None) -> Tokenizer:
    """Rebuild a tokenizer from the stored fields; ValueError for fields that do not belong together."""
    if kind == "bytes":
        return Bytes()
    if kind == "chars" and tokens:
        return Chars(token.decode() for token in tokens)
    if kind == "gpt2":
        return gpt2.Gpt2(tokens)
    if kind == "bpe" and tokens and type(eot) is int and 0 <= eot < len(tokens) and tokens[eot] == b"":
        return bpe.BytePairs(tokens, eot=eot)
    raise ValueError(kind)
