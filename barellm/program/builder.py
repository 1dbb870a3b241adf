"""Program: the list of ops, and the methods that a model calls. Each call appends; nothing runs."""

from __future__ import annotations

from barellm.program.backward import backward
from barellm.program.graph import Store
from barellm.program.ops import (
    attention,
    binary,
    block_matmul,
    convolution,
    cross_entropy,
    documents,
    dropout,
    elementwise,
    embedding,
    exponent_stats,
    gates,
    groupnorm,
    layernorm,
    layout_attention,
    matmul,
    mix,
    pooling,
    qk_rotary,
    random,
    rmsnorm,
    rope,
    softcap,
    softmax,
    swiglu,
    top_k,
    transpose,
)
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor

__all__ = ["Program", "Store"]


class Program(
    attention.Calls,
    binary.Calls,
    block_matmul.Calls,
    convolution.Calls,
    cross_entropy.Calls,
    documents.Calls,
    dropout.Calls,
    elementwise.Calls,
    embedding.Calls,
    exponent_stats.Calls,
    gates.Calls,
    groupnorm.Calls,
    layernorm.Calls,
    layout_attention.Calls,
    matmul.Calls,
    qk_rotary.Calls,
    mix.Calls,
    pooling.Calls,
    random.Calls,
    rmsnorm.Calls,
    rope.Calls,
    softcap.Calls,
    softmax.Calls,
    swiglu.Calls,
    top_k.Calls,
    transpose.Calls,
):
    """A list of primitive ops over named tensors (`program.graph.Graph`). Each family of ops brings the calls that append it."""

    def backward(self, loss: Tensor, *, recompute: bool = False) -> dict[Tensor, tuple[Tensor, Op]]:
        """Append the backward ops of `loss` (1,): each parameter that leads to it gets a gradient, `NAME.grad` in the store.
        `recompute` drops the activations of segments and computes them again: less memory, more work. Gives the gradients of the
        forward tensors, each with the op behind which it is finished."""
        return backward(self, loss, recompute=recompute)
