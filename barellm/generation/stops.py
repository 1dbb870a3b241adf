"""Stop strings: a text ends before the one that is complete first, wherever the tokens are cut."""

from collections.abc import Sequence


class StopStrings:
    """Text goes in by pieces and comes out as far as no stop string can begin in it. `met`: whether one was found."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = [stop for stop in stops if stop]
        self.met = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add a piece; returns the text that can be shown: up to a stop string, or what cannot be the beginning of one."""
        if self.met:
            return ""
        held = self._held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := held.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return held[: min(found)[1]]
        keep = max((begins(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The rest that was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest


def begins(text: str, stop: str) -> int:
    """How many characters at the end of the text are a stop string's first ones."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
