"""Scaling model: the predicted step time on many ranks, from the plan of one rank and a model of the interconnect.
A message of n bytes takes latency + n / rate (Hockney 1994), plus processor time per message. Three algorithms for a collective of
n bytes on each of W ranks (an all-reduce is a reduce-scatter and an all-gather):

direct every rank sends every other its part at once: what barellm does
ring W - 1 steps, in each of which a part goes on to the next rank
tree log2 W steps, halving or doubling what goes to a rank twice as far away (Rabenseifner 2004)

All move n (W - 1) / W bytes each way; they differ in how often latency counts and in messages. Contention is left out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from typing import Any

from barellm.config import Config
from barellm.errors import check_known
from barellm.tools.plan.roofline import NAMED, Ceiling

WAYS = ("direct", "ring", "tree")
STREAMED = 0.85  # of memory's rate: what kernels that mostly move bytes were seen to reach is 0.82 to 0.95
TRIPS = 3  # over the link, of a large message: it is announced, asked for, and sent


@dataclass(frozen=True)
class Link:
    """`latency_s`: one way. `rate`: bytes/s, each way at once. `message_s`: a process's own time for a message."""

    latency_s: float
    rate: float
    message_s: float
    about: str


LINKS = {
    "memory": Link(5e-6, 4e9, 20e-6, "processes of one machine, which read each other's memory"),
    "1gbit": Link(50e-6, 0.119e9, 20e-6, "Ethernet, 1 Gbit/s, with TCP"),
    "1gbit-1ms": Link(1e-3, 0.119e9, 20e-6, "1 Gbit/s and a millisecond, as between neighbouring towns"),
    "10gbit": Link(30e-6, 1.19e9, 10e-6, "Ethernet, 10 Gbit/s, with TCP"),
    "100gbit": Link(5e-6, 11.9e9, 1e-6, "Ethernet, 100 Gbit/s, with RDMA"),
    "ib400": Link(2e-6, 48e9, 0.5e-6, "NDR InfiniBand, 400 Gbit/s for each card"),
    "nvlink4": Link(2e-6, 400e9, 0.5e-6, "NVLink of an H100, 450 GB/s each way"),
}


def link(name: str) -> Link:
    """The link of that name. UserError for one that is not known."""
    check_known("link", name, LINKS)
    return LINKS[name]


def reached(config: Config, ceiling: Ceiling, seconds: float) -> float:
    """The `utilisation` with which `work` gives so many seconds of one rank's step."""
    low, high = 0.0, 1.0
    for _ in range(12):  # bisection: more utilisation, fewer seconds
        middle = (low + high) / 2
        if work(config, 1, ceiling, middle)[0].seconds > seconds:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Collective:
    """A collective of `nbytes` on each rank, in `rounds` that wait for each other. `early`: it may start during the backward pass
    (`optim.overlap`), gradients that are ready first."""

    name: str
    nbytes: float
    rounds: int = 1
    early: bool = False

    def seconds(self, over: Link, ranks: int, way: str) -> float:
        """By the algorithm `way`, one of WAYS: `steps` one after the other, with so many `messages`, and the bytes."""
        if ranks == 1:
            return 0.0
        steps = {"direct": 1, "ring": ranks - 1, "tree": ceil(log2(ranks))}[way]
        messages = max(steps, ranks - 1 if way == "direct" else 0)
        once = steps * TRIPS * over.latency_s + messages * over.message_s
        return self.rounds * once + self.nbytes * (ranks - 1) / ranks / over.rate


@dataclass(frozen=True)
class Work:
    """The seconds of one rank's arithmetic in a step: `forward` and `backward` of its last micro-batch, all micro-batches before
    that one, and the update. `ready`: (seconds since the backward pass began, elements of a gradient that is finished then)."""

    forward: float
    backward: float
    before: float
    update: float
    ready: Sequence[tuple[float, int]]

    @property
    def seconds(self) -> float:
        return self.before + self.forward + self.backward + self.update


def rows_of(config: Config, ranks: int) -> Config:
    """What one rank does: its part of a micro-batch, as a run deals it. Where the ranks do not divide that, it has a whole one, and
    the ranks share the micro-batches of a step, at least one for each."""
    train = config.train
    if train.micro_batch_size % ranks == 0:
        return replace(config, train=replace(train, micro_batch_size=train.micro_batch_size // ranks))
    steps = max(1, ceil(train.gradient_accumulation_steps / ranks))
    return replace(config, train=replace(train, gradient_accumulation_steps=steps))


def work(config: Config, ranks: int, ceiling: Ceiling, utilisation: float) -> tuple[Work, Any]:
    """The arithmetic of one rank's step by the roofline, and the store of its programs. GEMMs reach the share `utilisation` of the
    peak rate, memory-bound ops STREAMED of the bandwidth."""
    from barellm.assembly.build import build_programs
    from barellm.tools.plan.devices import lower

    programs = build_programs(config)
    built, store = lower(programs, "cpu"), programs["forward_backward"].store

    def seconds(op: Any) -> float:
        return max(ceiling.operations(op) / utilisation, ceiling.traffic(op) / STREAMED)

    ops, elapsed = built.lowered["forward_backward"].ops, 0.0
    forward, finished = None, {}
    for op in ops:
        written = [t.base for t in op.outputs.values() if t.base.role == "gradient"]
        if written and forward is None:
            forward = elapsed
        elapsed += seconds(op)
        finished |= dict.fromkeys(written, elapsed)
    forward = forward or 0.0
    ready = sorted((when - forward, t.size) for t, when in finished.items())
    updates = [name for name in built.lowered if name in ("grad_norm", "optimizer_step")]
    update = sum(seconds(op) for name in updates for op in built.lowered[name].ops)
    if not config.optim.powersgd:  # ZeRO's first stage: each rank updates a share, and adds up what arrives for it
        elements = sum(t.size for t in store.of_role("gradient"))
        update = update / ranks + (ranks > 1) * 8 * elements / ranks / ceiling.bandwidth[NAMED["copy"]]
    return Work(forward, elapsed - forward, (config.train.gradient_accumulation_steps - 1) * elapsed, update, ready), store


def collectives(config: Config, store: Any, ranks: int) -> list[Collective]:
    """The collectives of a step: bytes per rank, number of rounds, and whether they overlap with the backward pass. `store`: of the
    run's programs, for its parameters. With PowerSGD both factors are all-reduced, else ZeRO-1 reduces and gathers."""
    from barellm.optim import powersgd, sharding
    from barellm.program.dtypes import FORMATS, itemsize
    from barellm.program.ops.optim.optimizer import CHUNK

    params = store.of_role("parameter")
    elements = sum(t.size for t in params)
    if config.optim.powersgd:
        compression = powersgd.Compression(config.optim.powersgd, None)
        sides = [sorted(int(n) for n in t.shape) for t in params if compression.compresses(t)]
        rest = 4 * sum(t.size for t in params if not compression.compresses(t))
        short, long = (itemsize(powersgd.TRAVELS) * compression.rank * sum(lengths) for lengths in zip(*sides, strict=True))
        return [
            *(Collective(f"factors P and vectors, {phase}", short + rest) for phase in ("summed", "given")),
            *(Collective(f"factors Q, {phase}", long) for phase in ("summed", "given")),
        ]
    weights = 0
    for t in params:
        planes = FORMATS[t.dtype].planes
        weights += t.nbytes if t in store.exact or not planes else FORMATS[planes[0]].nbytes(t.size)
    rounds = ceil(elements / ranks / sharding.BUCKET_ELEMENTS)
    return [
        Collective("gradients", 4 * elements, rounds, early=True),
        Collective("partial sums of the norm", 4 * ceil(elements / CHUNK)),
        Collective("weights", weights),
    ]


def hidden(collective: Collective, done: Work, over: Link, ranks: int, way: str) -> float:
    """Seconds of a collective that overlap with the backward pass: each gradient is sent when it is ready, one after the other."""
    if not collective.early:
        return 0.0
    duration = collective.seconds(over, ranks, way)
    total = sum(size for _, size in done.ready)
    end = 0.0
    for when, size in done.ready:  # gradients leave as soon as they are there, one behind the other
        end = max(end, when) + duration * size / total
    return duration - max(0.0, end - done.backward)


def prediction(
    config: Config, ranks: int, name: str, *, ceiling: Ceiling, utilisation: float, ready: tuple[Work, Any] | None = None
) -> dict[str, Any]:
    """The predicted step on `ranks` ranks over the link `name`, as JSON. `ready`: the result of `work`, if known already."""
    over, run = link(name), rows_of(config, ranks)
    arithmetic, store = ready or work(run, ranks, ceiling, utilisation)
    needed = collectives(config, store, ranks) if ranks > 1 else []
    train = run.train
    tokens = train.micro_batch_size * train.gradient_accumulation_steps * train.seq  # of one rank
    return {
        "preset": config.preset, "ranks": ranks, "link": {"name": name, **asdict(over)}, "batch": train.micro_batch_size,
        "accumulate": train.gradient_accumulation_steps, "seq": train.seq, "tokens": tokens * ranks,
        "powersgd": config.optim.powersgd, "sent_bytes": sum(c.nbytes for c in needed) * (ranks - 1) / ranks,
        "ceiling": ceiling.source, "utilisation": utilisation, "compute_s": arithmetic.seconds,
        "ways": {way: _step_by(way, needed, arithmetic, over, ranks) for way in WAYS},
    }  # fmt: skip


def _step_by(way: str, needed: Sequence[Collective], arithmetic: Work, over: Link, ranks: int) -> dict[str, Any]:
    """Seconds of the collectives by the algorithm `way`, and of the step: with all of them behind the arithmetic, and with those
    that may start during the backward pass overlapped with it. `efficiency`: arithmetic by step."""
    seconds = {c.name: c.seconds(over, ranks, way) for c in needed}
    step_s = arithmetic.seconds + sum(seconds.values())
    overlapped_s = step_s - sum(hidden(c, arithmetic, over, ranks, way) for c in needed)
    return {
        "collectives_s": seconds, "step_s": step_s, "efficiency": arithmetic.seconds / step_s, "overlapped_step_s": overlapped_s,
        "overlapped_efficiency": arithmetic.seconds / overlapped_s,
    }  # fmt: skip


def table(n: dict[str, Any]) -> list[str]:
    """The prediction `n` (the object of `plan --interconnect --json`) as lines of text; times in ms."""
    net = n["link"]
    lines = [
        f"{n['preset']} on {n['ranks']:,} ranks, predicted and not run",
        f"link {net['name']}: {net['latency_s'] * 1e6:g} us, {net['rate'] / 1e9:g} GB/s each way; {net['about']}",
        f"each rank: {n['batch']} x {n['accumulate']} sequences of {n['seq']:,} tokens; all: {n['tokens']:,} tokens a step",
        f"arithmetic: {n['compute_s'] * 1e3:,.1f} ms, at {n['utilisation']:.0%} of the peak ({n['ceiling']})",
        f"each rank sends {n['sent_bytes'] / 1e6:,.1f} MB a step"
        + (f", as factors of {n['powersgd']} columns" if n["powersgd"] else ""),
        "",
        f"{'':<8}{'exchange ms':>14}{'step ms':>12}{'efficiency':>12}{'overlapped ms':>16}{'efficiency':>12}",
    ]
    for way, row in n["ways"].items():
        comm = sum(row["collectives_s"].values())
        lines.append(
            f"{way:<8}{comm * 1e3:>14,.1f}{row['step_s'] * 1e3:>12,.1f}{row['efficiency']:>12.1%}"
            f"{row['overlapped_step_s'] * 1e3:>16,.1f}{row['overlapped_efficiency']:>12.1%}"
        )
    lines += ["", f"{'collectives, direct':<40}{'ms':>12}"]
    lines += [f"  {name:<38}{s * 1e3:>12,.2f}" for name, s in n["ways"]["direct"]["collectives_s"].items()]
    return lines
