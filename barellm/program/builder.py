"""Program: the list of ops, and the methods that a model calls. Each call appends; nothing runs."""

from barellm.program.backward import backward
from barellm.program.graph import Store
from barellm.program.ops import convolution, cross_entropy, documents, embedding, pooling, softcap
from barellm.program.ops.attention import attention, block_sparse_attention, qk_rotary, rope
from barellm.program.ops.base import Op, Tensor
from barellm.program.ops.gemm import block_matmul, matmul
from barellm.program.ops.norm import groupnorm, layernorm, rmsnorm, softmax
from barellm.program.ops.optim import exponent_stats
from barellm.program.ops.pointwise import binary, dropout, elementwise, gates, mix, random, swiglu, top_k, transpose

__all__ = ["Program", "Store"]


class Program(
    attention.Calls, binary.Calls, block_matmul.Calls, convolution.Calls, cross_entropy.Calls, documents.Calls,
    dropout.Calls, elementwise.Calls, embedding.Calls, exponent_stats.Calls, gates.Calls, groupnorm.Calls, layernorm.Calls,
    block_sparse_attention.Calls, matmul.Calls, qk_rotary.Calls, mix.Calls, pooling.Calls, random.Calls, rmsnorm.Calls,
    rope.Calls, softcap.Calls, softmax.Calls, swiglu.Calls, top_k.Calls, transpose.Calls,
):  # fmt: skip
    """A list of primitive ops over named tensors (`program.graph.Graph`). Each family of ops brings the calls that append it."""

    def backward(self, loss: Tensor, *, recompute: bool = False) -> dict[Tensor, tuple[Tensor, Op]]:
        """Append the backward ops of `loss` (1,): each parameter that leads to it gets a gradient, `NAME.grad` in the store.
        `recompute` drops the activations of segments and computes them again: less memory, more work. Gives the gradients of the
        forward tensors, each with the op behind which it is finished."""
        return backward(self, loss, recompute=recompute)
