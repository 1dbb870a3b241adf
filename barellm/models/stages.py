"""The stages of a run: a table in the configuration of what changes while a model trains, and what a step makes of it.

    share=1/3 seq=16384 document=896 windows=1,3 lr=1.0 mtp=1,0.5,0.25>1,0.5,0; share=1/3 seq=32768 ...

Stages are separated by ";". In each, `share` is its part of the scheduled steps (the last stage has none: it is an extension and
lasts until the run ends), `seq` the tokens of a micro-batch, `document` the most tokens of a document that are kept, `windows` how
far the attention of short and of long layers looks back, in blocks, `lr` a factor of the learning rate, and `mtp` the weights of
the losses of the next, the second and the third token, which go in a line from those before ">" to those behind it.

None of these values is known to a kernel: they are scalars and tensors that a run is given, so that a new stage compiles nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from barellm.errors import UserError

MOST_PREDICTED = 3  # tokens ahead that the loss may look


@dataclass(frozen=True)
class Stage:
    """A row of the table. `share` 0: the final extension. `mtp`, `mtp_end`: loss weights at the first step and at the end."""

    seq: int
    windows: tuple[int, int]
    share: Fraction = Fraction(0)
    document: int = 0
    lr: float = 1.0
    mtp: tuple[float, ...] = (1.0,)
    mtp_end: tuple[float, ...] = (1.0,)

    def weights(self, progress: float) -> tuple[float, ...]:
        """The weights of the losses, `progress` of the way through the stage; those that it does not name are 0."""
        found = [a + (b - a) * progress for a, b in zip(self.mtp, self.mtp_end, strict=True)]
        return tuple(found + [0.0] * (MOST_PREDICTED - len(found)))

    def text(self) -> str:
        """The row as a configuration has it."""
        mtp, end = (",".join(f"{w:g}" for w in weights) for weights in (self.mtp, self.mtp_end))
        words = [f"share={self.share}"] if self.share else []
        words += [f"seq={self.seq}"] + [f"document={self.document}"] * (self.document > 0)
        words += [f"windows={self.windows[0]},{self.windows[1]}", f"lr={self.lr:g}"]
        return " ".join([*words, f"mtp={mtp}" + (f">{end}" if end != mtp else "")])


def table(stages: Sequence[Stage]) -> str:
    """All rows as a configuration has them."""
    return "; ".join(stage.text() for stage in stages)


def parse(text: str, *, key: str) -> tuple[Stage, ...]:
    """The rows of a table. UserError, beginning with the key of the configuration, for what is no table."""
    stages = tuple(_row(row, number, key) for number, row in enumerate(text.split(";"), 1))
    shares = sum(stage.share for stage in stages)
    if len(stages) < 2 or stages[-1].share or any(not stage.share for stage in stages[:-1]) or shares != 1:
        found = ", ".join(str(stage.share) for stage in stages)
        raise UserError(f"{key} has shares {found}: expected some that add up to 1, and a last stage without one (share 0)")
    return stages


def _row(row: str, number: int, key: str) -> Stage:
    """Parse a row (stage `number`) of the table in `key`. UserError that quotes the faulty word."""
    readers = {"share": Fraction, "seq": int, "document": int, "windows": _windows, "lr": float, "mtp": _weights}
    found = {}
    for word in row.split():
        name, _, value = word.partition("=")
        if name not in readers or name in found:
            raise UserError(f"stage {number} of {key} has {word!r}, expected one each of {', '.join(readers)}")
        try:
            found[name] = readers[name](value)
        except (ValueError, ZeroDivisionError):
            example = {"share": "1/3", "windows": "1,3", "lr": "1.5", "mtp": "1,0.5>1,0"}.get(name, "1024")
            raise UserError(f"stage {number} of {key} has {word!r}, expected for example {name}={example}") from None
    if missing := {"seq", "windows"} - found.keys():
        raise UserError(f"stage {number} of {key} has no {sorted(missing)[0]}, expected seq and windows")
    found["mtp"], found["mtp_end"] = found.get("mtp", ((1.0,), (1.0,)))
    stage = Stage(**found)
    if min(stage.seq, *stage.windows) < 1 or stage.document < 0 or stage.lr < 0 or not 0 <= stage.share <= 1:
        raise UserError(f"stage {number} of {key} is {row.strip()!r}: expected sizes of at least 1, share from 0 to 1")
    return stage


def _windows(value: str) -> tuple[int, int]:
    short, long = value.split(",")
    return int(short), int(long)


def _weights(value: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    first, _, last = value.partition(">")
    begin = tuple(float(w) for w in first.split(","))
    end = tuple(float(w) for w in last.split(",")) if last else begin
    if len(begin) != len(end) or len(begin) > MOST_PREDICTED:
        raise ValueError
    return begin, end


@dataclass(frozen=True)
class Schedule:
    """Which stage a step is in. `total` steps, of which the last `extension` come after the scheduled ones."""

    stages: tuple[Stage, ...]
    total: int
    extension: int
    decay_fraction: float  # of the scheduled steps, the last ones, over which the learning rate decays linearly
    least: float  # the factor of the rate at the end

    @property
    def scheduled(self) -> int:
        return self.total - self.extension

    @property
    def ends(self) -> list[int]:
        """The first step behind each stage."""
        shares = accumulate(stage.share for stage in self.stages[:-1])
        return [round(share * self.scheduled) for share in shares] + [self.total]

    def index(self, step: int) -> int:
        """The number of the stage that a step is in; the last one for what lies behind the end."""
        return next((i for i, end in enumerate(self.ends) if step < end), len(self.stages) - 1)

    def first(self, index: int) -> int:
        """The first step of a stage."""
        return ([0, *self.ends])[index]

    def weights(self, step: int) -> tuple[float, ...]:
        index = self.index(step)
        begin, end = self.first(index), self.ends[index]
        return self.stages[index].weights((step - begin) / (end - begin) if step < end else 1.0)

    def lr(self, step: int) -> float:
        """The stage's factor; in the decay phase on a line from it to `least`."""
        rate = self.stages[self.index(step)].lr
        begin = int(self.scheduled * (1 - self.decay_fraction))
        if step < begin:
            return rate
        progress = min(1.0, (step - begin) / max(1, self.scheduled - begin))
        return rate * (1 - progress) + self.least * progress
