"""Sharding of the optimizer's state over data-parallel ranks: ZeRO-1 (Rajbhandari et al. 2020).

Each rank holds all parameters and gradients, but the optimizer's state of its own shard only. A step ends so: a reduce-scatter
gives each rank the gradient of its shard, summed over the ranks in their order; an all-gather of partial sums gives the gradient
norm; each rank updates its shard; an all-gather gives the new parameters to all.

Shards are cut where the partial sums of the norm are, so the norm is bitwise that of one process.
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

# Elements of a shard in a bucket of the reduce-scatter: what arrives should still be in a cache when it is added. Buckets of 32 MB
# made steps of gpt2-124m on two ranks 1.07 times as long.
BUCKET_ELEMENTS = 1 << 20
MIN_BUCKETS = (
    32  # at least, of gradients that travel during the backward pass; fewer where they would be less than a chunk
)
Part = tuple[int, int]  # elements of a tensor, from and to


@dataclass(frozen=True)
class OptimizerSharding:
    """`parts`: of each parameter, by its name, the elements that each rank updates. `early`: the reduce-scatter overlaps the
    backward pass (`start_reduce_scatter`)."""

    ranks: Ranks
    parts: Mapping[str, Sequence[Part]]
    overlap: bool = False

    def own(self, param: Tensor) -> Tensor | None:
        """This rank's shard of a parameter: the tensor itself, a span of it, or nothing."""
        return _cut(param, self.parts[param.name][self.ranks.rank])

    def reduce(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the reduce-scatter of the gradients of `params`: this rank's shard becomes the sum over all ranks."""
        from barellm.program import ops

        ranks = self.ranks
        if self.overlap:
            self._wait_reduce_scatter(p, params)
            return
        for pieces in self._buckets(params):
            sent = [(t, rank) for rank, theirs in enumerate(pieces) if rank != ranks.rank for t in theirs]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(sent)}
            operands["to"] = [(rank,) for _, rank in sent]
            owned = [p.gradient_of(t) for t in pieces[ranks.rank]]
            found = p.apply(ops.AllToAll, **operands, own=[t.size for t in owned], ranks=ranks)
            for own, parts in zip(owned, found.outputs.values(), strict=True):
                p.apply(ops.SumOverRanks, into={"y": (own, "store")}, own=own, others=parts, rank=ranks.rank)

    def start_reduce_scatter(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append to the backward pass the non-blocking sends of the gradients of `params`, where they are `early`. All ranks send a
        bucket when all its gradients are complete, those of their own shard too: so all in one order."""
        from barellm.program import ops

        ranks = self.ranks
        for number, pieces in enumerate(self._overlapped_buckets(params)):
            all_ = [(t, (rank,) if rank != ranks.rank else ()) for rank, theirs in enumerate(pieces) for t in theirs]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(all_)}
            buffers = self._receive_buffers(p, number, pieces)
            how: dict[str, Any] = {"to": [to for _, to in all_], "own": [t.size for t in pieces[ranks.rank]]}
            into = {f"y{i}": (t, "store") for i, t in enumerate(buffers)}
            with p.segment(_place(pieces)):
                p.apply(ops.StartAllToAll, into=into, **operands, **how, number=number, ranks=ranks)

    def _wait_reduce_scatter(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the waits for each bucket that `start_reduce_scatter` has sent, and their sums."""
        from barellm.program import ops

        ranks = self.ranks
        for number, pieces in enumerate(self._overlapped_buckets(params)):
            buffers = self._receive_buffers(p, number, pieces)
            with p.segment(_place(pieces)):
                operands: dict[str, Any] = {f"x{i}": t for i, t in enumerate(buffers)}
                into = {f"y{i}": (t, "store") for i, t in enumerate(buffers)}
                p.apply(ops.WaitAllToAll, into=into, **operands, number=number, ranks=ranks)
                for t, others in zip(pieces[ranks.rank], buffers, strict=True):
                    own = p.gradient_of(t)
                    p.apply(ops.SumOverRanks, into={"y": (own, "store")}, own=own, others=others, rank=ranks.rank)

    def _overlapped_buckets(self, params: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
        """Buckets in about the order in which a backward pass completes gradients: that of the forward pass, from its end."""
        share = sum(t.size for t in params) // self.ranks.count
        return self._buckets(list(reversed(params)), min(BUCKET_ELEMENTS, max(share // MIN_BUCKETS, CHUNK)))

    def _receive_buffers(self, p: Program, number: int, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The receive buffers of a bucket's pieces of this rank's shard, preallocated and used for nothing else."""
        others = self.ranks.count - 1
        return [
            p.cache(f"arrived.{number}.{i}", (others, t.size), "fp32") for i, t in enumerate(pieces[self.ranks.rank])
        ]

    def _buckets(self, params: Sequence[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[list[Tensor]]]:
        """The buckets: pieces of each rank's shard that are exchanged at once, by rank, of so many elements each."""
        shards = [[(t, self.parts[t.name][rank]) for t in params] for rank in range(self.ranks.count)]
        of_ranks = [list(_buckets(share, elements)) for share in shards]
        for pieces in zip_longest(*of_ranks, fillvalue=()):
            yield [list(theirs) for theirs in pieces]

    def partials(self, p: Program, params: Sequence[Tensor]) -> list[Tensor]:
        """Append the reduce-scatter of the gradients, and an all-gather of the partial sums of their squares."""
        found = [p.activation(f"{t.name}.partials", (-(-t.size // CHUNK),), "fp32") for t in params]
        if self.ranks.direct:
            self._reduce_scatter_shards(p, params, found)
        else:
            self.reduce(p, params)
            self._squares(p, params, found)
        self._gather(p, [(t, self._chunks(param)) for t, param in zip(found, params, strict=True)])
        return found

    def _reduce_scatter_shards(self, p: Program, params: Sequence[Tensor], partials: Sequence[Tensor]) -> None:
        """The sums and the partial sums of squares of this rank's share, of what it reads of the others' memory: an op for each
        part of the model. The ranks meet before the first, when all have their gradients, and after the last."""
        from barellm.program import ops

        groups = self._groups(list(zip(params, partials, strict=True)))
        for number, group in enumerate(groups):
            operands, into, to = self._operands_of_shards(p, group)
            meets = (number == 0, number == len(groups) - 1)
            largest = max((t for t, _ in group), key=lambda t: t.size)
            with p.segment(_place([[largest]])):
                p.apply(ops.ReduceScatter, into=into, **operands, to=to, meets=meets, ranks=self.ranks)

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

    def _operands_of_shards(
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

    def all_gather(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the all-gather of the updated parameters."""
        self._gather(p, [(t, self.parts[t.name]) for t in params])

    def _gather(self, p: Program, shards: Sequence[tuple[Tensor, Sequence[Part]]]) -> None:
        from barellm.program import ops
        from barellm.program.tensor import Span

        rank, count = self.ranks.rank, self.ranks.count
        sent = [Span(t, *_sized(parts[rank])) for t, parts in shards if _sized(parts[rank])[1]]
        wanted = [(source, t, parts[source]) for t, parts in shards for source in range(count) if source != rank]
        received = [(source, Span(t, *_sized(part))) for source, t, part in wanted if _sized(part)[1]]
        p.apply(
            ops.AllGather,
            into={f"y{i}": (t, "store") for i, (_, t) in enumerate(received)},
            **{f"x{i}": t for i, t in enumerate(sent)},
            to=[tuple(other for other in range(count) if other != rank)] * len(sent),
            source=[source for source, _ in received],
            specs=[(t.shape, t.dtype) for _, t in received],
            exact=p.store.exact,
            ranks=self.ranks,
        )


def shard(ranks: Ranks, *, whole: Sequence[Tensor], cut: Sequence[Tensor], overlap: bool = False) -> OptimizerSharding:
    """Load balancing: parameters of `whole` are updated by one rank each (longest processing time first: the costliest goes to the
    rank with the least work so far). Those of `cut` are divided into chunks of the norm's partial sums, as many for each rank; the
    remainder goes to the ranks that have least. `overlap`: with message passing, the reduce-scatter overlaps the backward pass."""
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
    return OptimizerSharding(ranks, parts, overlap=overlap and not ranks.direct)


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


def _buckets(share: Iterable[tuple[Tensor, Part]], elements: int) -> Iterator[list[Tensor]]:
    """A shard, cut into buckets of so many elements."""
    found: list[Tensor] = []
    room = elements
    for t, (first, end) in share:
        while first < end:
            count = min(room, end - first)
            piece = _cut(t, (first, first + count))
            assert piece is not None
            found.append(piece)
            first, room = first + count, room - count
            if room == 0:
                yield found
                found, room = [], elements
    if found:
        yield found
