"""Which rank updates what, where a run has several: ZeRO's first stage (Rajbhandari et al. 2020).

Each rank holds the whole model and its gradient, but the optimizer's state of its own share only. A step ends so: each rank
gets the gradient of its share, added up over all ranks in their order; the norm is found from all shares; each rank updates its
own; and the new weights are given to all.

Shares are cut where the partial sums of the norm are, so that these, and with them the norm and its bits, are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.ranks import Ranks

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

# Elements of a share that are exchanged at once: what arrives should still be in a cache when it is added. Exchanges of 32 MB made
# steps of gpt2-124m on two ranks 1.07 times as long.
TOGETHER = 1 << 20
EARLY_ROUNDS = (
    32  # at least, of gradients that travel during the backward pass; fewer where they would be less than a chunk
)
Part = tuple[int, int]  # elements of a tensor, from and to


@dataclass(frozen=True)
class Dealing:
    """`parts`: of each parameter, by its name, the elements that each rank updates. `early`: gradients begin to travel while the
    backward pass goes on (`depart`)."""

    ranks: Ranks
    parts: Mapping[str, Sequence[Part]]
    early: bool = False

    def own(self, param: Tensor) -> Tensor | None:
        """This rank's share of a parameter: the tensor itself, a span of it, or nothing."""
        return _cut(param, self.parts[param.name][self.ranks.rank])

    def reduce(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append what makes this rank's share of the gradients of `params` the sum over all ranks."""
        from barellm.program import ops

        ranks = self.ranks
        if self.early:
            self._arrive(p, params)
            return
        for pieces in self._rounds(params):
            sent = [(t, rank) for rank, theirs in enumerate(pieces) if rank != ranks.rank for t in theirs]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(sent)}
            operands["to"] = [(rank,) for _, rank in sent]
            owned = [p.gradient_of(t) for t in pieces[ranks.rank]]
            found = p.apply(ops.Exchange, **operands, own=[t.size for t in owned], ranks=ranks)
            for own, parts in zip(owned, found.outputs.values(), strict=True):
                p.apply(ops.AddRanks, into={"y": (own, "store")}, own=own, others=parts, rank=ranks.rank)

    def depart(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append to the backward pass what sends the gradients of `params` on their way, each as soon as it is whole, where they
        are `early`. All ranks send a round when all its gradients are whole, those of their own share too: so all in one order."""
        from barellm.program import ops

        ranks = self.ranks
        for number, pieces in enumerate(self._early_rounds(params)):
            all_ = [(t, (rank,) if rank != ranks.rank else ()) for rank, theirs in enumerate(pieces) for t in theirs]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(all_)}
            arrived = self._arrived(p, number, pieces)
            how: dict[str, Any] = {"to": [to for _, to in all_], "own": [t.size for t in pieces[ranks.rank]]}
            into = {f"y{i}": (t, "store") for i, t in enumerate(arrived)}
            with p.segment(_place(pieces)):
                p.apply(ops.BeginExchange, into=into, **operands, **how, number=number, ranks=ranks)

    def _arrive(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append what waits for each round that `depart` has begun, and adds it."""
        from barellm.program import ops

        ranks = self.ranks
        for number, pieces in enumerate(self._early_rounds(params)):
            arrived = self._arrived(p, number, pieces)
            with p.segment(_place(pieces)):
                operands: dict[str, Any] = {f"x{i}": t for i, t in enumerate(arrived)}
                into = {f"y{i}": (t, "store") for i, t in enumerate(arrived)}
                p.apply(ops.EndExchange, into=into, **operands, number=number, ranks=ranks)
                for t, others in zip(pieces[ranks.rank], arrived, strict=True):
                    own = p.gradient_of(t)
                    p.apply(ops.AddRanks, into={"y": (own, "store")}, own=own, others=others, rank=ranks.rank)

    def _early_rounds(self, params: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
        """Rounds in about the order in which a backward pass ends with gradients: that of the forward pass, from its end."""
        share = sum(t.size for t in params) // self.ranks.count
        return self._rounds(list(reversed(params)), min(TOGETHER, max(share // EARLY_ROUNDS, CHUNK)))

    def _arrived(self, p: Program, number: int, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The places where a round's pieces of this rank's share arrive, which nobody else uses between two steps."""
        others = self.ranks.count - 1
        return [
            p.cache(f"arrived.{number}.{i}", (others, t.size), "fp32") for i, t in enumerate(pieces[self.ranks.rank])
        ]

    def _rounds(self, params: Sequence[Tensor], together: int = TOGETHER) -> Iterator[list[list[Tensor]]]:
        """The pieces of each rank's share that are exchanged at once, by rank: so many elements for each."""
        shares = [[(t, self.parts[t.name][rank]) for t in params] for rank in range(self.ranks.count)]
        of_ranks = [list(_rounds(share, together)) for share in shares]
        for pieces in zip_longest(*of_ranks, fillvalue=()):
            yield [list(theirs) for theirs in pieces]

    def partials(self, p: Program, params: Sequence[Tensor]) -> list[Tensor]:
        """Append the sums of the gradients over the ranks, and what finds the partial sums of their squares."""
        found = [p.activation(f"{t.name}.partials", (-(-t.size // CHUNK),), "fp32") for t in params]
        if self.ranks.direct:
            self._sum_shares(p, params, found)
        else:
            self.reduce(p, params)
            self._squares(p, params, found)
        self._gather(p, [(t, self._chunks(param)) for t, param in zip(found, params, strict=True)])
        return found

    def _sum_shares(self, p: Program, params: Sequence[Tensor], partials: Sequence[Tensor]) -> None:
        """The sums and the partial sums of squares of this rank's share, of what it reads of the others' memory: an op for each
        part of the model. The ranks meet before the first, when all have their gradients, and after the last."""
        from barellm.program import ops

        groups = self._groups(list(zip(params, partials, strict=True)))
        for number, group in enumerate(groups):
            operands, into, to = self._shares_of(p, group)
            meets = (number == 0, number == len(groups) - 1)
            largest = max((t for t, _ in group), key=lambda t: t.size)
            with p.segment(_place([[largest]])):
                p.apply(ops.SumShares, into=into, **operands, to=to, meets=meets, ranks=self.ranks)

    def _groups(self, params: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Runs of parameters, each of one part of the model, or of a few where one of them has nothing for one of the ranks: what
        ranks do together has the same number of ops on all of them, each with something to do."""
        groups: list[list[tuple[Tensor, Tensor]]] = []
        whole = True
        for t, sums in params:
            if whole and (not groups or _place([[t]]) != _place([[groups[-1][-1][0]]])):
                groups.append([])
            groups[-1].append((t, sums))
            whole = all(any(_sized(self.parts[x.name][r])[1] for x, _ in groups[-1]) for r in range(self.ranks.count))
        if not whole and len(groups) > 1:
            groups[-2:] = [groups[-2] + groups[-1]]
        return groups

    def _shares_of(
        self, p: Program, params: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, ...]]]:
        """Operands, results and `to` of the op that sums this rank's share of them."""
        operands: dict[str, Any] = {}
        into: dict[str, Any] = {}
        to: list[tuple[int, ...]] = []
        for t, _ in params:
            for rank, part in enumerate(self.parts[t.name]):
                if rank != self.ranks.rank and (theirs := _cut(t, part)) is not None:
                    operands[f"x{len(operands)}"] = p.gradient_of(theirs)
                    to.append((rank,))
        for t, sums in params:
            if (own := self.own(t)) is not None:
                i = len(into) // 2
                operands[f"own{i}"] = gradient = p.gradient_of(own)
                into |= {f"y{i}": (gradient, "store"), f"p{i}": (self._own_chunks(t, sums), "store")}
                to.append(())
        return operands, into, to

    def restore(self, p: Program, params: Sequence[Tensor], scale: Tensor) -> None:
        """The gradients are as the optimizer wants them already."""

    def _squares(self, p: Program, params: Sequence[Tensor], partials: Sequence[Tensor]) -> None:
        """The partial sums of squares of this rank's share of the gradients."""
        from barellm.program import ops

        for t, sums in zip(params, partials, strict=True):
            if (own := self.own(t)) is not None:
                into = self._own_chunks(t, sums)
                p.apply(ops.SumSquares, into={"partials": (into, "store")}, x=p.gradient_of(own))

    def _chunks(self, param: Tensor) -> list[Part]:
        """The partial sums that each rank finds of a parameter's."""
        return [(-(-first // CHUNK), -(-end // CHUNK)) for first, end in self.parts[param.name]]

    def _own_chunks(self, param: Tensor, partials: Tensor) -> Tensor:
        from barellm.program.tensor import Span

        return Span(partials, *_sized(self._chunks(param)[self.ranks.rank]))

    def give(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append what gives each rank the parameters that the others have updated."""
        self._gather(p, [(t, self.parts[t.name]) for t in params])

    def _gather(self, p: Program, shares: Sequence[tuple[Tensor, Sequence[Part]]]) -> None:
        from barellm.program import ops
        from barellm.program.tensor import Span

        rank, count = self.ranks.rank, self.ranks.count
        sent = [Span(t, *_sized(parts[rank])) for t, parts in shares if _sized(parts[rank])[1]]
        wanted = [(source, t, parts[source]) for t, parts in shares for source in range(count) if source != rank]
        received = [(source, Span(t, *_sized(part))) for source, t, part in wanted if _sized(part)[1]]
        p.apply(
            ops.Gather,
            into={f"y{i}": (t, "store") for i, (_, t) in enumerate(received)},
            **{f"x{i}": t for i, t in enumerate(sent)},
            to=[tuple(other for other in range(count) if other != rank)] * len(sent),
            source=[source for source, _ in received],
            specs=[(t.shape, t.dtype) for _, t in received],
            exact=p.store.exact,
            ranks=self.ranks,
        )


def deal(ranks: Ranks, *, whole: Sequence[Tensor], cut: Sequence[Tensor], overlap: bool = False) -> Dealing:
    """Parameters of `whole` are updated by one rank each: those that cost most are dealt first, each to the rank that has least
    to do so far. Those of `cut` are divided into chunks of the norm's partial sums, as many for each rank; what is left over
    goes to ranks that have least. `overlap`: ranks that send messages begin while the backward pass goes on."""
    parts: dict[str, list[Part]] = {}
    load = [0.0] * ranks.count
    for t in sorted(whole, key=_cost, reverse=True):
        rank = load.index(min(load))
        load[rank] += _cost(t)
        parts[t.name] = [(0, t.size if r == rank else 0) for r in range(ranks.count)]
    held = [0] * ranks.count
    for t in cut:
        chunks = -(-t.size // CHUNK)
        most = sorted(range(ranks.count), key=lambda rank: held[rank])[: chunks % ranks.count]
        at, parts[t.name] = 0, []
        for rank in range(ranks.count):
            end = min(t.size, at + CHUNK * (chunks // ranks.count + (rank in most)))
            parts[t.name].append((at, end))
            held[rank] += end - at
            at = end
    return Dealing(ranks, parts, early=overlap and not ranks.direct)


def _place(pieces: Sequence[Sequence[Tensor]]) -> str:
    """What a profile calls the part of the model whose gradients a round has: that of its last parameter."""
    return ".".join([t for theirs in pieces for t in theirs][-1].base.name.split(".")[:2])


def _cost(t: Tensor) -> float:
    """Operations of an iteration over a matrix, up to a factor."""
    return float(t.size) * (min(int(n) for n in t.shape) if len(t.shape) == 2 else 1)


def _sized(part: Part) -> Part:
    return part[0], part[1] - part[0]


def _cut(t: Tensor, part: Part) -> Tensor | None:
    from barellm.program.tensor import Span

    first, count = _sized(part)
    if count == 0:
        return None
    return t if count == t.size else Span(t, first, count)


def _rounds(share: Iterable[tuple[Tensor, Part]], together: int) -> Iterator[list[Tensor]]:
    """A share, cut into runs of so many elements."""
    found: list[Tensor] = []
    room = together
    for t, (first, end) in share:
        while first < end:
            count = min(room, end - first)
            piece = _cut(t, (first, first + count))
            assert piece is not None
            found.append(piece)
            first, room = first + count, room - count
            if room == 0:
                yield found
                found, room = [], together
    if found:
        yield found
