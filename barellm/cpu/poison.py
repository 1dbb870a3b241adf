"""Debug mode (`runtime.poison`) on the CPU: a call that fills a tensor's bytes after its last use."""

from collections.abc import Mapping, Sequence

from barellm.cpu.kernel import Call, Specialisation
from barellm.program.ops.base import Op
from barellm.program.planner import Plan
from barellm.runtime.lowering import Region, part
from barellm.runtime.poison import deaths


def fill(k, out, count) -> None:
    """Fill `count` 4-byte words with ones."""
    ones = k.const(-1, k.ivec)
    with k.parallel_range(count, 16384) as (begin, end):
        full_end = end - (end - begin) % k.lanes
        with k.loop(begin, full_end, k.lanes) as i:
            out.store_raw(ones, i)
        with k.when(full_end < end):
            out.store_raw(ones, full_end, k.mask_first(end - full_end))


def with_poison(ops: Sequence[Op], calls: Mapping[Op, list[Call]], plan: Plan, program: str) -> list[Call]:
    """The calls of all ops, with a fill after the op at which, by the plan, a tensor dies."""
    dead = deaths(plan, program)
    out: list[Call] = []
    for i, op in enumerate(ops):
        out += calls[op]
        out += [_fill_call(part(t), op) for t in dead.get(i, [])]
    return out


def _fill_call(region: Region, op: Op) -> Call:
    words = (region.stop - region.start) // 4
    return Call(Specialisation(fill, ("i32", "int"), ()), [region, words], [], [region], op)
