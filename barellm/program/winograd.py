"""Winograd's minimal filtering: the matrices of F(m, r): m outputs of a filter of r taps by m + r - 1 multiplications.

    y = A^T ((G g) * (B^T d))        d: m + r - 1 inputs, g: the filter, *: element by element

They follow from m + r - 2 points at which polynomials are multiplied, and infinity (Winograd 1980; Lavin and Gray 2016). In two
dimensions each matrix is applied to rows and to columns. The points 0, +-5/8, +-3/2 have a third of the errors of 0, +-1, +-2."""

from fractions import Fraction
from math import prod

POINTS = {  # m + r - 1 -> the finite points
    4: (Fraction(0), Fraction(1), Fraction(-1)),
    6: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
}

Matrix = list[list[float]]


def _weight(points: tuple[Fraction, ...], i: int) -> Fraction:
    return prod((points[i] - p for j, p in enumerate(points) if j != i), start=Fraction(1))


def output_matrix(m: int, r: int) -> Matrix:
    points = POINTS[m + r - 1]
    return [[float(p**j) for p in points] + [float(j == m - 1)] for j in range(m)]


def filter_matrix(m: int, r: int) -> Matrix:
    points = POINTS[m + r - 1]
    rows = [[float(p**j / _weight(points, i)) for j in range(r)] for i, p in enumerate(points)]
    return [*rows, [float(j == r - 1) for j in range(r)]]


def input_matrix(n: int) -> Matrix:
    """B^T, (n, n), the same for all m and r with m + r - 1 = n. Row i has the coefficients of the product of all (x - p) but that
    of point i; the last row, for the point at infinity, those of all."""
    points = POINTS[n]

    def product(factors: list[Fraction]) -> list[float]:
        c = [Fraction(1)]
        for p in factors:
            c = [low - p * high for low, high in zip([Fraction(0), *c], [*c, Fraction(0)], strict=True)]
        return [float(x) for x in c] + [0.0] * (n - len(c))

    return [product([p for j, p in enumerate(points) if j != i]) for i in range(n)]
