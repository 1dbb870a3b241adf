"""llama.cpp's files. The package `gguf` (extra "gguf") knows the layout of the file and llama.cpp's names of tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from barellm import models
from barellm.checkpoint.weights import Weights
from barellm.data.bpe import BytePairs
from barellm.data.huggingface import HuggingFace
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.interop.huggingface import Part, parts
from barellm.program.ops.rope import frequencies

DTYPES = ("fp32", "bf16", "fp16")
ARCHITECTURES = {"gpt2": "GPT2", "llama": "LLAMA"}  # Hugging Face's name -> the package's
SIZES = {  # Hugging Face's key -> the package's function that adds it
    "n_layer": "add_block_count", "n_head": "add_head_count", "n_embd": "add_embedding_length",
    "n_positions": "add_context_length", "num_hidden_layers": "add_block_count", "num_attention_heads": "add_head_count",
    "hidden_size": "add_embedding_length", "intermediate_size": "add_feed_forward_length",
    "max_position_embeddings": "add_context_length", "rms_norm_eps": "add_layer_norm_rms_eps",
    "num_key_value_heads": "add_head_count_kv", "head_dim": "add_rope_dimension_count", "rope_theta": "add_rope_freq_base",
}  # fmt: skip
LLAMA_3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"  # how its rule for words begins
PLAIN, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens


def write(weights: Weights, out: Path, *, dtype: str) -> str | None:
    """The file `out`, which appears when it is whole. Matrices are stored in `dtype`; vectors and positions in fp32. Gives why it
    has no tokenizer, if so. UserError where the package is missing."""
    try:
        gguf: Any = import_module("gguf")
    except ModuleNotFoundError:
        raise UserError("--format gguf needs the package gguf: pip install gguf") from None
    known = models.of(weights.model).HUGGING_FACE
    arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[known.model_type])
    names = gguf.get_tensor_name_map(arch, weights.model.layers)  # pyright: ignore[reportAttributeAccessIssue]
    kinds = gguf.GGMLQuantizationType
    matrices = {"fp32": kinds.F32, "bf16": kinds.BF16, "fp16": kinds.F16}[dtype]

    def kind_of(name: str, part: Part) -> Any:
        return matrices if len(part.shape) > 1 and not name.startswith("position_embd") else kinds.F32

    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _sizes(writer, weights, getattr(gguf.LlamaFileType, {"fp32": "ALL_F32"}.get(dtype, f"MOSTLY_{matrices.name}")))
        missing = _tokenizer(writer, weights.tokenizer, weights.model.vocab_size)
        listed = [(_name(names, known, part), part) for part in parts(known, weights.model, weights.tensors)]
        for name, part in listed:
            kind = kind_of(name, part)
            shape = part.shape[::-1] if part.transposed else part.shape
            size = 4 if kind == kinds.F32 else 2
            # The package takes 16-bit numbers of its own kinds as bytes, of which a row has two for each.
            stored = (shape[0], shape[1] * 2) if kind == kinds.BF16 else shape
            numpy_kind = {kinds.F32: np.float32, kinds.F16: np.float16}.get(kind, np.uint8)
            writer.add_tensor_info(name, stored, np.dtype(numpy_kind), int(np.prod(shape)) * size, raw_dtype=kind)
        stretch = _stretch(weights)
        if stretch is not None:
            writer.add_tensor_info("rope_freqs.weight", stretch.shape, stretch.dtype, stretch.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, part in listed:
            writer.write_tensor_data(gguf.quants.quantize(_array(weights, part), kind_of(name, part)))
        if stretch is not None:
            writer.write_tensor_data(stretch)
        writer.close()
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return missing


def _name(names: Any, known: Any, part: Part) -> str:
    theirs = part.name if part.name == known.head else known.prefix + part.name
    found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert found is not None, theirs
    return found


def _array(weights: Weights, part: Part) -> np.ndarray:
    """(out, in) as fp32. Rows of a Llama's queries and keys lie there in pairs that RoPE turns together."""
    rows = part.shape[-1] if part.transposed else part.shape[0]
    array = weights.read_rows(part.ours, part.first, part.first + rows)
    if part.name.endswith(("q_proj.weight", "k_proj.weight")):
        D = weights.model.head_size  # pyright: ignore[reportAttributeAccessIssue]
        array = array.reshape(-1, 2, D // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return array


def _stretch(weights: Weights) -> np.ndarray | None:
    """By what llama.cpp divides each of RoPE's frequencies, where they are stretched."""
    model: Any = weights.model
    if getattr(model, "scaling", None) is None:
        return None
    plain, scaled = (frequencies(model.head_size, theta=model.rope_theta, scaling=s) for s in (None, model.scaling))
    return (plain / scaled).astype(np.float32)


def _sizes(writer: Any, weights: Weights, kind: Any) -> None:
    model = weights.model
    known = models.of(model).HUGGING_FACE
    config = {key: getattr(model, name) for key, (name, _) in known.sizes.items()} | known.written(model)
    for key, add in SIZES.items():
        if key in config:
            getattr(writer, add)(config[key])
    if known.model_type == "gpt2":
        writer.add_feed_forward_length(4 * model.channels)
        writer.add_layer_norm_eps(known.kinds["layer_norm_epsilon"][0])
    writer.add_vocab_size(model.vocab_size)
    writer.add_file_type(kind)
    writer.add_name(weights.path.name)


# --- the tokenizer ---


def _tokenizer(writer: Any, tokenizer: Tokenizer | None, vocab: int) -> str | None:
    """Write the vocabulary. Where llama.cpp cannot cut a text as the tokenizer does, the file has none; gives the reason."""
    known = (
        "nothing says which"
        if tokenizer is None
        else None
        if isinstance(tokenizer, BytePairs | HuggingFace)
        else f"llama.cpp has none of kind {tokenizer.name}"
    )
    try:
        found = None if known or tokenizer is None else _of(tokenizer)
    except UserError as error:
        known, found = str(error), None
    if found is None or tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return known
    rule, tokens, kinds, merges = found
    pad = vocab - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(pad)])
    writer.add_token_types(kinds + [UNUSED] * pad)
    writer.add_token_merges(merges)
    begin, end = vocabulary.begin_and_end(tokenizer)
    if begin is not None and end is not None:
        writer.add_bos_token_id(begin)
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    return None


def _of(tokenizer: Tokenizer) -> tuple[str, list[str], list[int], list[str]]:
    """llama.cpp's name of the rule that cuts words, printable tokens, their kinds, and the pairs in the order of their merges."""
    if isinstance(tokenizer, BytePairs):
        files = vocabulary.files(tokenizer, 1)
        if not files:
            raise UserError("GPT-2's vocabulary is not on this machine")
        ids = json.loads(files[vocabulary.IDS])
        kinds = [CONTROL if i == tokenizer.eot else PLAIN for i in range(len(ids))]
        return "gpt-2", sorted(ids, key=ids.__getitem__), kinds, files[vocabulary.MERGES].decode().splitlines()[1:]
    assert isinstance(tokenizer, HuggingFace)
    content = json.loads(tokenizer.content)
    rules = list(_rules(content["pre_tokenizer"]))
    if len(rules) == 1 and rules[0].startswith(LLAMA_3_WORDS):
        rule = "llama-bpe"
    elif not rules:
        rule = "gpt-2"
    else:
        raise UserError("its rule for words is neither GPT-2's nor Llama-3's")
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    name_of = {i: name for name, i in ids.items()}
    special = set(tokenizer.special.values())
    numbers = range(tokenizer.vocab_size)
    kinds = [UNUSED if i not in name_of else CONTROL if i in special else PLAIN for i in numbers]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return rule, [name_of.get(i, f"[UNUSED{i}]") for i in numbers], kinds, merges


def _rules(step: dict[str, Any]) -> Iterator[str]:
    """The regular expressions by which a tokenizer cuts words, GPT-2's own left out."""
    for part in step.get("pretokenizers", [step]):
        if part["type"] == "Split":
            yield part["pattern"].get("Regex", "")
        elif part["type"] != "ByteLevel":
            yield part["type"]
