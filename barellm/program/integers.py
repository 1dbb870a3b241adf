"""Division and rounding of sizes, in Python's integers."""


def ceil_div(a: int, b: int) -> int:
    """How many pieces of size `b` cover `a`."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below n."""
    return ceil_div(n, multiple) * multiple
