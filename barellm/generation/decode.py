"""Tokens one after the other, through the program "decode" and its KV cache; of several texts side by side."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from barellm import models
from barellm.config import ModelConfig
from barellm.data.tokenizers import Tokenizer
from barellm.generation.samplers import Sampling, draw
from barellm.runtime.session import Session

LEAST_POSITIONS = 256
UNLIKELY = -1e30  # a logit of what is never drawn: finite, as all are
MOST_TOGETHER = 64  # texts side by side: of more rows a processor's product adds in another order than of one


def cache_positions(tokens: int, most: int) -> int:
    """Positions of a KV cache for a text of so many tokens in a model that has at most `most`. It is a power of two, since each
    other number is another constant of the kernels, which are then compiled again."""
    return min(most, max(LEAST_POSITIONS, 1 << (tokens - 1).bit_length()))


def kept(text: Sequence[int], positions: int) -> Sequence[int]:
    """The part of a text that a model with so many positions sees: all of it if it fits, else as much of its end as fills half of
    the positions, so that there is room for what follows."""
    return text if len(text) <= positions else text[-max(1, positions // 2) :]


@dataclass
class Row:
    """A text that grows: its ids, how many of them the model has drawn, and its place in the cache."""

    number: int
    text: list[int]
    how: Sampling
    drawn: int = 0


class Decoder:
    """Feeds a prompt at once, or in pieces where there is a program for them, then each drawn token; of several texts all at the
    same position in one run. When all `max_seq` positions of the cache are used, the newer half of each text is fed again from
    position 0: positions are absolute, so a cache cannot be moved. A `whole` model has no cache: for each token it is fed all
    that it sees. Ids from `vocab_size` on are padding."""

    def __init__(self, session: Session, *, max_seq: int, vocab_size: int, whole: bool = False) -> None:
        self.session, self.max_seq, self.vocab_size, self.whole = session, max_seq, vocab_size, whole
        tensors = getattr(session, "tensors", {})
        self.unused: list[int] = []  # ids below vocab_size that are never drawn
        self.piece = session.piece if "prefill" in getattr(session, "programs", {}) else 0
        self.caches = [name for name, t in tensors.items() if t.role == "cache" and name.endswith("_cache")]

    def tokens(self, prompt: Sequence[int], *, count: int, how: Sampling) -> Iterator[int]:
        """`count` tokens that follow the prompt (at least one token), each as soon as it is known."""
        for _, token in self.together([prompt], count=count, hows=[how]):
            yield token

    def together(
        self, prompts: Sequence[Sequence[int]], *, count: int, hows: Sequence[Sampling], ended: Container[int] = ()
    ) -> Iterator[tuple[int, int]]:
        """Batched generation: yields (prompt number, token) for up to `count` tokens of each prompt, or until its number is in
        `ended`, to which the caller may add. Needs a cache row a prompt. With a batch-invariant GEMM results equal single ones."""
        assert len(prompts) <= MOST_TOGETHER
        rows = [Row(i, list(prompt), how) for i, (prompt, how) in enumerate(zip(prompts, hows, strict=True))]
        while rows := [row for row in rows if row.drawn < count and row.number not in ended]:
            if self.whole:
                for row in rows:
                    yield self._draw(row, self._logits([kept(row.text, self.max_seq)], pos=0)[0])
            else:
                yield from self._until_full(rows, count, ended)

    def _until_full(self, rows: list[Row], count: int, ended: Container[int]) -> Iterator[tuple[int, int]]:
        """Generate until the cache is full. Prompts have different lengths: rows are sorted by length, a batch of the first
        `reached` rows runs at position `pos`, and longer prompts join when `pos` reaches their end."""

        def active(row: Row) -> bool:
            return row.drawn < count and row.number not in ended

        rows.sort(key=lambda row: (len(seen := kept(row.text, self.max_seq)), seen))  # equal ones side by side
        starts = [len(kept(row.text, self.max_seq)) for row in rows]
        first = self._fill(rows)
        reached = 0
        pos = starts[0]
        while True:
            while reached < len(rows) and starts[reached] == pos:
                yield self._draw(rows[reached], first[reached])
                reached += 1
            if not any(map(active, rows[:reached])):
                if reached == len(rows):
                    return
                pos = starts[reached]
                continue
            if pos == self.max_seq:
                return
            fed = [[row.text[-1]] for row in rows[:reached]]
            for row, logits in zip(rows[:reached], self._logits(fed, pos=pos), strict=True):
                if active(row):
                    yield self._draw(row, logits)
            pos += 1

    def _fill(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Prefill each prompt in the cache's first row and copy it to its own (equal ones once). Returns the logits after each."""
        logits: list[np.ndarray] = []
        fed: Sequence[int] = []
        for row in reversed(range(len(rows))):
            seen = kept(rows[row].text, self.max_seq)
            if seen != fed:
                logits.append(self._logits([seen], pos=0)[0])
                fed = seen
            else:
                logits.append(logits[-1])
            if row:
                for name in self.caches:
                    self.session.write_rows(name, row, self.session.read_rows(name, 0, 1))
        return logits[::-1]

    def _draw(self, row: Row, logits: np.ndarray) -> tuple[int, int]:
        token = draw(logits, row.how, index=row.drawn, text=row.text)
        row.text.append(token)
        row.drawn += 1
        return row.number, token

    def _logits(self, texts: Sequence[Sequence[int]], *, pos: int) -> np.ndarray:
        """Logits (texts, vocab_size) after equally long texts at positions pos .. pos + length, fed in pieces if necessary."""
        tokens, first = np.array(texts, np.int32), 0
        while 0 < self.piece < tokens.shape[1] - first:
            self._run("prefill", tokens[:, first : first + self.piece], pos + first)
            first += self.piece
        self._run("decode", tokens[:, first:], pos + first)
        logits = self.session.read("logits").reshape(len(texts), -1)[:, : self.vocab_size]
        if self.unused:
            logits = logits.astype(np.float32)
            logits[:, self.unused] = UNLIKELY
        return logits

    def _run(self, program: str, tokens: np.ndarray, pos: int) -> None:
        self.session.write("tokens", tokens)
        self.session.run(program, batch=len(tokens), seq=tokens.shape[1], pos=pos)


def open_decoder(session: Session, model: ModelConfig, tokenizer: Tokenizer, *, positions: int) -> Decoder:
    """A model's decoder. `positions`: what the session's "decode" is planned for. Rows that are no token's id are never drawn."""
    decoder = Decoder(session, max_seq=positions, vocab_size=min(model.vocab_size, tokenizer.vocab_size), whole=models.whole(model))
    decoder.unused = [i for i in tokenizer.unused if i < decoder.vocab_size]
    return decoder
