"""Triton's types of blocks, kept: of interpreting small kernels two fifths of the time went into building them anew for every
value, shape by shape and number by number. Each is what Triton's own constructor makes of the same shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter as stock

Shape = tuple[int, ...]
_stock_block_type, _stock_tuple_type = tl.block_type.__init__, core._type_for_tuple_values
_stock_np_dtype = stock._get_np_dtype
_dtypes: dict[str, np.dtype] = {}  # by the scalar's name


def install(scope: Any) -> None:
    """Until `scope` is restored."""
    scope.set_attr(tl.block_type, "__init__", _block_type)
    scope.set_attr(tl.tensor, "__init__", _tensor)
    scope.set_attr(core.tuple, "__eq__", _equal)
    scope.set_attr(core, "_type_for_tuple_values", _tuple_type)
    scope.set_attr(stock, "_get_np_dtype", _np_dtype)


def _numbers(shape: Any) -> Shape:
    return tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])


@cache
def _block(shape: Shape) -> tl.block_type:
    """Of fp32. TypeError or ValueError where there is no such block."""
    made = object.__new__(tl.block_type)
    _stock_block_type(made, tl.float32, list(shape))
    return made


def _block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    known = _block(_numbers(shape))
    self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
    self.name = f"<{known.shape}, {element_ty}>"


@cache
def _seen(shape: Shape) -> tuple[Any, Any]:
    """What a kernel sees of a value's shape: its elements, and the numbers themselves."""
    return core.constexpr(int(np.prod(shape, dtype=np.int64))), core.tuple([core.constexpr(n) for n in shape])


def _tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _seen(_numbers(type.shape) if type.is_block() else ())


def _equal(self: Any, other: Any) -> Any:
    return core.constexpr(self.values == [*_numbers(core._unwrap_if_constexpr(other))])


@cache
def _tuple_of(numbers: Shape) -> Any:
    return _stock_tuple_type(numbers)


def _tuple_type(values: Any, fields: Any = None) -> Any:
    plain = fields is None and all(type(n) is int for n in values)
    return _tuple_of(tuple(values)) if plain else _stock_tuple_type(values, fields)


def _np_dtype(kind: Any) -> np.dtype:
    kind = kind.scalar
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _stock_np_dtype(kind)
    return _dtypes[kind.name]
