"""Writing llama.cpp's files (GGUF) through the package `gguf`."""

import json
import re
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from barellm.checkpoint import storage
from barellm.checkpoint.weights import Weights, parameters
from barellm.config.fields import entries
from barellm.data.bpe import BytePairs
from barellm.data.huggingface import HuggingFace, changes, steps
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.interop import gguf, gguf_reader, vocabulary
from barellm.interop.gguf import ADDED, ARCHITECTURES, BYTE, CONTROL, PLAIN, UNKNOWN, UNUSED
from barellm.interop.gguf_tokenizer import SPACE, pairs_by_score
from barellm.interop.huggingface import Part, hugging_face, model_of, parts
from barellm.program.ops.attention.rope import frequencies

DTYPES = ("fp32", "bf16", "fp16")
BIASED = ("gpt2", "llama", "mistral", "qwen2", "granite", "stablelm", "gpt_neox")  # whose matrices may have biases there
WINDOWED = ("gemma2", "gemma3_text")  # of which llama.cpp's code has sliding windows; it ignores those of others
NEVER = -1e9  # score of a piece that no pair makes


def refused(model: Any) -> str | None:
    """Why a model cannot be written as GGUF; None if it can. llama.cpp has much of an architecture in its code, where no file says
    it; so what a file would say is read back, and a model that comes back as another one is refused."""
    known = hugging_face(model)
    if known.model_type not in ARCHITECTURES:
        return f"model.family is {known.model_type!r}, --format gguf has {', '.join(ARCHITECTURES)}: export it as huggingface"
    arch = ARCHITECTURES[known.model_type]
    said, tensors = _contents(model, arch)
    names, zero = _names(arch, model), np.float32(0)
    for part in parts(known, model, parameters(model)):
        tensors[gguf.name_of(names, known, part)] = np.broadcast_to(zero, part.shape)  # a shape without memory
    if known.tied(model):
        tensors.pop("output.weight", None)
    biased = [name for name in tensors if name.startswith("blk.0.") and name.endswith(".bias") and "norm" not in name]
    if biased and known.model_type not in BIASED:
        return f"it has {biased[0]}, of which llama.cpp's code for {arch} knows nothing: export it as huggingface"
    if known.model_type == "gpt_neox" and "blk.0.attn_qkv.bias" not in biased:
        return "model.attention_bias is 'none', llama.cpp's code for gptneox has 'all': export it as huggingface"
    if known.model_type not in WINDOWED and any(0 < w < model.max_seq for w in _windows(model)):
        return f"model.sliding_window is {model.sliding_window}, llama.cpp's code for {arch} has none: export it as huggingface"
    head = gguf_reader.Header(Path("GGUF"), np.empty(0), {"general.architecture": arch, **said})
    try:
        again = model_of(head.path, gguf_reader.config_of(head, tensors))
    except UserError as error:
        return str(error)
    theirs = meanings(again)
    for name, ours in meanings(model).items():
        equal = isclose(ours, theirs[name], rel_tol=1e-6) if isinstance(ours, float) else ours == theirs[name]
        if not equal:
            return f"model.{name} is {ours!r}, a file of llama.cpp's {arch} would mean {theirs[name]!r}: export it as huggingface"
    return None


def _names(arch: str, model: Any) -> Any:
    """The package's table of tensor names of an architecture."""
    library = gguf.package()
    kind = next(kind for kind, name in library.MODEL_ARCH_NAMES.items() if name == arch)
    return library.get_tensor_name_map(kind, model.layers)


def _windows(model: Any) -> list[int]:
    """The sliding window of each layer; 0: none, or one that is no shorter than any text."""
    each = [model.window_of(i) for i in range(model.layers)] if hasattr(model, "window_of") else []
    return [w if w < model.max_seq else 0 for w in each]


def meanings(model: Any) -> dict[str, Any]:
    """The fields of a configuration that decide what it computes, those whose default depends on others as what they mean."""
    known = entries(type(model))
    found = {name: getattr(model, name) for name in known if not known[name].of_run and name not in ("family", "padded_vocab")}
    if "head_dim" not in found:
        return found
    windows = str(_windows(model))
    found |= {"head_dim": model.head_size, "sliding_window": windows, "window_layers": windows}
    found |= {"attention_multiplier": model.attention_multiplier or model.head_size**-0.5}
    return found | {"rope_attention_factor": model.scaling.multiplier if model.scaling else 1.0}


def write(weights: Weights, out: Path, *, dtype: str, name: str, licence: str | None) -> str | None:
    """Write the GGUF file `out` (it appears only when complete), with the model's name and licence. Matrices are stored in `dtype`,
    vectors and position embeddings in fp32. Returns what to tell of its tokenizer, or None. UserError without the package."""
    library = gguf.package()
    known = hugging_face(weights.model)
    arch = ARCHITECTURES[known.model_type]
    names = _names(arch, weights.model)
    said, tensors = _contents(weights.model, arch)
    kinds = library.GGMLQuantizationType
    matrices = {"fp32": kinds.F32, "bf16": kinds.BF16, "fp16": kinds.F16}[dtype]

    def kind_of(tensor: str, part: Part) -> Any:
        return matrices if len(part.shape) > 1 and not tensor.startswith("position_embd") else kinds.F32

    with storage.new_path(out) as temporary:
        writer = library.GGUFWriter(temporary, arch)
        writer.add_name(name)
        if licence is not None:
            writer.add_license(licence)
        for key, value in said.items():
            kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
            writer.add_key_value(key, value, library.GGUFValueType[kind])
        writer.add_file_type(getattr(library.LlamaFileType, {"fp32": "ALL_F32"}.get(dtype, f"MOSTLY_{matrices.name}")))
        missing = _tokenizer(writer, weights.tokenizer, weights.model.vocab_size)
        listed = [(gguf.name_of(names, known, part), part) for part in parts(known, weights.model, weights.tensors)]
        for tensor, part in listed:
            kind = kind_of(tensor, part)
            shape = part.shape[::-1] if part.transposed else part.shape
            size = 4 if kind == kinds.F32 else 2
            # The package takes 16-bit numbers of its own kinds as bytes, of which a row has two for each.
            stored = (shape[0], shape[1] * 2) if kind == kinds.BF16 else shape
            numpy_kind = {kinds.F32: np.float32, kinds.F16: np.float16}.get(kind, np.uint8)
            writer.add_tensor_info(tensor, stored, np.dtype(numpy_kind), int(np.prod(shape)) * size, raw_dtype=kind)
        for tensor, array in tensors.items():
            writer.add_tensor_info(tensor, array.shape, array.dtype, array.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, part in listed:
            array = _array(weights, part)
            if arch.startswith("gemma") and "norm" in tensor:
                array = array + 1  # norms multiply by 1 + weight, and llama.cpp's by what is stored
            writer.write_tensor_data(library.quants.quantize(array, kind_of(tensor, part)))
        for array in tensors.values():
            writer.write_tensor_data(array)
        writer.close()
        with temporary.open("rb") as file:
            storage.sync(file.fileno())
    return missing


def _array(weights: Weights, part: Part) -> np.ndarray:
    """(out, in) as fp32, with its rows in the file's order."""
    rows = part.shape[-1] if part.transposed else part.shape[0]
    array = weights.read_rows(part.ours, part.first, part.first + rows)
    for order in (part.order, gguf.row_order(hugging_face(weights.model), weights.model, part.name)):
        if order is not None:
            moved = np.empty_like(array)
            moved[order] = array
            array = moved
    return array


def _contents(model: Any, arch: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a file says of the model by llama.cpp's keys, and the tensors that are no parameters: RoPE's divisors."""
    known = hugging_face(model)
    config = {key: values[0] for key, values in known.kinds.items()}
    config |= {**{key: getattr(model, name) for key, (name, _) in known.sizes.items()}, **known.written(model)}
    said: dict[str, Any] = {"vocab_size": model.vocab_size}
    tensors: dict[str, np.ndarray] = {}
    if known.model_type == "gpt2":
        said |= {"feed_forward_length": 4 * model.d_model}
    else:
        config["head_dim"] = said["attention.value_length"] = model.head_size
        said |= {"rope.dimension_count": model.rotated}
    said |= {name: config[key] for key, name in gguf.SIZES.items() if config.get(key) is not None}
    scaling = getattr(model, "scaling", None)
    if scaling is not None and scaling.kind == "llama3":
        plain, scaled = (frequencies(model.rotated, theta=model.rope_theta, scaling=s) for s in (None, scaling))
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    elif scaling is not None and scaling.kind == "longrope":
        said |= {"rope.scaling.original_context_length": scaling.old_seq, "rope.scaling.attn_factor": scaling.multiplier}
        for name, factors in (("short", scaling.short), ("long", scaling.long)):
            tensors[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    elif scaling is not None:
        said |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
        said |= {"rope.scaling.original_context_length": scaling.old_seq} if scaling.kind == "yarn" else {}
    return {f"{arch}.{name}": value for name, value in said.items()}, tensors


def _tokenizer(writer: Any, tokenizer: Tokenizer | None, vocab: int) -> str | None:
    """Write the vocabulary and chat template; none where llama.cpp would split text differently. `vocab`: rows of the embedding.
    Returns what to tell the user, None: nothing."""
    unsupported = "nothing says which" if tokenizer is None else f"llama.cpp has none of kind {tokenizer.name}"
    reason = None if isinstance(tokenizer, BytePairs | HuggingFace) else unsupported
    try:
        content = None if reason or tokenizer is None else _of(tokenizer)
    except UserError as error:
        reason, content = str(error), None
    if content is None or tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return f"without a tokenizer: {reason}"
    # Ids beyond the embedding's rows are dropped, missing ones are padded.
    tokens, kinds = content["tokens"][:vocab], content["kinds"][:vocab]
    pad = vocab - len(tokens)
    writer.add_tokenizer_model("llama" if "scores" in content else "gpt2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(pad)])
    writer.add_token_types(kinds + [UNUSED] * pad)
    if "scores" in content:
        writer.add_token_scores(content["scores"][:vocab] + [NEVER] * pad)
        writer.add_add_space_prefix(content["prefix"])
    else:
        writer.add_tokenizer_pre(content["rule"])
        writer.add_token_merges(content["merges"])
    ids, texts = vocabulary.ids_of_config(tokenizer), tokenizer.conventions
    begin = next((i for i in (texts.begin, ids.get("bos_token_id")) if isinstance(i, int)), None)
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else None
    numbers = (begin, writer.add_bos_token_id), (texts.end, writer.add_eos_token_id), (texts.pad, writer.add_pad_token_id)
    for i, add in (*numbers, (unknown, writer.add_unk_token_id)):
        if i is not None:
            add(i)
    writer.add_add_bos_token(texts.begin is not None)
    if texts.templates:
        several = [{"name": name, "template": text} for name, text in texts.templates.items()]
        writer.add_chat_template(several if len(several) > 1 else several[0]["template"])
    return "llama.cpp reads a text as it is, this tokenizer in Unicode's form NFC" if content.get("nfc") else None


def _of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Printable `tokens` and their `kinds`. Of a byte-level BPE llama.cpp's name of the `rule` for words, the `merges`, whether it
    reads text as `nfc`; of pieces with byte fallback (SentencePiece) their `scores`, and whether a `prefix` space is added."""
    if isinstance(tokenizer, BytePairs):
        return _of_gpt2(tokenizer)
    assert isinstance(tokenizer, HuggingFace)
    content = json.loads(tokenizer.content)
    model, added = content["model"], content["added_tokens"]
    words = steps(content.get("pre_tokenizer"), "pretokenizers")
    ids = model["vocab"] | {token["content"]: token["id"] for token in added}
    name_of = {i: name for name, i in ids.items()}
    # Later kinds win: a special token is an added one too.
    kind_of = dict.fromkeys(name_of, PLAIN)
    kind_of |= {token["id"]: ADDED for token in added}
    kind_of |= dict.fromkeys(tokenizer.special.values(), CONTROL)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]] if model["type"] == "BPE" else []
    if model.get("byte_fallback") and merges:
        kind_of |= {i: BYTE for i, name in name_of.items() if re.fullmatch("<0x[0-9A-F]{2}>", name)}
        if model.get("unk_token") in ids:
            kind_of[ids[model["unk_token"]]] = UNKNOWN
        found = _piece_scores(ids, merges, steps(content.get("normalizer"), "normalizers"), words)
    else:
        nfc = content.get("normalizer") == {"type": "NFC"}
        if why := changes(content | ({"normalizer": None} if nfc else {})):
            raise UserError(f"llama.cpp would read another text from it: {why}")
        found = {"rule": _rule(words), "merges": merges, "nfc": nfc}
    numbers = range(tokenizer.vocab_size)
    tokens = [name_of.get(i, f"[UNUSED{i}]") for i in numbers]
    return {"tokens": tokens, **found, "kinds": [kind_of.get(i, UNUSED) for i in numbers]}


def _of_gpt2(tokenizer: BytePairs) -> dict[str, Any]:
    """`_of` of GPT-2's vocabulary, whose files are transformers'."""
    files = vocabulary.files(tokenizer, 1)
    if not files:
        raise UserError("GPT-2's vocabulary is not on this machine")
    ids = json.loads(files[vocabulary.IDS])
    kinds = [CONTROL if i == tokenizer.eot else PLAIN for i in range(len(ids))]
    merges = files[vocabulary.MERGES].decode().split("\n")[1:-1]
    return {"rule": "gpt-2", "tokens": sorted(ids, key=ids.__getitem__), "kinds": kinds, "merges": merges}


def _piece_scores(ids: dict[str, int], merges: list[str], normal: list[Any], words: list[Any]) -> dict[str, Any]:
    """Return llama.cpp's {"scores", "prefix"} of a SentencePiece-like BPE vocabulary. llama.cpp merges by the score of the piece
    that a pair makes: here the negative rank of the first such pair; `prefix`: whether a space is put before a text. UserError if
    merging by scores would not give the same merges in the same order."""
    prefix = normal[:1] == [{"type": "Prepend", "prepend": SPACE}]
    # Words that are cut at spaces are not cut: no space is left.
    at_spaces = [word for word in words if word["type"] != "Split" or word["pattern"] != {"String": " "}]
    if normal[prefix:] != [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}] or at_spaces:
        raise UserError("its normalizer or its rule for words is not that of llama.cpp's pieces")
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault(pair.replace(" ", ""), i)
    scores = {i: float(-rank[name]) if name in rank else NEVER for name, i in ids.items()}
    if [" ".join(pair) for pair in pairs_by_score(ids, scores)] != merges:
        raise UserError("it merges pieces in another order than llama.cpp, which goes by the scores of what they make")
    return {"scores": [scores.get(i, NEVER) for i in range(max(scores) + 1)], "prefix": prefix}


def _rule(words: list[dict[str, Any]]) -> str:
    """llama.cpp's name of the pre-tokenizer that a tokenizer's steps describe. UserError unless exact: others give other ids."""
    *splits, last = words
    at = {"type": "Split", "behavior": "Isolated", "invert": False}
    rules = {"gpt-2": (True, []), "smollm": (True, [{"type": "Digits", "individual_digits": True}])}
    for name, regex in (("llama-bpe", gguf.LLAMA_3_WORDS), ("qwen2", gguf.QWEN_2_WORDS)):
        rules[name] = (False, [at | {"pattern": {"Regex": regex}}])
    for name, rule in rules.items():
        if last["type"] == "ByteLevel" and (last.get("use_regex", True), splits) == rule:
            return name
    raise UserError("its rule for words is not that of GPT-2, SmolLM, Llama 3 or Qwen 2")
