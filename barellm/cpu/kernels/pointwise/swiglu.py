"""SwiGLU, gated activations of other kinds, and their gradients. Shapes: gate, up, y, dy, dgate, dup (rows, F). Rows have any
stride: gate and up are often the two halves of one fused GEMM, and their gradients those of its gradient. `name`: the activation;
`strides`: (operand, row stride in elements); `lines`: whether the results' rows fill cache lines; (dims, inner): sizes of rows."""

from typing import Any

from barellm.cpu.kernel import Op, kernel
from barellm.cpu.kernels.loops import shape_of, whole_cache_lines, write_rows
from barellm.cpu.kernels.pointwise.activations import EMITTERS
from barellm.program.ops.pointwise.swiglu import GATED


def constants_of(op: Op) -> dict[str, Any]:
    """Compile-time constants of these kernels, from an op."""
    tensors = op.outputs | op.inputs
    strides = tuple((name, t.row_stride) for name, t in tensors.items())
    name = op.definition.name
    return {"name": name, "F": int(op.gate.shape[-1]), "strides": strides, "lines": whole_cache_lines(op), **shape_of(op.gate)}


def swiglu(k, y, gate, up, *, name, F, strides, lines, dims, inner, mode_y) -> None:
    """y = act(gate) up."""
    stride, value = dict(strides), EMITTERS[name].value
    for row, columns in write_rows(k, k.num_elements(dims) * inner, F, [(y, stride["y"], mode_y)], lines=lines):
        g, u = gate.at(row * stride["gate"]), up.at(row * stride["up"])
        for c, mask, put in columns:
            put(value(k, g.load(c, mask), y.dtype) * u.load(c, mask))


def swiglu_backward(k, dgate, dup, dy, gate, up, *, name, F, strides, lines, dims, inner, mode_dgate, mode_dup) -> None:
    """The kernel: dgate = dy up act'(gate) and dup = dy act(gate), (rows, F), each stored or added (mode_dgate, mode_dup)."""
    stride, both = dict(strides), EMITTERS[name].both
    outs = [(dgate, stride["dgate"], mode_dgate), (dup, stride["dup"], mode_dup)]
    for row, columns in write_rows(k, k.num_elements(dims) * inner, F, outs, lines=lines):
        d, g, u = (p.at(row * stride[name]) for p, name in ((dy, "dy"), (gate, "gate"), (up, "up")))
        for c, mask, put in columns:
            value, slope = both(k, g.load(c, mask), dgate.dtype)
            dy_vector = d.load(c, mask)
            put(dy_vector * u.load(c, mask) * slope, dy_vector * value)


for _op in GATED.values():
    kernel(_op.name, constants=constants_of, views="gate up y")(swiglu)
    kernel(_op.backward.name, constants=constants_of, views="gate up dy dgate dup")(swiglu_backward)
