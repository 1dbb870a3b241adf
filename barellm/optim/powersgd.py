"""Gradients of matrices that travel as two thin factors: PowerSGD with error feedback (Vogels et al. 2019; Ramesh et al. 2021,
appendix E). The ops are those of program/ops/optim/powersgd.py.

A step ends with four exchanges, however many matrices there are: the factors P of all of them lie side by side, with them the
gradients of what is too small to compress; then the factors Q'. Each is summed over the ranks, in order, and given to all, as bf16.

All ranks then have the same gradient, to the bit, and each updates all weights: no weight travels, which would be more than the
factors are. So the optimizer's state is on every rank, and so is an error as large as the gradient.

Q begins with what the last step has found. It is zero at first: the basis is then of the first coordinates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from barellm.errors import UserError
from barellm.optim.sharding import Part, all_gather
from barellm.program import ops
from barellm.program.ranks import Ranks
from barellm.program.tensor import Span, Tensor

if TYPE_CHECKING:
    from barellm.program.builder import Program

ERROR, FACTOR = "error", "factor"  # of a parameter's state: what was left out, and Q
TRAVELS = "bf16"  # of factors


@dataclass(frozen=True)
class Compression:
    """PowerSGD of `rank` columns: the ranks exchange factors of the matrices of which these have fewer elements, and all other
    gradients as they are. One process alone (`ranks` None) compresses too, and sends nothing."""

    rank: int
    ranks: Ranks | None

    def compresses(self, param: Tensor) -> bool:
        if len(param.shape) != 2:
            return False
        rows, cols = (int(n) for n in param.shape)
        return self.rank <= min(rows, cols) and self.rank * (rows + cols) < param.size

    def partials(self, p: "Program", params: Sequence[Tensor]) -> list[Tensor]:
        """Append the exchange, of M = gradient + error of each matrix: P = M Q, summed over the ranks; P^ = its orthonormal basis;
        Q' = M^T P^, summed. (Of a tall matrix the roles of M and M^T are swapped.) Gradients without factors are summed with P.
        Returns the partial sums of the squares of the whole gradient: P^ is orthonormal, so those of P^ Q'^T are those of Q'.
        UserError where nothing is compressed."""
        matrices = [t for t in params if self.compresses(t)]
        rest = [t for t in params if not self.compresses(t)]
        if not matrices:
            raise UserError(f"optim.powersgd is {self.rank}: factors would be no smaller than any matrix; expected less")
        # All factors of a kind lie in one tensor, so that one all-reduce sums them.
        sides = [_sides(t) for t in matrices]
        firsts = self._flat(p.activation, "powersgd.p", [short for short, _ in sides], TRAVELS)
        seconds = self._flat(p.cache, "powersgd.q", [long for _, long in sides], TRAVELS)
        totals = self._flat(p.cache, "powersgd.q.sum", [long for _, long in sides], TRAVELS)
        others = _packed(p.activation, "powersgd.rest", [t.size for t in rest], "fp32")
        for t, into in zip(matrices, firsts, strict=True):
            self._factor(p, t, self._q(p, t), into, transposed=_tall(t))
        for t, into in zip(rest, others, strict=True):
            p.apply(ops.Cast, into={"y": (into, "store")}, x=p.gradient_of(t), dtype="fp32")
        sums = self._all_reduce(p, [packed[0].base for packed in (firsts, others) if packed])
        for t, own in zip(matrices, firsts, strict=True):
            p.apply(ops.Householder, into={"y": (self._p(p, t), "store")}, x=_same(own, sums[0]), rank=self.rank)
        for t, own in zip(rest, others, strict=True):
            p.apply(ops.Cast, into={"y": (p.gradient_of(t), "store")}, x=_same(own, sums[1]), dtype="fp32")
        for t, into in zip(matrices, seconds, strict=True):
            self._factor(p, t, self._p(p, t), into, transposed=not _tall(t))
        self._all_reduce(p, [seconds[0].base], [totals[0].base])
        return [p.apply(ops.SumSquares, x=x).partials for x in (totals[0].base, *sums[1:])]

    def restore(self, p: "Program", params: Sequence[Tensor], scale: Tensor) -> None:
        """Append the gradient = P^ (sum of Q')^T of all ranks, and the error feedback = what this rank's factors leave out. May be
        in a program of its own, after `partials`. Nothing changes where scale[1] is NaN."""
        matrices = [t for t in params if self.compresses(t)]
        long = [long for _, long in map(_sides, matrices)]
        owns, totals = (self._flat(p.cache, name, long, TRAVELS) for name in ("powersgd.q", "powersgd.q.sum"))
        for t, own, total in zip(matrices, owns, totals, strict=True):
            factors: dict[str, Any] = {"p": self._p(p, t), "own": own, "total": total, "q": self._q(p, t)}
            given = {"grad": p.gradient_of(t), "error": self._error(p, t), "clip": scale}
            p.apply(ops.Feedback, **given, **factors, rank=self.rank, tall=_tall(t))

    def own(self, param: Tensor) -> Tensor:
        """What this rank updates of a parameter: all."""
        return param

    def all_gather(self, p: "Program", params: Sequence[Tensor]) -> None:
        """All ranks have all parameters already."""

    def _error(self, p: "Program", t: Tensor) -> Tensor:
        return p.state(f"{t.name}.{ERROR}", tuple(int(n) for n in t.shape))

    def _q(self, p: "Program", t: Tensor) -> Tensor:
        return p.state(f"{t.name}.{FACTOR}", (self.rank, _sides(t)[1]))

    def _p(self, p: "Program", t: Tensor) -> Tensor:
        return p.cache(f"{t.name}.basis", (self.rank, _sides(t)[0]), "fp32")

    def _flat(self, declare: Callable[..., Tensor], name: str, sides: Sequence[int], dtype: str) -> list[Tensor]:
        return _packed(declare, name, [self.rank * n for n in sides], dtype)

    def _factor(self, p: "Program", t: Tensor, f: Tensor, into: Tensor, *, transposed: bool) -> None:
        """Append into = M f, or M^T f, with M = gradient + error of a matrix."""
        how: dict[str, Any] = {"rank": self.rank, "transposed": transposed, "dtype": into.dtype}
        given = {"grad": p.gradient_of(t), "error": self._error(p, t), "f": f}
        p.apply(ops.Factor, into={"y": (into, "store")}, **given, **how)

    def _all_reduce(self, p: "Program", xs: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Append an all-reduce of each of `xs` to `into` (None: new activations), which is returned: a reduce-scatter, in rank
        order, then an all-gather. Rank r reduces part r of each tensor (`_parts`); empty parts are left out."""
        if into is None:
            into = [p.activation(f"{t.name}.sum", t.shape, t.dtype) for t in xs]
        if self.ranks is None or self.ranks.count == 1:
            for x, y in zip(xs, into, strict=True):
                p.apply(ops.Cast, into={"y": (y, "store")}, x=x, dtype=y.dtype)
            return list(into)
        parts = [_parts(x.size, self.ranks.count) for x in xs]
        _reduce_scatter(p, self.ranks, xs, into, parts)
        all_gather(p, self.ranks, list(zip(into, parts, strict=True)))
        return list(into)


def _reduce_scatter(
    p: "Program", ranks: Ranks, xs: Sequence[Tensor], into: Sequence[Tensor], parts: Sequence[Sequence[Part]]
) -> None:
    """Append the sum over all ranks of this rank's part of each of `xs`, at the same elements of `into`. `parts`: by rank."""
    operands: dict[str, Any] = {}
    destinations: list[tuple[int]] = []
    owned: list[tuple[Tensor, Tensor]] = []  # (this rank's part of x, where its sum goes)
    for x, y, of_ranks in zip(xs, into, parts, strict=True):
        for rank, (first, end) in enumerate(of_ranks):
            if first == end:
                continue
            if rank == ranks.rank:
                owned.append((Span(x, first, end - first), Span(y, first, end - first)))
            else:
                operands[f"x{len(operands)}"] = Span(x, first, end - first)
                destinations.append((rank,))
    sizes, dtypes = [x.size for x, _ in owned], [x.dtype for x, _ in owned]
    arrived = p.apply(ops.AllToAll, **operands, to=destinations, own=sizes, dtypes=dtypes, ranks=ranks)
    for (x, y), others in zip(owned, arrived.outputs.values(), strict=True):
        p.apply(ops.SumOverRanks, into={"y": (y, "store")}, own=x, others=others, rank=ranks.rank)


def _tall(t: Tensor) -> bool:
    return int(t.shape[0]) > int(t.shape[1])


def _sides(t: Tensor) -> tuple[int, int]:
    """The shorter and the longer side of a matrix: those of P and of Q'."""
    short, long = sorted(int(n) for n in t.shape)
    return short, long


def _packed(declare: Callable[..., Tensor], name: str, sizes: Sequence[int], dtype: str) -> list[Tensor]:
    """Parts of one tensor, side by side; none where there are no sizes."""
    if not sizes:
        return []
    whole, first, spans = declare(name, (sum(sizes),), dtype), 0, []
    for n in sizes:
        spans.append(Span(whole, first, n))
        first += n
    return spans


def _same(part: Tensor, other: Tensor) -> Tensor:
    """The same elements of another tensor."""
    return Span(other, part.first_element, part.size)


def _parts(size: int, count: int) -> list[Part]:
    """The elements [first, end) of a tensor that each of `count` ranks adds up, by rank."""
    return [(size * rank // count, size * (rank + 1) // count) for rank in range(count)]
