"""Reading llama.cpp's files (GGUF versions 2 and 3): sizes, tensors of every block type, tokenizer, chat template.

Tensors are dequantized by the package `gguf` (extra "gguf") row by row on demand, so there is never a whole fp32 copy. Its file
reader is not used: it trusts the counts in a file, so a small file could make it allocate all memory. The changes of llama.cpp's
converter are undone: q and k rows permuted into RoPE pairs, norm weights stored as w + 1, GPT-NeoX's order of q, k and v."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from struct import Struct, error
from typing import Any

import numpy as np

from barellm.checkpoint.weights import Weights, parameters
from barellm.data import mapping
from barellm.errors import UserError
from barellm.interop import gguf, gguf_tokenizer, huggingface
from barellm.program.ops.attention.rope import Scaling, frequencies

MAGIC = b"GGUF"
NO_PARAMETER = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight$")

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
_LENGTH = Struct("<Q")


@dataclass
class Header:
    """What a file says before its numbers. `infos`: of each tensor its shape, (out, in), its type, and its place behind `data`."""

    path: Path
    content: np.ndarray
    values: dict[str, Any] = field(default_factory=dict)
    infos: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    data: int = 0

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.values['general.architecture']}.{key}", default)


class _Cursor:
    """Takes values one after the other. ValueError where the file ends before: nothing is made for a count that it cannot hold."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise ValueError(f"it ends at byte {len(self.content)}, within a value that begins at {self.at}")
        self.at += size
        return self.content[self.at - size : self.at].tobytes()

    def number(self, kind: str) -> Any:
        found = np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0]
        return float(str(found)) if kind == "<f4" else found.item()  # 1e-05, as config.json has it, and not 9.99999974e-06

    def string(self) -> str:
        return self.take(_LENGTH.unpack(self.take(8))[0]).decode()

    def value(self, kind: int) -> Any:
        """Parse a value of a GGUF type: string, number, or array of either. Counts are checked against the bytes that are left."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        element_type, count = self.number("<u4"), self.number("<u8")
        if element_type in NUMBERS:
            return np.frombuffer(self.take(count * np.dtype(NUMBERS[element_type]).itemsize), NUMBERS[element_type])
        if element_type != STRING:
            raise ValueError(f"it has an array of type {element_type}, expected numbers or strings")
        if count > (len(self.content) - self.at) // 8:
            raise ValueError(f"it has an array of {count} strings, and {len(self.content) - self.at} bytes are left")
        return [self.string() for _ in range(count)]


def header(path: Path) -> Header:
    """Parse a file's keys and tensor table: `infos` has name -> (shape, type, offset in `data`). UserError: damaged."""
    content = mapping.mapped(path)
    found = Header(path, content)
    cursor = _Cursor(content)
    try:
        if cursor.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = cursor.number("<u4")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3 in little-endian order")
        tensors, keys = cursor.number("<u8"), cursor.number("<u8")
        for _ in range(keys):
            name = cursor.string()
            if name in found.values:
                raise ValueError(f"it has the key {name!r} twice")
            found.values[name] = cursor.value(cursor.number("<u4"))
        for _ in range(tensors):
            name = cursor.string()
            if name in found.infos:
                raise ValueError(f"it has the tensor {name!r} twice")
            shape = tuple(cursor.number("<u8") for _ in range(cursor.number("<u4")))[::-1]  # there the fastest axis is first
            found.infos[name] = shape, cursor.number("<u4"), cursor.number("<u8")
    except (ValueError, KeyError, UnicodeDecodeError, error) as problem:
        what = f"it has a value of type {problem}" if isinstance(problem, KeyError) else problem
        raise UserError(f"{path} is no GGUF file: {what}") from None
    alignment = found.values.get("general.alignment", 32)  # 32: GGUF's default
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise UserError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    found.data = -(-cursor.at // alignment) * alignment
    return found


class Quantized:
    """A tensor (out, in), or a vector, of which rows become fp32 when they are taken. `order`: where each row lies."""

    dtype = np.dtype(np.float32)

    def __init__(self, rows: np.ndarray, shape: tuple[int, ...], dequantize: Callable[[np.ndarray], np.ndarray]) -> None:
        self.rows, self.shape, self.dequantize = rows, shape, dequantize
        self.order: np.ndarray | None = None
        self.shift = 0.0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        taken = self.rows[rows if self.order is None else self.order[rows]]
        if not len(taken):  # which the package takes for a block
            return np.zeros((0, *self.shape[1:]), np.float32)
        found = self.dequantize(np.ascontiguousarray(taken)).reshape(-1, *self.shape[1:])
        return found + np.float32(self.shift) if self.shift else found


def _tensor(package: Any, head: Header, name: str) -> Quantized:
    """A tensor of the file that is dequantized on demand. UserError for an unknown type, or an offset outside the file."""
    shape, kind, offset = head.infos[name]
    try:
        kind = package.GGMLQuantizationType(kind)
        block_elements, block_bytes = package.GGML_QUANT_SIZES[kind]
        package.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(f"{head.path}: {name} is of type {getattr(kind, 'name', kind)}, which is not known here") from None
    width = (shape or (0,))[-1]
    nbytes, begin = prod(shape) // block_elements * block_bytes, head.data + offset
    if not 0 < len(shape) <= 4 or width % block_elements or offset % 32 or not 0 < nbytes <= len(head.content) - begin:
        found = f"{head.path}: {name} is {shape} at byte {begin}"
        raise UserError(f"{found}, which is not within the file of {len(head.content):,} bytes")
    raw = head.content[begin : begin + nbytes]
    rows = shape[0] if not shape[1:] and block_elements == 1 else prod(shape[:-1])  # a vector of blocks is taken whole
    return Quantized(raw.reshape(rows, -1), shape, lambda taken: package.dequantize(taken, kind))


def read(path: Path, *, tokenizer: bool = True) -> Weights:
    """The weights of a GGUF file (all parts of a split one), with its tokenizer if `tokenizer`. UserError if unknown or damaged."""
    package = gguf.package(f"{path} is a GGUF file, which needs")
    try:
        return _read(path, package, tokenizer)
    except (ValueError, TypeError, LookupError, ArithmeticError) as wrong:
        if isinstance(wrong, UserError):
            raise
        raise UserError(f"{path}: a key is of another kind than expected ({type(wrong).__name__}: {str(wrong)[:200]})") from None


def _read(path: Path, package: Any, tokenizer: bool) -> Weights:
    """Read headers of all parts, derive config.json from the keys, and map llama.cpp's tensor names to ours. `path`: the first
    part; `package`: the module gguf; `tokenizer`: whether to read it too. UserError for a missing part and an unknown model."""
    heads = [header(path)]
    head = heads[0]
    for number in range(2, int(head.values.get("split.count", 1)) + 1):
        part = path.with_name(re.sub(r"-\d{5}-of-", f"-{number:05}-of-", path.name))
        if part == path or not part.is_file():
            parts = f"{head.values['split.count']} parts"
            raise UserError(f"{path} is one of {parts}, expected all in its folder: {part.name} is missing")
        heads.append(header(part))
    architecture = head.values.get("general.architecture")
    if architecture not in gguf.MODEL_TYPES:
        raise UserError(f"{path}: general.architecture is {architecture!r}, expected {' or '.join(map(repr, gguf.MODEL_TYPES))}")
    if head.get("expert_count", 0):
        raise UserError(f"{path}: {architecture}.expert_count is {head.get('expert_count')}, expected a model without experts")
    tensors = {name: _tensor(package, one, name) for one in heads for name in one.infos}
    model = huggingface.model_of(path, config_of(head, tensors))
    known = huggingface.hugging_face(model)
    kinds = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
    names = package.get_tensor_name_map(kinds[architecture], getattr(model, "layers", 0))
    found: dict[str, Any] = {name: t for name, t in tensors.items() if not NO_PARAMETER.match(name)}
    origin = {name: (str(path), name) for name in found}
    for part in huggingface.parts(known, model, parameters(model)):
        gguf_name = gguf.name_of(names, known, part)
        if gguf_name in found:
            t = found[part.name] = found.pop(gguf_name)
            origin[part.name] = origin.pop(gguf_name)
            t.order = gguf.row_order(known, model, part.name)
            t.shift = -1.0 * (architecture.startswith("gemma") and "norm" in gguf_name)
    found, origin = ({known.head if name == "output.weight" else name: one for name, one in d.items()} for d in (found, origin))
    weights = huggingface.whole(path, model, found, origin, rows_are_out=True)
    return Weights(path, model, weights.arrays, gguf_tokenizer.read(path, head.values, model.vocab_size) if tokenizer else None)


def config_of(head: Header, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that the file's keys and tensor shapes correspond to. Missing ones get transformers' defaults."""
    kind = gguf.MODEL_TYPES[head.values["general.architecture"]]
    config: dict[str, Any] = {key: head.get(name) for key, name in gguf.SIZES.items()}
    for key, value in config.items():
        if isinstance(value, np.ndarray):  # one for each layer
            if len(set(value.tolist())) != 1:
                raise UserError(f"{head.path}: {key} is {value.tolist()}, expected the same in all layers")
            config[key] = value[0].item()
    config = {key: value for key, value in config.items() if value is not None}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if "token_embd.weight" not in tensors or not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        raise UserError(f"{head.path} lacks token_embd.weight, attention.head_count or embedding_length")
    size = config.setdefault("head_dim", width // heads)
    config |= {"model_type": kind, "vocab_size": tensors["token_embd.weight"].shape[0]}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    biased = [f"blk.0.{name}.bias" in tensors for name in ("attn_q", "attn_qkv")]
    config |= {"attention_bias": any(biased), "use_qkv_bias": any(biased), "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    config |= {"n_inner": head.get("feed_forward_length")} if kind == "gpt2" else {}
    if head.get("rope.dimension_count", size) != size:
        config["partial_rotary_factor"] = head.get("rope.dimension_count") / size
    if kind.startswith("gemma"):  # llama.cpp has the scale of its largest models in code
        largest = {"gemma2": 46, "gemma3_text": 62}[kind] == config.get("num_hidden_layers")
        config["query_pre_attn_scalar"] = width // heads if largest else size
    return config | _rope(head, tensors, config)


def _rope(head: Header, tensors: Mapping[str, Quantized], config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's RoPE scaling from the file's keys or its tensors of frequency factors; {} for plain RoPE."""
    kind, old_length = head.get("rope.scaling.type", "none"), head.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in tensors:
        scaling = {"rope_type": "longrope", "attention_factor": head.get("rope.scaling.attn_factor")}
        for key in ("short", "long"):
            scaling[f"{key}_factor"] = [float(str(x)) for x in tensors[f"rope_factors_{key}.weight"][:].ravel()]
        return {"rope_scaling": scaling, "original_max_position_embeddings": old_length}
    if "rope_freqs.weight" in tensors:
        return {"rope_scaling": _llama3(head, tensors["rope_freqs.weight"][:].ravel(), config)}
    if kind in ("linear", "yarn"):
        factor = head.get("rope.scaling.factor", head.get("rope.scale_linear"))
        given = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": old_length}
        return {"rope_scaling": {key: value for key, value in given.items() if value is not None}}
    if kind != "none":
        raise UserError(f"{head.path}: rope.scaling.type is {kind!r}, expected 'none', 'linear', 'yarn' or 'longrope'")
    return {}


def _llama3(head: Header, divisors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """Recover llama3 RoPE scaling from its frequency divisors, which are all that llama.cpp keeps. Every Meta model has the same
    low and high factors, so only the original length is searched; the result is compared with the divisors."""
    factor, theta = float(divisors.max()), config.get("rope_theta", 10_000.0)
    for old_length in (8192, *(2**i for i in range(4, 20))):
        scaling = Scaling(factor=factor, old_seq=old_length)
        plain, scaled = (frequencies(config["head_dim"], theta=theta, scaling=s) for s in (None, scaling))
        if len(plain) == len(divisors) and np.allclose(plain / scaled, divisors, rtol=1e-5):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": old_length,
            }  # fmt: skip
    raise UserError(f"{head.path}: no llama3 scaling gives the divisors in rope_freqs.weight, the largest of which is {factor:g}")
