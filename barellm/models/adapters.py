"""Which weights of a model are trained where the others are frozen, and the low-rank adapters of its linear layers."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import sqrt
from typing import Any

from barellm import models
from barellm.config import ModelConfig
from barellm.config.adapter import AdapterConfig
from barellm.errors import UserError, nearest
from barellm.models.decoders import architectures, hugging_face
from barellm.models.hf_mapping import HuggingFace
from barellm.program.builder import Program, Store
from barellm.program.ops.gemm.low_rank import LowRank
from barellm.program.tensor import Dim

ALL = "all-linear"
LONGEST = 128  # positions of the program in which linear layers are found
# Where PEFT 0.21 puts adapters if nobody says; families that it has none for get them on all linear layers.
DEFAULTS = {
    **dict.fromkeys(("llama", "mistral", "gemma2", "gemma3_text", "qwen2", "qwen3", "stablelm"), "q_proj,v_proj"),
    "gpt_neox": "query_key_value", "gpt2": "c_attn"
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A linear layer as Hugging Face names it: `rows` rows, from row `first` on, of our parameter `weight`."""

    name: str
    weight: str
    first: int
    rows: int

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def factors(self) -> tuple[str, str]:
        """The names of the parameters A, which has rows for each adapted module of the weight, and B."""
        return f"{self.weight}.lora_A", f"{self.weight}.lora_B.{self.leaf}"


def family(model: ModelConfig) -> "HuggingFace | None":
    """What a model is in Hugging Face's words; None where that has no such architecture."""
    return hugging_face(model) if architectures(models.of(model)) else None


@cache
def modules(model: ModelConfig) -> tuple[Module, ...]:
    """The linear layers of a model in forward order, without embeddings and head, by Hugging Face's names if it has some."""
    store, known = Store(), family(model)
    store.positions = min(LONGEST, model.max_seq)
    p, shape = Program(store), (Dim("batch", 1), Dim("seq", store.positions))
    models.of(model).declare(p, model)
    models.of(model).forward(p, model, p.input("tokens", shape), p.input("targets", shape), training=False)
    result = []
    for weight, t in store.linears.items():
        first = 0
        for theirs, rows in ({weight: 0} if known is None else known.parts(model, weight)).items():
            name = theirs.removesuffix(".weight")
            result.append(Module(name if known is None else known.prefix + name, weight, first, rows or int(t.shape[0])))
            first += result[-1].rows
    return tuple(result)


def targeted(model: ModelConfig, targets: str) -> list[Module]:
    """The modules that the comma-separated list `targets` names, as in PEFT: each word is a module's full name, the end of one, or
    here a shell pattern. UserError for a word without a match."""
    all_modules, known = list(modules(model)), family(model)
    targets = targets or (DEFAULTS.get(known.model_type, ALL) if known else ALL)
    words = [word.strip() for word in targets.split(",") if word.strip()]
    if words == [ALL]:
        return all_modules
    chosen: dict[Module, None] = {}
    for word in words:
        matching = [m for m in all_modules if m.name == word or m.name.endswith(f".{word}") or fnmatchcase(m.name, word)]
        if not matching:
            leaves = dict.fromkeys(m.leaf for m in all_modules)
            raise UserError(f"adapter.targets names {word!r}, which matches no linear layer{nearest(word, leaves)} (known: "
                            f"{', '.join(leaves)}, {ALL})")  # fmt: skip
        chosen |= dict.fromkeys(matching)
    return [m for m in all_modules if m in chosen]


def freeze(store: Store, adapter: AdapterConfig, compute: str) -> None:
    """Set, before parameters are declared, which ones are trained and how frozen matrices are stored. UserError for a storage dtype
    that programs of the dtype `compute` cannot multiply."""
    half = compute == "bf16"  # can GEMMs read matrices of 16 bits?
    base = adapter.base
    if base == "auto":
        base = "bf16" if half else "fp32"
    if base == "bf16" and not half:
        raise UserError(f"adapter.base is 'bf16', and train.dtype {compute}: expected fp32, int8, int4 or nf4")
    # Of matrices that are not quantized; None: as the program's precision says.
    store.frozen_dtype = "bf16" if half and base != "fp32" else None
    patterns = ["*.lora_*"] if adapter.method else [word.strip() for word in adapter.train_only.split("|")]
    store.trains = lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def declare(p: Program, model: ModelConfig, adapter: AdapterConfig) -> None:
    """Declare the LoRA parameters: A uniform as in PEFT, B zero. UserError if nothing would be trained."""
    store, rank = p.store, adapter.rank
    if not rank:
        if not store.trainable:
            hint = nearest(adapter.train_only, [t.name for t in store.of_role("parameter")])
            raise UserError(f"--train-only {adapter.train_only!r} matches no parameter{hint} (barellm plan --map lists them)")
        return
    by_weight: dict[str, list[Module]] = {}
    for m in targeted(model, adapter.targets):
        by_weight.setdefault(m.weight, []).append(m)
    if not by_weight:
        raise UserError(f"{models.name_of(model)} has no linear layers that adapters could have, expected another model")
    for weight, blocks in by_weight.items():
        K = int(store.tensors[weight].shape[1])
        a = p.parameter(blocks[0].factors[0], (rank * len(blocks), K), bound=1 / sqrt(K))
        matrices: list[tuple[int, Any]] = [(m.first, p.parameter(m.factors[1], (m.rows, rank))) for m in blocks]
        store.adapters[weight] = LowRank(a, tuple(matrices), adapter.scale, adapter.dropout)
