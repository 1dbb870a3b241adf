"""The one exception that means "the user can mend this", printed as one line, exit status 2; the hint at its end."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 1000  # characters of a message: a file of a stranger's may hold names of any length


class UserError(ValueError):
    """A user's mistake. The message names the thing, says what was found and what was expected. It is one line, and not a long one,
    whatever a file holds that it quotes."""

    def __init__(self, message: object) -> None:
        text = "".join(c if c.isprintable() else " " for c in str(message)).strip()
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}")


class WrongType(UserError, TypeError):
    """An argument of another type than expected: a ValueError as every mistake is, and the TypeError that Python has for it."""


def shown(found: object) -> str:
    """A value for a message: one line, and not a long one."""
    text = " ".join(repr(found).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint `, did you mean 'x'?` where something known is close, else "". For `gpt2` it is the first that begins so, for
    `layers` it is `model.layers`, and for `model.lr` it is `optim.lr`: who knows a key's own name rarely means another."""
    from difflib import get_close_matches

    known = list(known)
    word = name.lstrip("-")
    tail = word.rpartition(".")[2]
    found = [k for k in known if word and k.startswith(name)][:1]
    found = found or [k for k in known if tail and k.rpartition(".")[2] == tail][:1]
    found = found or get_close_matches(name, known, n=1)
    if not found:
        tails = {k.rpartition(".")[2]: k for k in known}
        found = [tails[close] for close in get_close_matches(tail, tails, n=1)]
    return f", did you mean {found[0]!r}?" if found else ""
