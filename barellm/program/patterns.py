"""Patterns of block-sparse attention as text: names and numbers, joined by `+`; a comma separates heads, which take them in turn.

    local:128+fixed:256:16, strided:64

Patterns of Child et al. 2019 (Sparse Transformer), and graphs on the blocks of a sequence, in which each block also sees itself:

    all                      every pair
    local:W                  |q - k| < W
    banded:N                 blocks less than N apart
    strided:S                S divides q - k
    fixed:S:C                both in one stretch of S positions, or k among the last C of its stretch
    watts-strogatz:N:P:SEED  blocks in a ring, each linked to the N beside it; with probability P a link leads anywhere
    barabasi-albert:M:SEED   each block is linked to M earlier ones, the more likely the more links they have
    spread:N:SEED            each block sees N others, drawn evenly

What they mean is written in `program/layouts.py`. Nothing here needs NumPy."""

Word = tuple[str, list[float]]

NUMBERS: dict[str, tuple[type, ...]] = {
    "all": (), "local": (int,), "banded": (int,), "strided": (int,), "fixed": (int, int),
    "watts-strogatz": (int, float, int), "barabasi-albert": (int, int), "spread": (int, int),
}  # fmt: skip


def parse(text: str) -> list[list[Word]]:
    """The patterns of each head as (name, numbers). ValueError, in one line, for what is none."""
    return [[_word(word.strip()) for word in head.split("+")] for head in text.split(",")]


def _word(word: str) -> Word:
    """Parse "name:number:..." to (name, numbers). ValueError for an unknown name or numbers that do not fit NUMBERS."""
    name, *rest = word.split(":")
    if name not in NUMBERS:
        raise ValueError(f"unknown pattern {name!r}, expected one of {', '.join(NUMBERS)}")
    kinds = NUMBERS[name]
    try:
        numbers = [kind(number) for kind, number in zip(kinds, rest, strict=True)]
    except ValueError:
        numbers = []
    if len(numbers) != len(kinds) or any(n < 0 for n in numbers) or (kinds and numbers[0] < 1):
        what = ", ".join({int: "an integer", float: "a number"}[kind] for kind in kinds) or "no number"
        raise ValueError(f"pattern {word!r} has wrong numbers, expected {what} behind its name, the first above 0")
    return name, numbers
