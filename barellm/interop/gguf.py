"""Writing llama.cpp's files (GGUF) through the package `gguf` (extra "gguf"), which knows their layout and tensor names."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from barellm.checkpoint import storage
from barellm.checkpoint.weights import Weights
from barellm.data.bpe import BytePairs
from barellm.data.huggingface import HuggingFace, steps
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.interop import vocabulary
from barellm.interop.huggingface import Part, hugging_face, parts
from barellm.program.ops.attention.rope import frequencies

DTYPES = ("fp32", "bf16", "fp16")
ARCHITECTURES = {"gpt2": "GPT2", "llama": "LLAMA"}  # Hugging Face's name -> the package's
SIZES = {  # Hugging Face's key -> the file's, behind the architecture
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count", "hidden_size": "embedding_length",
    "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "head_dim": "attention.key_length", "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa", "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "n_layer": "block_count", "n_head": "attention.head_count", "n_embd": "embedding_length", "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
LLAMA_3_WORDS = (  # its rule for words, as Meta published it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN, CONTROL, ADDED, UNUSED = 1, 3, 4, 5  # kinds of tokens


def package(needs: str = "--format gguf needs") -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError:
        raise UserError(f"{needs} the package gguf: pip install gguf") from None


def refused(model: Any) -> str | None:
    """Why a model cannot be written as GGUF; None if it can."""
    kind = hugging_face(model).model_type
    if kind not in ARCHITECTURES:
        return f"model.family is {kind!r}, --format gguf has {' and '.join(ARCHITECTURES)}: export it as huggingface"
    plain = {"attention_bias": "none", "mlp_bias": False, "head_dim": 0, "activation": "silu"} if kind == "llama" else {}
    for name, one in plain.items():
        if getattr(model, name) != one:
            return f"model.{name} is {getattr(model, name)!r}, --format gguf has {one!r}: export it as huggingface"
    if kind == "llama" and model.rope_factor and model.rope_type not in ("llama3", "linear"):
        return f"model.rope_type is {model.rope_type!r}, --format gguf has llama3 and linear: export it as huggingface"
    return None


def write(weights: Weights, out: Path, *, dtype: str, name: str, licence: str | None) -> str | None:
    """Write the GGUF file `out` (it appears only when complete), with the model's name and licence. Matrices are stored in `dtype`,
    vectors and position embeddings in fp32. Returns why it has no tokenizer, or None. UserError if the package is missing."""
    gguf = package()
    known = hugging_face(weights.model)
    arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[known.model_type])
    names = gguf.get_tensor_name_map(arch, weights.model.layers)  # pyright: ignore[reportAttributeAccessIssue]
    kinds = gguf.GGMLQuantizationType
    matrices = {"fp32": kinds.F32, "bf16": kinds.BF16, "fp16": kinds.F16}[dtype]

    def kind_of(tensor: str, part: Part) -> Any:
        return matrices if len(part.shape) > 1 and not tensor.startswith("position_embd") else kinds.F32

    with storage.new_path(out) as temporary:
        writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[arch])
        writer.add_name(name)
        if licence is not None:
            writer.add_license(licence)
        _sizes(writer, weights, getattr(gguf.LlamaFileType, {"fp32": "ALL_F32"}.get(dtype, f"MOSTLY_{matrices.name}")))
        missing = _tokenizer(writer, weights.tokenizer, weights.model.vocab_size)
        listed = [(name_of(names, known, part), part) for part in parts(known, weights.model, weights.tensors)]
        for tensor, part in listed:
            kind = kind_of(tensor, part)
            shape = part.shape[::-1] if part.transposed else part.shape
            size = 4 if kind == kinds.F32 else 2
            # The package takes 16-bit numbers of its own kinds as bytes, of which a row has two for each.
            stored = (shape[0], shape[1] * 2) if kind == kinds.BF16 else shape
            numpy_kind = {kinds.F32: np.float32, kinds.F16: np.float16}.get(kind, np.uint8)
            writer.add_tensor_info(tensor, stored, np.dtype(numpy_kind), int(np.prod(shape)) * size, raw_dtype=kind)
        stretch = _stretch(weights)
        if stretch is not None:
            writer.add_tensor_info("rope_freqs.weight", stretch.shape, stretch.dtype, stretch.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, part in listed:
            writer.write_tensor_data(gguf.quants.quantize(_array(weights, part), kind_of(tensor, part)))
        if stretch is not None:
            writer.write_tensor_data(stretch)
        writer.close()
        with temporary.open("rb") as file:
            storage.sync(file.fileno())
    return missing


def name_of(names: Any, known: Any, part: Part) -> str:
    """llama.cpp's name of a tensor, by the package's table `names`."""
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
    """Write the model's hyperparameters under llama.cpp's keys."""
    model = weights.model
    known = hugging_face(model)
    config = {**{key: getattr(model, name) for key, (name, _) in known.sizes.items()}, **known.written(model)}
    if known.model_type == "gpt2":
        writer.add_feed_forward_length(4 * model.d_model)
        config["layer_norm_epsilon"] = known.kinds["layer_norm_epsilon"][0]
    else:
        writer.add_rope_dimension_count(config["head_dim"])
    for key, name in SIZES.items():
        if key in config:
            add = writer.add_float32 if isinstance(config[key], float) else writer.add_uint32
            add(f"{writer.arch}.{name}", config[key])
    writer.add_vocab_size(model.vocab_size)
    writer.add_file_type(kind)


# --- the tokenizer ---


def _tokenizer(writer: Any, tokenizer: Tokenizer | None, vocab: int) -> str | None:
    """Write the vocabulary and chat template, and return None; or none and why, if llama.cpp would split text differently."""
    unsupported = "nothing says which" if tokenizer is None else f"llama.cpp has none of kind {tokenizer.name}"
    reason = None if isinstance(tokenizer, BytePairs | HuggingFace) else unsupported
    try:
        content = None if reason or tokenizer is None else _of(tokenizer)
    except UserError as error:
        reason, content = str(error), None
    if content is None or tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return reason
    rule, tokens, kinds, merges = content
    # Ids beyond the embedding's rows are dropped, missing ones are padded
    tokens, kinds = tokens[:vocab], kinds[:vocab]
    pad = vocab - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(pad)])
    writer.add_token_types(kinds + [UNUSED] * pad)
    writer.add_token_merges(merges)
    ids, texts = vocabulary.ids_of_config(tokenizer), tokenizer.conventions
    begin = next((i for i in (texts.begin, ids.get("bos_token_id")) if isinstance(i, int)), None)
    for i, add in ((begin, writer.add_bos_token_id), (texts.end, writer.add_eos_token_id), (texts.pad, writer.add_pad_token_id)):
        if i is not None:
            add(i)
    writer.add_add_bos_token(isinstance(tokenizer, HuggingFace) and texts.begin is not None)
    if texts.templates:
        several = [{"name": name, "template": text} for name, text in texts.templates.items()]
        writer.add_chat_template(several if len(several) > 1 else several[0]["template"])
    return None


def _of(tokenizer: Tokenizer) -> tuple[str, list[str], list[int], list[str]]:
    """(llama.cpp's name of the pre-tokenizer, printable tokens, their kinds, merges in order) of a byte-level BPE."""
    if isinstance(tokenizer, BytePairs):
        files = vocabulary.files(tokenizer, 1)
        if not files:
            raise UserError("GPT-2's vocabulary is not on this machine")
        ids = json.loads(files[vocabulary.IDS])
        kinds = [CONTROL if i == tokenizer.eot else PLAIN for i in range(len(ids))]
        return "gpt-2", sorted(ids, key=ids.__getitem__), kinds, files[vocabulary.MERGES].decode().split("\n")[1:-1]
    assert isinstance(tokenizer, HuggingFace)
    content = json.loads(tokenizer.content)
    if tokenizer.changes:
        raise UserError(f"llama.cpp would read another text from it: {tokenizer.changes}")
    rule = _rule(steps(content["pre_tokenizer"], "pretokenizers"))
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    name_of = {i: name for name, i in ids.items()}
    numbers = range(tokenizer.vocab_size)
    kind_of = dict.fromkeys(name_of, PLAIN) | {token["id"]: ADDED for token in content["added_tokens"]}
    kind_of |= dict.fromkeys(tokenizer.special.values(), CONTROL)
    kinds = [kind_of.get(i, UNUSED) for i in numbers]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return rule, [name_of.get(i, f"[UNUSED{i}]") for i in numbers], kinds, merges


def _rule(words: list[dict[str, Any]]) -> str:
    """llama.cpp's name of the pre-tokenizer that a tokenizer's steps describe. UserError unless it matches exactly: a similar one
    would give some texts other ids."""
    split, ends = words[:-1], words[-1]
    if ends["type"] == "ByteLevel":
        of_gpt2 = ends.get("use_regex", True)
        if not split and of_gpt2:
            return "gpt-2"
        at_words = {"type": "Split", "pattern": {"Regex": LLAMA_3_WORDS}, "behavior": "Isolated", "invert": False}
        if split == [at_words] and not of_gpt2:
            return "llama-bpe"
    raise UserError("its rule for words is neither GPT-2's nor Llama-3's")
