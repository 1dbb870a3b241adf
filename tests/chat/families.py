"""Tokenizers with the pipelines of model families, trained here on a little text: no published file is part of the project."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, naïve Übermut!\n\n\tdef f(x):\n    return x",
    "user assistant system model Hello there, how are you today? I am fine. 你好，世界 🙂 é ü ß <b>bold</b>",
] * 20
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "llama2": ["<unk>", "<s>", "</s>"],
    "gpt_neox": ["<|endoftext|>", "<|padding|>"],
    "phi3": ["<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"],
    "smollm3": ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
    "cl100k": ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
    "starcoder": ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
}
BEGIN = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "llama2": "<s>"}
END = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<eos>", "llama2": "</s>", "gpt_neox": "<|endoftext|>"}
END |= {"phi3": "<|endoftext|>", "smollm3": "<|im_end|>", "cl100k": "<|endoftext|>", "starcoder": "<|end_of_text|>"}
THINK = ["<think>", "</think>"]
ORDINARY = {"qwen": [*THINK, "<tool_call>", "</tool_call>"], "gemma": ["\n\n"], "smollm3": THINK}  # added, and not special
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def fast_tokenizer(family: str) -> Tokenizer:
    """A tokenizer of some 600 ids."""
    sentence_pieces = family in ("gemma", "llama2", "phi3")
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True) if sentence_pieces else models.BPE()
    made = Tokenizer(model)
    first = []
    if sentence_pieces:
        prefix = [] if family == "gemma" else [normalizers.Prepend("▁")]
        made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        strip = [] if family == "gemma" else [decoders.Strip(" ", 1, 0)]
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        made.decoder = decoders.Sequence(parts)
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no piece goes over white space
        first = ["<unk>", *BYTES]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False, max_token_length=12)
    else:
        if family in ("qwen", "gpt_neox"):
            made.normalizer = normalizers.NFC()
        by_gpt2 = family in ("gpt_neox", "starcoder")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)
        numbers = r"\p{N}" if family == "qwen" else r"\p{N}{1,3}"
        cut = [] if by_gpt2 else [pre_tokenizers.Split(Regex(WORDS % numbers), "isolated")]
        cut = [pre_tokenizers.Digits(individual_digits=True)] if family == "starcoder" else cut
        made.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    lines = family in ("llama2", "phi3")  # whose line feed is a byte, <0x0A>
    made.train_from_iterator([text.replace("\n", " ") if lines else text for text in TEXT], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    made = Tokenizer.from_str(json.dumps(content))
    if sentence_pieces:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if family == "gemma" else None  # pyright: ignore
    rstrip = family == "phi3"
    made.add_special_tokens([AddedToken(name, normalized=False, rstrip=rstrip) for name in SPECIAL[family]])
    made.add_tokens([AddedToken(name, normalized=False) for name in ORDINARY.get(family, [])])
    if name := BEGIN.get(family):
        pair = (name, made.token_to_id(name))
        made.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A {name} $B:1", special_tokens=[pair]
        )
    return made


def folder(path: Path, family: str, *, template: str = "") -> Path:
    """What lies beside a model of the family."""
    path.mkdir(exist_ok=True)
    made = fast_tokenizer(family)
    made.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END[family]}
    settings |= {"bos_token": BEGIN[family]} if family in BEGIN else {"bos_token": "<s>"} if family == "phi3" else {}
    settings |= {"clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (path / "chat_template.jinja").write_text(template)
    return path
