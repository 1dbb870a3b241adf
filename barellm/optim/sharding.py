"""Sharding of the optimizer's state over data-parallel ranks: ZeRO-1 (Rajbhandari et al. 2020).

Each rank holds all parameters and gradients, but the optimizer's state of its own shard only. A step ends so: a reduce-scatter
gives each rank the gradient of its shard, summed over the ranks in their order; an all-gather of partial sums gives the gradient
norm; each rank updates its shard; an all-gather gives the new parameters to all.

Shards are cut where the partial sums of the norm are, so the norm is bitwise that of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from barellm.program import ops
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.ranks import Ranks
from barellm.program.tensor import Span, Tensor

if TYPE_CHECKING:
    from barellm.program.builder import Program

# Elements of a shard in a bucket of the reduce-scatter: what arrives should still be in a cache when it is added. Buckets of 32 MB
# made steps of gpt2-124m on two ranks 1.07 times as long.
BUCKET_ELEMENTS = 1 << 20
MIN_BUCKETS = 32  # at least, of gradients that travel during the backward pass; fewer where they would be less than a chunk
Part = tuple[int, int]  # elements of a tensor, from and to


@dataclass(frozen=True)
class OptimizerSharding:
    """`parts`: {parameter's name: [(first, end) of the elements that each rank updates]}. `overlap`: the reduce-scatter overlaps
    the backward pass (`start_reduce_scatter`). In the methods a "bucket" is a list of pieces (spans of parameters) for each rank:
    those of its shard that are exchanged at once."""

    ranks: Ranks
    parts: Mapping[str, Sequence[Part]]
    overlap: bool = False

    def own(self, param: Tensor) -> Tensor | None:
        """This rank's shard of a parameter: the tensor itself, a span of it, or nothing."""
        return _cut(param, self.parts[param.name][self.ranks.rank])

    def reduce(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the reduce-scatter of the gradients of `params`: this rank's shard becomes the sum over all ranks."""
        ranks = self.ranks
        if self.overlap:
            self._wait_reduce_scatter(p, params)
            return
        for bucket in self._buckets(params):
            sent = [(t, rank) for rank, pieces in enumerate(bucket) if rank != ranks.rank for t in pieces]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(sent)}
            operands["to"] = [(rank,) for _, rank in sent]
            owned = [p.gradient_of(t) for t in bucket[ranks.rank]]
            exchange = p.apply(ops.AllToAll, **operands, own=[t.size for t in owned], ranks=ranks)
            for own, received in zip(owned, exchange.outputs.values(), strict=True):
                p.apply(ops.SumOverRanks, into={"y": (own, "store")}, own=own, others=received, rank=ranks.rank)

    def start_reduce_scatter(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append to the backward pass the non-blocking exchange of the gradients of `params`, an op a bucket, which also starts the
        receives of this rank's shard. An op has the gradients of all ranks' pieces as operands, those of this rank's own shard too,
        though they are sent to nobody: so each rank waits until the whole bucket is complete, and all ranks have one order."""
        ranks = self.ranks
        for number, bucket in enumerate(self._overlapped_buckets(params)):
            sends = []  # (piece, its destination ranks)
            for rank, pieces in enumerate(bucket):
                destinations = (rank,) if rank != ranks.rank else ()
                sends += [(t, destinations) for t in pieces]
            operands: dict[str, Any] = {f"x{i}": p.gradient_of(t) for i, (t, _) in enumerate(sends)}
            operands["to"] = [destinations for _, destinations in sends]
            operands["own"] = [t.size for t in bucket[ranks.rank]]
            into = {f"y{i}": (t, "store") for i, t in enumerate(self._receive_buffers(p, number, bucket))}
            with p.segment(_segment_of(bucket)):
                p.apply(ops.StartAllToAll, into=into, **operands, number=number, ranks=ranks)

    def _wait_reduce_scatter(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the waits for each bucket that `start_reduce_scatter` has sent, and their sums."""
        ranks = self.ranks
        for number, bucket in enumerate(self._overlapped_buckets(params)):
            buffers = self._receive_buffers(p, number, bucket)
            with p.segment(_segment_of(bucket)):
                operands: dict[str, Any] = {f"x{i}": t for i, t in enumerate(buffers)}
                into = {f"y{i}": (t, "store") for i, t in enumerate(buffers)}
                p.apply(ops.WaitAllToAll, into=into, **operands, number=number, ranks=ranks)
                for t, others in zip(bucket[ranks.rank], buffers, strict=True):
                    own = p.gradient_of(t)
                    p.apply(ops.SumOverRanks, into={"y": (own, "store")}, own=own, others=others, rank=ranks.rank)

    def _overlapped_buckets(self, params: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
        """Buckets in about the order in which a backward pass completes gradients: that of the forward pass, from its end."""
        share = sum(t.size for t in params) // self.ranks.count
        return self._buckets(list(reversed(params)), min(BUCKET_ELEMENTS, max(share // MIN_BUCKETS, CHUNK)))

    def _receive_buffers(self, p: Program, number: int, bucket: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The preallocated receive buffers (ranks - 1, size) for the pieces of this rank's shard in bucket `number`."""
        others = self.ranks.count - 1
        return [p.cache(f"arrived.{number}.{i}", (others, t.size), "fp32") for i, t in enumerate(bucket[self.ranks.rank])]

    def _buckets(self, params: Sequence[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[list[Tensor]]]:
        """The buckets of the gradients of `params`: [rank][piece], at most `elements` elements of each rank's shard. Ranks whose
        shards have fewer buckets have no pieces in the last ones."""
        shards = [[(t, self.parts[t.name][rank]) for t in params] for rank in range(self.ranks.count)]
        of_ranks = [list(_buckets(shard, elements)) for shard in shards]
        for bucket in zip_longest(*of_ranks, fillvalue=()):
            yield [list(pieces) for pieces in bucket]

    def partials(self, p: Program, params: Sequence[Tensor]) -> list[Tensor]:
        """Append the reduce-scatter of the gradients, and an all-gather of the partial sums of their squares, which are returned:
        of each parameter (ceil(size / CHUNK)). Ranks that read each other's memory (`direct`) do both in one op."""
        partials = [p.activation(f"{t.name}.partials", (-(-t.size // CHUNK),), "fp32") for t in params]
        if self.ranks.direct:
            self._reduce_scatter_shards(p, params, partials)
        else:
            self.reduce(p, params)
            self._squares(p, params, partials)
        all_gather(p, self.ranks, [(t, self._chunks(param)) for t, param in zip(partials, params, strict=True)])
        return partials

    def _reduce_scatter_shards(self, p: Program, params: Sequence[Tensor], partials: Sequence[Tensor]) -> None:
        """Append the reduce-scatter by reads of the other ranks' memory, with the partial sums of squares of this rank's shard: an
        op for each segment of the model (`_groups`). The ranks meet before the first, when gradients are there, and at the end."""
        groups = self._groups(list(zip(params, partials, strict=True)))
        for number, group in enumerate(groups):
            operands, into, to = self._operands_of_shards(p, group)
            meets = (number == 0, number == len(groups) - 1)
            largest = max((t for t, _ in group), key=lambda t: t.size)
            with p.segment(_segment_of([[largest]])):
                p.apply(ops.ReduceScatter, into=into, **operands, to=to, meets=meets, ranks=self.ranks)

    def _groups(self, params: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Consecutive (parameter, partial sums) in groups of one segment of the model each, or of a few segments where one alone
        has no elements for some rank: a collective has the same number of ops on all ranks, each with something to do."""
        groups: list[list[tuple[Tensor, Tensor]]] = []
        complete = True  # every rank has elements of the last group
        for t, sums in params:
            if complete and (not groups or _segment_of([[t]]) != _segment_of([[groups[-1][-1][0]]])):
                groups.append([])
            groups[-1].append((t, sums))
            counts = [sum(_sized(self.parts[x.name][r])[1] for x, _ in groups[-1]) for r in range(self.ranks.count)]
            complete = all(counts)
        if not complete and len(groups) > 1:
            groups[-2:] = [groups[-2] + groups[-1]]
        return groups

    def _operands_of_shards(
        self, p: Program, params: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, ...]]]:
        """The arguments of the ReduceScatter op for a group of (parameter, partial sums): its operands (gradients of the other
        ranks' pieces, x0..., which these read, then of this rank's pieces, own0...), its outputs (sums y and partial sums p of the
        latter), and `to`, the ranks that read each operand."""
        operands: dict[str, Any] = {}
        into: dict[str, Any] = {}
        to: list[tuple[int, ...]] = []
        for t, _ in params:
            for rank, part in enumerate(self.parts[t.name]):
                if rank != self.ranks.rank and (piece := _cut(t, part)) is not None:
                    operands[f"x{len(operands)}"] = p.gradient_of(piece)
                    to.append((rank,))
        for t, sums in params:
            if (own := self.own(t)) is not None:
                i = len(into) // 2
                operands[f"own{i}"] = gradient = p.gradient_of(own)
                into |= {f"y{i}": (gradient, "store"), f"p{i}": (self._own_chunks(t, sums), "store")}
                to.append(())
        return operands, into, to

    def restore(self, p: Program, params: Sequence[Tensor], scale: Tensor) -> None:
        """Nothing: `partials` leaves the gradients as the optimizer wants them. (`Compression` has something to append here.)"""

    def _squares(self, p: Program, params: Sequence[Tensor], partials: Sequence[Tensor]) -> None:
        """Append the partial sums of squares of this rank's shard of the gradients."""
        for t, sums in zip(params, partials, strict=True):
            if (own := self.own(t)) is not None:
                p.apply(ops.SumSquares, into={"partials": (self._own_chunks(t, sums), "store")}, x=p.gradient_of(own))

    def _chunks(self, param: Tensor) -> list[Part]:
        """Which of a parameter's partial sums each rank computes: (first, end), by rank."""
        return [(-(-first // CHUNK), -(-end // CHUNK)) for first, end in self.parts[param.name]]

    def _own_chunks(self, param: Tensor, partials: Tensor) -> Tensor:
        return Span(partials, *_sized(self._chunks(param)[self.ranks.rank]))

    def all_gather(self, p: Program, params: Sequence[Tensor]) -> None:
        """Append the all-gather of the updated parameters."""
        all_gather(p, self.ranks, [(t, self.parts[t.name]) for t in params])


def all_gather(p: Program, ranks: Ranks, shards: Sequence[tuple[Tensor, Sequence[Part]]]) -> None:
    """Append the all-gather of tensors of which each rank has a part; `shards`: (tensor, its parts by rank). It is one op, in which
    this rank sends its part of each tensor to all others, and receives theirs in place. Empty parts are left out."""
    sent: list[Tensor] = []
    received: list[Tensor] = []
    sources: list[int] = []  # of each received part, the rank that sends it
    for t, parts in shards:
        for rank, part in enumerate(parts):
            first, count = _sized(part)
            if count and rank == ranks.rank:
                sent.append(Span(t, first, count))
            elif count:
                received.append(Span(t, first, count))
                sources.append(rank)
    others = tuple(rank for rank in range(ranks.count) if rank != ranks.rank)
    into = {f"y{i}": (t, "store") for i, t in enumerate(received)}
    operands: dict[str, Any] = {f"x{i}": t for i, t in enumerate(sent)}
    specs = [(t.shape, t.dtype) for t in received]
    to = [others] * len(sent)
    p.apply(ops.AllGather, into=into, **operands, to=to, source=sources, specs=specs, exact=p.store.exact, ranks=ranks)


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
    elements = [0] * ranks.count  # of `cut` parameters so far
    for t in cut:
        chunks = -(-t.size // CHUNK)
        one_more = sorted(range(ranks.count), key=lambda rank: elements[rank])[: chunks % ranks.count]
        at, parts[t.name] = 0, []
        for rank in range(ranks.count):
            end = min(t.size, at + CHUNK * (chunks // ranks.count + (rank in one_more)))
            parts[t.name].append((at, end))
            elements[rank] += end - at
            at = end
    return OptimizerSharding(ranks, parts, overlap=overlap and not ranks.direct)


def _segment_of(bucket: Sequence[Sequence[Tensor]]) -> str:
    """The segment of the model under which a profile shows a bucket: the first two parts of its last parameter's name ("h.0")."""
    return ".".join([t for pieces in bucket for t in pieces][-1].base.name.split(".")[:2])


def _cost(t: Tensor) -> float:
    """Operations of a Newton-Schulz step of a matrix, up to a factor: size times the shorter side."""
    return float(t.size) * (min(int(n) for n in t.shape) if len(t.shape) == 2 else 1)


def _sized(part: Part) -> tuple[int, int]:
    """(first, count) of (first, end)."""
    return part[0], part[1] - part[0]


def _cut(t: Tensor, part: Part) -> Tensor | None:
    """The elements [first, end) of a tensor: itself, a span of it, or None where there are none."""
    first, count = _sized(part)
    if count == 0:
        return None
    return t if count == t.size else Span(t, first, count)


def _buckets(shard: Iterable[tuple[Tensor, Part]], elements: int) -> Iterator[list[Tensor]]:
    """A rank's shard, (tensor, elements) in order, cut into buckets of `elements` elements; the last may have fewer."""
    pieces: list[Tensor] = []
    room = elements
    for t, (first, end) in shard:
        while first < end:
            count = min(room, end - first)
            piece = _cut(t, (first, first + count))
            assert piece is not None
            pieces.append(piece)
            first, room = first + count, room - count
            if room == 0:
                yield pieces
                pieces, room = [], elements
    if pieces:
        yield pieces
