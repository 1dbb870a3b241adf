"""AdamW (Loshchilov and Hutter 2019): one pass over memory per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from barellm.config import OptimConfig
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.ops.pointwise.random import STATE_STREAMS

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

MOMENTS = {"fp32": ("fp32", "fp32"), "16bit": ("e6m9", "ue6m10"), "16bit-stochastic": ("e6m9", "ue6m10")}


@dataclass(frozen=True)
class AdamW:
    """AdamW with these constants. `moments`: how both moments are stored. The learning rate is the run's times `lr_scale`."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: str = "fp32"
    lr_scale: float = 1.0
    whole: ClassVar[bool] = False

    def update(self, p: "Program", params: "Sequence[Tensor]", clip: "Tensor") -> None:
        """An op for each parameter (`Optimizer.update`), with its moments as state "NAME.m" and "NAME.v"."""
        dtype_m, dtype_v = MOMENTS[self.moments]
        for param in params:
            # Each parameter's random bits are a stream of their own.
            stream = STATE_STREAMS + p.store.of_role("parameter").index(param.base) if "stochastic" in self.moments else None
            p.apply(
                ops.AdamW, param=param, grad=p.gradient_of(param), clip=clip,
                m=p.state(f"{param.base.name}.m", param.shape, dtype_m),
                v=p.state(f"{param.base.name}.v", param.shape, dtype_v), beta1=self.beta1, beta2=self.beta2, eps=self.eps,
                weight_decay=self.weight_decay, stream=stream, bf16=param.base.bf16 or None, lr_scale=self.lr_scale,
            )  # fmt: skip


def adamw_rules(config: OptimConfig) -> list[Rule]:
    """The table for `optim.name adamw`. Weight decay acts on matrices only, embeddings included; biases and norms have none. Also
    only matrices have 16-bit moments, since the rest is a thousandth of the parameters."""
    matrices = AdamW(config.beta1, config.beta2, config.eps, config.weight_decay, config.moments)
    return [Rule("*", ndim=2, optimizer=matrices), Rule("*", optimizer=replace(matrices, weight_decay=0.0, moments="fp32"))]


def adamw(p: "Program", config: OptimConfig) -> None:
    update(p, adamw_rules(config), clip=config.clip)
