"""Sampling a token from logits: penalties, biases, temperature, top-k, top-p, min-p, one draw by (seed, index); log-softmax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from barellm.config.fields import converted
from barellm.errors import UserError

BLOCK = 256  # probabilities that are added before a token is looked for among them
SORTED_FIRST = 512  # tokens: nearly always enough of a vocabulary for top-p and min-p, and sorted in a tenth of the time


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the most likely token (the lowest id of equals). `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing, and a
    `repetition_penalty` of 1 changes nothing. The last three are OpenAI's: `frequency_penalty` times as often as a token was drawn,
    and `presence_penalty` once, are taken from its logit, and to those of the ids that `logit_bias` names its numbers are added."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 1337
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Convert the values to their types and check their ranges; UserError for the first bad one."""
        for f in fields(self)[:-1]:
            object.__setattr__(self, f.name, converted(f.name, getattr(self, f.name), type(f.default)))
        ids = [(converted("an id of logit_bias", i, int), i, x) for i, x in dict(self.logit_bias).items()]
        biases = tuple(sorted((i, converted(f"logit_bias[{given}]", x, float)) for i, given, x in ids))
        object.__setattr__(self, "logit_bias", biases)
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}, expected a number from 0 on")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, expected 0 < top_p <= 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}, expected 0 (off) up to 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}, expected a number above 0 (1: no penalty)")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}, expected 0 or more")
        if biases and biases[0][0] < 0:
            raise UserError(f"logit_bias has the id {biases[0][0]}, expected 0 or more")


def sampling(own: Mapping[str, Any], *, seed: int = Sampling.seed, **given: Any) -> Sampling:
    """The given options (None: not given), else the model's generation_config.json, else defaults. UserError if unknown."""
    known = {field.name for field in fields(Sampling)}
    for name in given.keys() - known:
        raise UserError(f"unknown option {name!r} of sampling, expected one of {', '.join(sorted(known))}")
    return Sampling(seed=seed, **{**own, **{name: value for name, value in given.items() if value is not None}})


def probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Probabilities (V,) float64 after temperature and truncation of logits (V,). Ties keep the lower id.
    top-k keeps exactly min(k, V) tokens; top-p (nucleus sampling) the fewest likeliest tokens whose sum reaches p; min-p those at
    least min_p times as likely as the likeliest."""
    p = np.zeros(len(logits))
    if how.temperature == 0:
        p[np.argmax(logits)] = 1.0
    elif _cuts(how, len(p)):
        ids, likely = _truncated(logits, how)
        p[ids] = likely
    else:
        p += _likelihoods(logits, how.temperature)
    p /= p.sum()
    return p


def _cuts(how: Sampling, vocab: int) -> bool:
    return 0 < how.top_k < vocab or how.top_p < 1 or how.min_p > 0


def _truncated(logits: np.ndarray, how: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The ids that top-k, top-p and min-p keep, ascending, and their probabilities before the cut, float64."""
    vocab, likely = len(logits), _likelihoods(logits, how.temperature)
    k, total = min(how.top_k or vocab, vocab), likely.sum(dtype=np.float64)
    keep = most_likely(logits, min(k, SORTED_FIRST) if k == vocab else k)
    p = likely[keep] / total
    while len(keep) < k and p.sum() < how.top_p and p[-1] >= how.min_p * p[0]:
        keep = most_likely(logits, 8 * len(keep))
        p = likely[keep] / total
    if how.top_p < 1:
        keep = keep[: int(np.searchsorted(np.cumsum(p), how.top_p * (p.sum() if k < vocab else 1.0))) + 1]
    if how.min_p > 0:
        keep = keep[p[: len(keep)] >= how.min_p * p[0]]
    keep = np.sort(keep)
    return keep, likely[keep] / total


def _likelihoods(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities (V,) but for their sum, fp32 with an error of 2^-22. In place and in 32 bits, for which NumPy's exp is
    vectorized: for 49,152 ids 0.2 ms instead of 0.7, most of which were the page faults of new arrays."""
    with np.errstate(over="ignore"):
        x = np.subtract(logits, logits.max(), dtype=np.float32, casting="same_kind")
        np.divide(x, temperature, out=x)
    return np.exp(np.maximum(x, -200, out=x), out=x)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the draw with this index (Philox, counter-based: no state to carry)."""
    return float(np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=[0, 0, index, 0])).random())


def penalized(logits: np.ndarray, text: Sequence[int], penalty: float) -> np.ndarray:
    """The logits, of which those of ids in the text are divided by the penalty where they are above 0 and multiplied where below
    (Keskar et al. 2019), as transformers does it."""
    if penalty == 1:
        return logits
    logits, seen = logits.copy(), np.unique(np.asarray(text, np.int64))
    seen = seen[seen < len(logits)]  # a prompt may have ids that are never drawn
    logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    return logits


def biased(logits: np.ndarray, drawn: Sequence[int], how: Sampling) -> np.ndarray:
    """Apply frequency and presence penalties of the tokens already `drawn`, and logit biases."""
    if not (how.frequency_penalty or how.presence_penalty or how.logit_bias):
        return logits
    logits = logits.astype(np.float64)
    ids, counts = np.unique(np.asarray(drawn, np.int64), return_counts=True)
    logits[ids] -= how.frequency_penalty * counts + how.presence_penalty
    for i, bias in dict(how.logit_bias).items():
        logits[i : i + 1] += bias  # an id that is never drawn has none
    return logits


def check_finite(logits: np.ndarray) -> None:
    if not np.isfinite(logits).all():
        raise UserError("the model's logits are not finite: its weights diverged")


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    check_finite(logits)
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def most_likely(scores: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest of scores (V,), the largest first and of equals the lower id."""
    k = min(k, len(scores))
    if not k:
        return np.empty(0, np.int64)
    ids = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return ids[np.argsort(-scores[ids], kind="stable")][:k]


def draw(logits: np.ndarray, how: Sampling, *, index: int, text: Sequence[int] = ()) -> int:
    """Draw token number `index` of a text (`text`: prompt and tokens so far), reproducibly by (seed, index)."""
    check_finite(logits)
    logits = biased(penalized(logits, text, how.repetition_penalty), text[max(0, len(text) - index) :], how)
    if how.temperature == 0:
        return int(np.argmax(logits))
    ids, p = _truncated(logits, how) if _cuts(how, len(logits)) else (None, _likelihoods(logits, how.temperature))
    sums = np.add.reduceat(p, range(0, len(p), BLOCK), dtype=np.float64)  # a tenth of the time of all partial sums
    ends = np.cumsum(sums)
    at = uniform(how.seed, index) * ends[-1]
    block = min(int(np.searchsorted(ends, at, side="right")), int(np.flatnonzero(sums)[-1]))
    first, likely = block * BLOCK, p[block * BLOCK : (block + 1) * BLOCK]
    token = int(np.searchsorted(np.cumsum(likely, dtype=np.float64), at - (ends[block] - sums[block]), side="right"))
    drawn = first + min(token, int(np.flatnonzero(likely)[-1]))
    return drawn if ids is None else int(ids[drawn])
