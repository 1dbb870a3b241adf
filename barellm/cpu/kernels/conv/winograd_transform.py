"""Products of vectors with small constant matrices, as Winograd's transforms are: few operations, between whole vectors."""

from collections.abc import Sequence

from barellm.cpu.kernel import KernelBuilder, Value


def linear(k: KernelBuilder, matrix: Sequence[Sequence[float]], v: list[Value]) -> list[Value]:
    """matrix @ v, of a constant matrix and a list of vectors. Two columns, or two rows, that differ in some signs only share work:
    their sum and their difference are enough (x + y and x - y of the parts that are equal and opposite)."""
    rows = [list(row) for row in matrix]
    for a in range(len(v)):
        for b in range(a + 1, len(v)):
            if _alike([row[a] for row in rows], [row[b] for row in rows]):
                v = list(v)
                v[a], v[b] = v[a] + v[b], v[a] - v[b]
                for row in rows:
                    row[a], row[b] = (row[a], 0.0) if row[a] == row[b] else (0.0, row[a])
    out: dict[int, Value] = {}
    for i, row in enumerate(rows):
        if i in out:
            continue
        twin = next((j for j in range(i + 1, len(rows)) if _alike(row, rows[j])), None)
        if twin is None:
            out[i] = _sum(k, row, v)
            continue
        even = _sum(k, [x if x == y else 0.0 for x, y in zip(row, rows[twin], strict=True)], v)
        odd = _sum(k, [x if x != y else 0.0 for x, y in zip(row, rows[twin], strict=True)], v)
        out[i], out[twin] = even + odd, even - odd
    return [out[i] for i in range(len(rows))]


def _alike(a: list[float], b: list[float]) -> bool:
    """Whether two rows, or columns, differ in the signs of some elements and have others in common."""
    pairs = list(zip(a, b, strict=True))
    return all(x in (y, -y) for x, y in pairs) and any(x == y != 0 for x, y in pairs) and any(x == -y != 0 for x, y in pairs)


def _sum(k: KernelBuilder, row: list[float], v: list[Value]) -> Value:
    """The row times v: first what has the factor 1."""
    terms = sorted(((c, x) for c, x in zip(row, v, strict=True) if c), key=lambda term: term[0] != 1.0)
    (c, total), *rest = terms
    total = total if c == 1.0 else total * c
    for c, x in rest:
        total = total + x if c == 1.0 else total - x if c == -1.0 else k.fma(x, k.to(c, k.vec), total)
    return total


def both_ways(k: KernelBuilder, matrix: Sequence[Sequence[float]], square: list[list[Value]]) -> list[list[Value]]:
    """matrix square matrix^T."""
    columns = [linear(k, matrix, list(column)) for column in zip(*square, strict=True)]
    return [linear(k, matrix, list(row)) for row in zip(*columns, strict=True)]
