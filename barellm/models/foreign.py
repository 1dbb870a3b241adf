"""How other programs store a model, in words that its module uses and `interop/` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HuggingFace:
    """A folder of transformers': its config.json, then its tensors."""

    preset: str  # what a model is trained like whose sizes no preset has
    model_type: str
    class_name: str
    sizes: Mapping[str, tuple[str, int]]  # key -> our field, and what transformers takes where the key is missing
    kinds: Mapping[str, tuple[Any, ...]]  # key -> the values that our model can be; the first is transformers' default
    derived: Mapping[str, Callable[[Any], Any]]  # key -> what our configuration makes of it; a folder may leave it out
    rates: tuple[str, ...]  # keys that are written as `dropout`, and not read
    prefix: str  # before every name, which older files lack
    head: str  # the classifier, which need not be there
    tied: str  # our parameter that it is equal to
    name: Callable[[str], str]  # our name of a parameter -> theirs, without the prefix
    transposed: Callable[[str], bool]  # our name -> whether they store it (in, out)
    ignored: Callable[[str], bool]  # their name -> whether it is no parameter
    refused: Callable[[Any], str | None]  # why transformers cannot hold a configuration of ours
