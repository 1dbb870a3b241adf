"""Convolution over the pixels of images, and its two gradients.

Shapes: x (N, C, H, W), w (K, C / groups, R, S), y (N, K, P, Q). N may be a Dim; the other sizes are constants of the code."""

from typing import Any

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Dim, Op, Spec, Tensor, describe

ALGORITHMS = ("auto", "direct", "winograd2", "winograd4", "fft")
FFT_MOST = 24  # rows and columns of a filter that a Fourier transform of 32 x 32 pixels takes

Pair = tuple[int, int]


class Convolution(Op):
    """What the three ops share: their attributes `stride`, `padding` and `dilation`, each (of rows, of columns), `groups`,
    `reflect`, `flip_kernel` and `algorithm`."""

    product = True

    def offsets(self, R: int, S: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each row, and for each column, of the filter: how far the pixel that it multiplies lies from `stride` times the
        output's. A flipped filter is read from its end."""
        rows, columns = (
            [t * dilation - padding for t in range(size)]
            for size, dilation, padding in zip((R, S), self.dilation, self.padding, strict=True)
        )
        return (tuple(rows[::-1]), tuple(columns[::-1])) if self.flip_kernel else (tuple(rows), tuple(columns))

    def output_size(self, H: int, W: int, R: int, S: int) -> Pair:
        sizes = zip((H, W), (R, S), self.stride, self.padding, self.dilation, strict=True)
        P, Q = ((n + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 for n, taps, stride, padding, dilation in sizes)
        return P, Q

    def sources(self, size: int, axis: int, offset: int, count: int) -> tuple[Any, Any]:
        """For the outputs 0 to `count` - 1 of an axis: the pixels that a filter's element at `offset` multiplies, and whether there
        are such. A reflected pixel is one of the image."""
        at = np.arange(count) * self.stride[axis] + offset
        if self.reflect:
            at = np.abs(at)
            at = np.where(at < size, at, 2 * (size - 1) - at)
        inside = (at >= 0) & (at < size)
        return np.where(inside, at, 0), inside

    def taps(self, H: int, W: int, R: int, S: int) -> Any:
        """(r, s, rows (P, 1), columns (1, Q), inside (P, Q)) for each element of the filter."""
        P, Q = self.output_size(H, W, R, S)
        row_offsets, column_offsets = self.offsets(R, S)
        for r, row_offset in enumerate(row_offsets):
            rows, rows_in = self.sources(H, 0, row_offset, P)
            for s, column_offset in enumerate(column_offsets):
                columns, columns_in = self.sources(W, 1, column_offset, Q)
                yield r, s, rows[:, None], columns[None, :], rows_in[:, None] & columns_in[None, :]

    def check(self, x: tuple[int, ...], w: tuple[int, ...], found: str) -> None:
        """Raise a ValueError unless images of shape `x` can be convolved with filters of shape `w` by these attributes and this
        algorithm; `found` describes both tensors in the message."""
        name, both = self.name, zip(x[2:], self.padding, strict=True)
        if len(x) != 4 or len(w) != 4 or any(isinstance(n, Dim) for n in x[1:]):
            raise ValueError(f"{name} expects x (N, C, H, W), of which N may be a Dim, and w (K, C / groups, R, S): {found}")
        if self.groups < 1 or x[1] != w[1] * self.groups or w[0] % self.groups:
            raise ValueError(f"{name} expects groups that divide C and K, and w (K, C / groups, R, S): {self.groups}, {found}")
        if min(*self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            given = f"{self.stride}, {self.dilation}, {self.padding}"
            raise ValueError(f"{name} expects a stride and a dilation of 1 or more and a padding of 0 or more: {given}")
        if min(self.output_size(x[2], x[3], w[2], w[3])) < 1:
            raise ValueError(f"{name} expects a dilated filter that is not larger than the padded image: {found}")
        if self.reflect and any(padding >= size for size, padding in both):
            raise ValueError(f"{name} expects a reflected padding below H and W: {self.padding}, {found}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"{name} expects an algorithm among {', '.join(ALGORITHMS)}: {self.algorithm!r}")
        plain = (*self.stride, *self.dilation) == (1, 1, 1, 1)
        if self.algorithm.startswith("winograd") and not (plain and w[2:] == (3, 3)):
            raise ValueError(f"{name} by {self.algorithm} expects filters of 3 x 3, a stride and a dilation of 1: {found}")
        if self.algorithm == "fft" and not (plain and max(w[2:]) <= FFT_MOST):
            most = f"{FFT_MOST} x {FFT_MOST}"
            raise ValueError(f"{name} by fft expects filters of at most {most}, a stride and a dilation of 1: {found}")

    def operations(self, w: tuple[int, ...], y: tuple[int, ...]) -> int:
        """Multiplications and additions of the direct algorithm, whichever is used."""
        N, _, P, Q = (int(n) for n in y)
        K, C, R, S = (int(n) for n in w)
        return 2 * N * K * P * Q * C * R * S


def grouped(a: Any, groups: int, axis: int) -> Any:
    """An array whose `axis` is cut into (groups, the rest)."""
    return a.reshape(*a.shape[:axis], groups, a.shape[axis] // groups, *a.shape[axis + 1 :])


class Conv2d(Convolution):
    """y[n, k, p, q] = the sum over c, r, s of w[k, c, r, s] x[n, c, p stride + r dilation - padding, likewise of q and s].

    Deep learning's convolution is a cross-correlation; `flip_kernel` makes it a true convolution, whose filter is read from its
    end. Padding is zero or, with `reflect`, the mirror image about the outermost pixel."""

    name = "conv2d"

    def infer(self, x: Tensor, w: Tensor) -> dict[str, Spec]:
        self.check(x.shape, w.shape, describe(x=x, w=w))
        return {"y": ((x.shape[0], w.shape[0], *self.output_size(*pixels(x), *pixels(w))), x.dtype)}

    def reference(self, x, w):
        N, _, H, W = x.shape
        K, _, R, S = w.shape
        x, filters = grouped(x, self.groups, 1), grouped(w, self.groups, 0)
        y: Any = 0.0
        for r, s, rows, columns, inside in self.taps(H, W, R, S):
            y = y + np.einsum("gkc,ngcpq->ngkpq", filters[..., r, s], x[..., rows, columns] * inside, optimize=True)
        return {"y": y.reshape(N, K, *y.shape[3:])}

    def gradient(self, g, y):
        dy = g.cast(y, self.x.dtype)
        g.write(Conv2dDx, {"dx": self.x}, dy=dy, w=self.w, size=pixels(self.x), **self.attrs)
        g.write(Conv2dDw, {"dw": self.w}, dy=dy, x=self.x, size=pixels(self.w), **self.attrs)

    def flops(self) -> int:
        return self.operations(self.w.shape, self.y.shape)


class Conv2dDx(Convolution):
    """dx: each output pixel's gradient goes back to the pixels that it was made of. `size` is (H, W)."""

    name = "conv2d_dx"

    def infer(self, dy: Tensor, w: Tensor) -> dict[str, Spec]:
        x = (dy.shape[0], int(w.shape[1]) * self.groups, *self.size)
        found = describe(dy=dy, w=w)
        self.check(x, w.shape, found)
        if tuple(dy.shape[1:]) != (w.shape[0], *self.output_size(self.size[0], self.size[1], *pixels(w))):
            raise ValueError(f"{self.name} expects dy (N, K, P, Q) as conv2d of images of {self.size} makes it: {found}")
        return {"dx": (x, dy.dtype)}

    def reference(self, dy, w):
        _, C, R, S = w.shape
        dy, filters = grouped(dy, self.groups, 1), grouped(w, self.groups, 0)
        dx = np.zeros((dy.shape[0], self.groups, C, *self.size), dy.dtype)
        for r, s, rows, columns, inside in self.taps(self.size[0], self.size[1], R, S):
            back = np.einsum("gkc,ngkpq->ngcpq", filters[..., r, s], dy * inside, optimize=True)
            np.add.at(dx, np.s_[:, :, :, rows, columns], back)  # pyright: ignore
        return {"dx": dx.reshape(dx.shape[0], C * self.groups, *self.size)}

    def flops(self) -> int:
        return self.operations(self.w.shape, self.dy.shape)


class Conv2dDw(Convolution):
    """dw: the sum over images and output pixels of dy times the pixel that each element of the filter multiplied, in an order that
    the shapes fix. `size` is (R, S)."""

    name = "conv2d_dw"

    def infer(self, dy: Tensor, x: Tensor) -> dict[str, Spec]:
        w = (int(dy.shape[1]), int(x.shape[1]) // self.groups, *self.size)
        found = describe(dy=dy, x=x)
        self.check(x.shape, w, found)
        if (dy.shape[0], *dy.shape[2:]) != (x.shape[0], *self.output_size(*pixels(x), self.size[0], self.size[1])):
            raise ValueError(f"{self.name} expects dy (N, K, P, Q) as conv2d with filters of {self.size} makes it: {found}")
        return {"dw": (w, "fp32")}

    def reference(self, dy, x):
        K = dy.shape[1]
        _, C, H, W = x.shape
        x, dy = grouped(x, self.groups, 1), grouped(dy, self.groups, 1)
        dw = np.zeros((self.groups, K // self.groups, C // self.groups, *self.size), dy.dtype)
        for r, s, rows, columns, inside in self.taps(H, W, *self.size):
            seen = x[..., rows, columns] * inside
            dw[..., r, s] = np.einsum("ngkpq,ngcpq->gkc", dy, seen, optimize=True)
        return {"dw": dw.reshape(K, C // self.groups, *self.size)}

    def flops(self) -> int:
        return self.operations((self.dy.shape[1], int(self.x.shape[1]) // self.groups, *self.size), self.dy.shape)


def phases(offsets: tuple[int, ...], stride: int, size: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """How the gradient of an axis of `size` pixels falls apart into convolutions of stride 1, one for each remainder of a pixel's
    place by the stride: how many such pixels there are, which elements of the filter touched them, and at which offsets from a
    pixel's number among them lie the outputs that did."""
    found = []
    for first in range(min(stride, size)):
        taps = tuple(t for t, offset in enumerate(offsets) if (first - offset) % stride == 0)
        found.append((-(-(size - first) // stride), taps, tuple((first - offsets[t]) // stride for t in taps)))
    return found


def pixels(images: Tensor) -> Pair:
    return int(images.shape[2]), int(images.shape[3])


def pair(value: int | Pair) -> Pair:
    """A size for rows and columns, or one for both."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class Calls(Graph):
    def conv2d(
        self, x: Tensor, w: Tensor, *, stride: int | Pair = 1, padding: int | Pair = 0, dilation: int | Pair = 1, groups: int = 1,
        padding_mode: str = "zeros", flip_kernel: bool = False, algorithm: str = "auto", **old_names: bool,
    ) -> Tensor:  # fmt: skip
        """x (N, C, H, W), w (K, C / groups, R, S) -> (N, K, P, Q), with P = (H + 2 padding - dilation (R - 1) - 1) // stride + 1.
        Sizes are one number, or one for rows and one for columns. `padding_mode` is "zeros" or "reflect"; `flip_kernel` reads the
        filter from its end. The old names `reflect=True` and `mirrored` are accepted too."""
        sizes = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
        reflect = padding_mode == "reflect"
        if not reflect and padding_mode != "zeros":
            raise ValueError(f'conv2d expects padding_mode "zeros" or "reflect": {padding_mode!r}')
        reflect, flip_kernel = old_names.pop("reflect", reflect), old_names.pop("mirrored", flip_kernel)
        if old_names:
            raise TypeError(f"conv2d() got an unexpected keyword argument {next(iter(old_names))!r}")
        how = {"groups": groups, "reflect": reflect, "flip_kernel": flip_kernel, "algorithm": algorithm}
        return self.apply(Conv2d, x=x, w=w, **sizes, **how).y
