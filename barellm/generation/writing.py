"""Streaming of generated text: from tokens to text."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from barellm.data.tokenizers import StreamDecoder, Tokenizer
from barellm.generation.decode import Decoder, kept
from barellm.generation.samplers import Sampling
from barellm.generation.stops import StopStrings


class Written:
    """The completion of one prompt. `emit` gets it piece by piece. `begins`: it is a text of its own, as an answer is.
    `ends`: the ids that end it, where they are others than those of any text."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), emit: Callable[[str], object] = lambda piece: None,
        begins: bool = False, ends: AbstractSet[int] | None = None,
    ) -> None:  # fmt: skip
        self.ends = tokenizer.ends if ends is None else ends
        self.tokenizer, self.emit = tokenizer, emit
        self.ids: list[int] = []
        self.ended = False
        self._pieces: list[str] = []
        self._decoder, self._stops = StreamDecoder(tokenizer, begins=begins), StopStrings(stops)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def shown(self) -> list[int]:
        """The ids that stand for `text`: those that were drawn, unless a stop text took the end of them away."""
        return self.tokenizer.encode(self.text).tolist() if self._stops.met else self.ids

    def feed(self, token: int) -> None:
        """A token that the model drew."""
        if token in self.ends:
            self.ended = True
            return
        self.ids.append(token)
        self._add(self._stops.feed(self._decoder.feed(token)))
        self.ended = self._stops.met

    def finish(self) -> None:
        """Give out what was held back, as no more tokens come."""
        self._add(self._stops.feed(self._decoder.finish()))
        self._add(self._stops.finish())
        self.ended = self.ended or self._stops.met

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.emit(piece)


def unseen(prompt: Sequence[int], positions: int) -> str:
    """What a user should know of a prompt that a model with so many positions does not see whole; else ""."""
    if len(prompt) <= positions:
        return ""
    seen = f"the model has {positions} positions and sees the last {len(kept(prompt, positions))}"
    return f"the prompt has {len(prompt)} tokens: {seen}"


def write(
    decoder: Decoder, prompts: Sequence[Sequence[int]], texts: Sequence[Written], *, count: int, hows: Sequence[Sampling]
) -> Iterator[int]:
    """Batched generation into `texts`: up to `count` tokens each; yields the number of the text after each token."""
    ended: set[int] = set()
    for number, token in decoder.together(prompts, count=count, hows=hows, ended=ended):
        texts[number].feed(token)
        if texts[number].ended:
            ended.add(number)
        yield number
    for text in texts:
        text.finish()
