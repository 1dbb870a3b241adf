"""Communication that a step of several ranks waits for: that of each segment, on each rank."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from barellm.program.grouping import members
from barellm.program.ops.collectives import SumOverRanks, Transfer, WaitAllToAll
from barellm.program.ranks import Ranks


def exposed_seconds(session: Any, seconds: Mapping[str, np.ndarray], ranks: Ranks) -> list[dict[str, Any]]:
    """A row for each kind of communication in the order of the step: program, segment (None: none), op, `count`, and `s`, the
    seconds on each rank with the reduction of what was received. `seconds`: {program: (ops, 2)}, work and wait of this rank's ops.
    Transfers that overlap computation are excluded. The last rank to arrive waits for nobody, so what others take longer than the
    fastest is waiting. All ranks must call it."""
    own: dict[tuple[str, str | None, str], list[float]] = {}
    for program, values in seconds.items():
        for op, spent in zip(session.lowered[program].ops, values, strict=True):
            if isinstance(members(op)[0], (Transfer, WaitAllToAll, SumOverRanks)):
                own.setdefault((program, op.segment, op.name), []).append(float(spent.sum()))
    gathered = ranks.gather([(key, sum(spent)) for key, spent in own.items()])
    by_rank = [dict(pairs) for pairs in gathered]
    return [
        {**dict(zip(("program", "segment", "op"), key, strict=True)), "count": len(own.get(key, [])),
         "s": [seconds_of.get(key, 0.0) for seconds_of in by_rank]}
        for key in dict.fromkeys(key for pairs in gathered for key, _ in pairs)  # unique, in order
    ]  # fmt: skip


def lines(rows: list[dict[str, Any]], step_s: float) -> list[str]:
    """The rows as a table, and the exposed communication: the sum of each row's fastest rank, and of the slowest rank's rows."""
    count = len(rows[0]["s"])
    table = ["", f"{'between ranks':<44}{'segment':<18}" + "".join(f"{f'rank {r} ms':>12}" for r in range(count))]
    for row in rows:
        name = f"{row['program']} {row['op']}"
        times = "".join(f"{s * 1e3:>12.3f}" for s in row["s"])
        table.append(f"{name:<44}{row['segment'] or 'behind all':<18}{times}")
    fastest = sum(min(row["s"]) for row in rows)
    slowest = max(sum(row["s"][r] for row in rows) for r in range(count))
    exposed = f"{fastest * 1e3:.3f} ms, {100 * fastest / step_s:.1f} % of the step"
    table.append(f"exposed: {exposed}; with waiting for others up to {slowest * 1e3:.3f} ms")
    return table
