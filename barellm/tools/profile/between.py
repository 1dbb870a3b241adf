"""Communication that a step of several ranks waits for: that of each segment, on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from barellm.program.grouping import members
from barellm.program.ops.collectives import AddRanks, EndExchange, Transfer
from barellm.program.ranks import Ranks


def exposed(session: Any, seconds: Mapping[str, np.ndarray], ranks: Ranks) -> list[dict[str, Any]]:
    """Rows in the order of the step: program, segment (None: the op belongs to none), op, `count` of ops, and `s`, their seconds on
    each rank, those of adding counted. `seconds`: program -> (ops, 2), work and waiting of this rank. It computes nothing else
    meanwhile; what has travelled while it did is not in them. The rank that comes last to a meeting waits for nobody: what others
    need more than the quickest is waiting."""
    own: dict[tuple[str, str | None, str], list[float]] = {}
    for program, values in seconds.items():
        for op, spent in zip(session.lowered[program].ops, values, strict=True):
            if isinstance(members(op)[0], (Transfer, EndExchange, AddRanks)):
                own.setdefault((program, op.segment, op.name), []).append(float(spent.sum()))
    of_all = ranks.gather([(key, sum(spent)) for key, spent in own.items()])
    by_rank = [dict(found) for found in of_all]
    return [
        {
            "program": key[0],
            "segment": key[1],
            "op": key[2],
            "count": len(own.get(key, [])),
            "s": [found.get(key, 0.0) for found in by_rank],
        }
        for key in dict.fromkeys(key for found in of_all for key, _ in found)
    ]


def lines(rows: list[dict[str, Any]], step_s: float) -> list[str]:
    """The rows as a table, and what the quickest rank needs for each, together: what is exposed of the communication."""
    count = len(rows[0]["s"])
    found = ["", f"{'between ranks':<44}{'segment':<18}" + "".join(f"{f'rank {r} ms':>12}" for r in range(count))]
    for row in rows:
        name = f"{row['program']} {row['op']}"
        times = "".join(f"{s * 1e3:>12.3f}" for s in row["s"])
        found.append(f"{name:<44}{row['segment'] or 'behind all':<18}{times}")
    least = sum(min(row["s"]) for row in rows)
    most = max(sum(row["s"][r] for row in rows) for r in range(count))
    found.append(
        f"exposed: {least * 1e3:.3f} ms, {100 * least / step_s:.1f} % of the step; with waiting for others up to "
        f"{most * 1e3:.3f} ms"
    )
    return found
