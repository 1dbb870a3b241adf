"""tokenizer.json files in the form of Llama-3's, which is not part of the project."""

from __future__ import annotations

import json
from itertools import islice, product
from string import ascii_letters

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel

# The rule of Llama-3, as Meta published it.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(6))]


def llama_json(text: str, *, vocab: int) -> bytes:
    """`vocab` ids that are trained on a text, then 8 special ones."""
    library = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([text], trainer)
    assert library.get_vocab_size() == vocab, "a longer text"
    return _finished(library)


def large_llama_json() -> bytes:
    """128,000 ids, bytes, pairs and triples of letters, then 8 special ones: as large as Llama-3's, made in a second."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(ascii_letters, repeat=2))
    triples = [(a + b, c) for a, b in pairs for c in ascii_letters]
    merges = list(islice([*pairs, *triples], 128_000 - len(names)))
    ids = {name: i for i, name in enumerate([*names, *("".join(pair) for pair in merges)])}
    library = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return _finished(library)


def _finished(library: Tokenizer) -> bytes:
    library.decoder = ByteLevel()
    library.add_special_tokens(SPECIAL)
    begin = ("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))
    single = f"{begin[0]} $A"
    template = processors.TemplateProcessing(single=single, pair=f"{single} {begin[0]} $B:1", special_tokens=[begin])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return json.dumps(json.loads(library.to_str()), ensure_ascii=False).encode()
