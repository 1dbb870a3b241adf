"""The one exception that means "the user can mend this", printed as one line, exit status 2; the hint at its end."""

import re
from collections.abc import Collection, Iterable

CLOSE = 0.75  # difflib's ratio of a word and what it may be a slip of: seed and sede, not fsdp
LONGEST = 1000  # characters of a message: a file of a stranger's may hold names of any length


class UserError(ValueError):
    """A user's mistake. The message names the thing, says what was found and what was expected. It is one line, and not a long one,
    whatever a file holds that it quotes."""

    def __init__(self, message: object) -> None:
        text = "".join(c if c.isprintable() else " " for c in str(message)).strip()
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}")


class WrongType(UserError, TypeError):
    """An argument of another type than expected: a ValueError as every mistake is, and the TypeError that Python has for it."""


def visible(text: str) -> str:
    """A text of strangers for a terminal: control characters, which could move the cursor or set colours, are written as \\x1b and
    the like. Line breaks and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def shown(found: object) -> str:
    """A value for a message: one line, and not a long one."""
    text = " ".join(repr(found).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint `, did you mean 'x'?` for a name close to a known one, else "": first by prefix (`gpt2`), then by last part (`layers`
    is `model.layers`, `model.lr` is `optim.lr`), then by spelling."""
    from difflib import get_close_matches

    words = {k: k.lstrip("-") for k in known}
    tails = {k: bare.rpartition(".")[2] for k, bare in words.items()}
    word = name.lstrip("-")
    tail = word.rpartition(".")[2]
    found = [k for k, bare in words.items() if len(word) > 1 and bare.startswith(word)]
    found = found or [k for k in words if tail and tails[k] == tail]
    for target, choices in ((word, words), (tail, tails)):
        if not found:
            close = get_close_matches(target, choices.values(), n=1, cutoff=CLOSE)
            found = [k for k in choices if choices[k] in close]
    return f", did you mean {found[0]!r}?" if found else ""


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise a UserError for a `what` of another name than the known ones: with the nearest, and all of them."""
    if name not in known:
        raise UserError(f"unknown {what} {name!r}{nearest(name, known)} (known: {', '.join(known)})")
