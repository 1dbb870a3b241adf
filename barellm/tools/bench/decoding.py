"""How fast text is written beside what memory allows: a token costs at least the time of reading each weight once."""

from dataclasses import dataclass, field
from time import perf_counter

from barellm.program.builder import Program
from barellm.program.ops.base import operand_bytes


def weight_bytes(decode: Program) -> int:
    """The bytes of weights that decoding one token reads: of each matrix what its matmul reads. A token's row of an embedding,
    norms and the KV cache are not counted."""
    sizes = {t: operand_bytes(t) for op in decode.ops if op.product for t in op.inputs.values() if t.role == "parameter"}
    return sum(sizes.values())


@dataclass
class Pace:
    """Times of the tokens of `rows` texts that are written side by side. `fed` tokens were the prompts, equal ones counted once,
    whose time is that of the first token."""

    fed: int
    rows: int = 1
    times: list[float] = field(default_factory=lambda: [perf_counter()])

    def token(self) -> None:
        """Say that a token is there."""
        self.times.append(perf_counter())

    @property
    def first(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def tokens_per_s(self) -> float:
        """Of all tokens after the first, each of which is fed alone; 0 if there is none."""
        later = self.times[1:]
        return (len(later) - 1) / (later[-1] - later[0]) if len(later) > 1 else 0.0

    @property
    def overall(self) -> float:
        """Tokens a second of all texts together, with the time of their prompts."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else 0.0

    def line(self, nbytes: int, bandwidth: float) -> str:
        """The pace in words, relative to reading `nbytes` of weights per token at `bandwidth` bytes/s."""
        begin = f"first token after {self.first:.3f} s ({self.fed} tokens fed), then {self.tokens_per_s:.1f} tokens/s"
        if self.rows > 1:
            return f"{begin} of {self.rows} texts in a batch"
        rate = self.tokens_per_s * nbytes
        share = f"{100 * rate / bandwidth:.0f} % of the {bandwidth / 1e9:.1f} GB/s that this machine reads"
        return f"{begin}: {nbytes / 1e6:.1f} MB of weights a token, {rate / 1e9:.1f} GB/s, {share}"
