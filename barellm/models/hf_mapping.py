"""How other programs store a model, in words that its module uses and `interop/` reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from barellm.errors import UserError


class UnknownConfig(UserError):
    """A config.json that describes no model of ours. The message lacks the name of the file."""


def nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HuggingFace:
    """A folder of transformers': its config.json, then its tensors."""

    preset: str  # what a model is trained like whose sizes no preset has
    model_type: str
    class_name: str
    sizes: Mapping[str, tuple[str, Any]]  # key -> our field, and what transformers takes where the key is missing
    kinds: Mapping[str, tuple[Any, ...]]  # key -> the values that our model can be; the first is transformers' default
    # Key -> our field, what transformers takes where the key is missing, and the values: theirs -> ours.
    words: Mapping[str, tuple[str, Any, Mapping[Any, Any]]] = field(default_factory=dict, kw_only=True)
    fixed: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # our fields that this architecture always has
    derived: Mapping[str, Callable[[Any], Any]]  # key -> what our configuration makes of it; a folder may leave it out
    rates: tuple[str, ...]  # keys that are written as `dropout`, and not read
    prefix: str  # before every name but the head's; older files lack it
    head: str  # their classifier
    tied: Callable[[Any], str | None]  # configuration -> our parameter that their head is equal to, and then need not be there
    # Configuration, our name of a parameter -> their names, without the prefix, of what lies one below the other in it, with the
    # rows of each; 0: all.
    parts: Callable[[Any, str], Mapping[str, int]]
    transposed: Callable[[str], bool]  # our name -> whether they store it (in, out)
    ignored: Callable[[str], bool]  # their name -> whether it is no parameter
    refused: Callable[[Any], str | None]  # why transformers cannot hold a configuration of ours
    # What the tables above cannot say: config.json -> our field: (the key it was found at, its value), and the way back.
    # Where our rows of a tensor lie in theirs: configuration, our name, their name -> their row for each of ours. None: as ours.
    order: Callable[[Any, str, str], list[int] | None] = lambda cfg, ours, theirs: None
    read: Callable[[Mapping[str, Any]], Mapping[str, tuple[str, Any]]] = nothing
    written: Callable[[Any], Mapping[str, Any]] = nothing


class Windows(NamedTuple):
    """How a family's config.json says which layers have a sliding window."""

    usual: int | None  # what transformers takes for the window where the key is missing
    has: Callable[[Mapping[str, Any], int], bool] | None  # whether a layer that no `layer_types` lists has one; None: all, always
    switch: bool = False  # whether there are none unless `use_sliding_window` says so


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder of Llama's kind in transformers' words (`models/decoders.py`): what is not as in a Llama."""

    model_type: str
    class_name: str
    preset: str = "llama-124m"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what transformers takes where one of Llama's keys is missing
    sizes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # these six as in HuggingFace, beside Llama's
    words: Mapping[str, tuple[str, Any, Mapping[Any, Any]]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rates: tuple[str, ...] = ("attention_dropout",)
    prefix: str = "model."
    block: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # our name in a block -> theirs, one below the other
    others: Mapping[str, str] = field(default_factory=dict)  # outside of blocks: "wte", "norm", "head" -> theirs
    theta: float = 10_000.0  # these four are defaults too
    act: str = "silu"
    act_key: str = "hidden_act"
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    own_head: bool = True  # whether there is a key head_dim, and heads may be no part of hidden_size
    partial: float | None = None  # the part of a head that turns, if that is a key
    old_rope: Mapping[str, str] = field(default_factory=dict)  # key of RoPE's -> its name in early files
    windows: Windows | None = None
    optional: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # as sizes, but null is 0
    # Where RoPE of the layers with a window is another one: the key of its theta in early files, and the theta.
    local_theta: tuple[str, float] | None = None
    also: tuple[str, ...] = ()  # further fields, that those below know
    refused: Callable[[Any], str | None] = lambda cfg: None  # of our configuration
    read: Callable[[Mapping[str, Any]], Mapping[str, tuple[str, Any]]] = nothing
    written: Callable[[Any], Mapping[str, Any]] = nothing
