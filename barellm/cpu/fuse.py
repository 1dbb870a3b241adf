"""The CPU's fusion table: which sequences of primitive ops one kernel does. First row wins."""

from barellm.cpu.isa import ISA
from barellm.cpu.kernels.pointwise.activations import EMITTERS
from barellm.program.fusion import Fusion
from barellm.runtime.fusions import CLASSIFIER, CODED, NORMS_BACKWARD, RMSNORMS_BACKWARD, products, quantized, rescaled


def with_squares(name: str, inputs: dict[str, str], others: tuple[str, ...], optional: tuple[str, ...] = ()) -> Fusion:
    """The fusion of an op that stores a weight gradient with the sums of its squares. `others`: its further outputs."""
    return Fusion(
        f"{name}_squares", [(name, {}), ("block_squares", {"x": "0.dweight"})], inputs,
        {"dweight": "0.dweight", "squares": "1.partials", **{other: f"0.{other}" for other in others}}, optional=optional,
        when=lambda ops: ops[0].x.dtype == "bf16", kernel=name,
    )  # fmt: skip


FUSIONS: list[Fusion] = [
    *CLASSIFIER, *CODED, *rescaled(EMITTERS), *products(EMITTERS), *quantized(EMITTERS), *NORMS_BACKWARD, *RMSNORMS_BACKWARD,
]  # fmt: skip

# Behind all others, where products go in AMX tiles: their results are blocks of a size that no choice changes.
_LOSS = {name: f"0.{name}" for name in ("x", "weight", "targets", "loss_scale")}
SQUARES: list[Fusion] = [
    with_squares("matmul_dw", {"dy": "0.dy", "x": "0.x"}, ()),
    with_squares("classifier", _LOSS, ("loss", "dx"), optional=("loss_scale",)),
    with_squares("softcapped_classifier", _LOSS, ("loss", "next_loss", "dx"), optional=("loss_scale",)),
]


def table(isa: ISA) -> list[Fusion]:
    """The rows that apply on an instruction set."""
    return [*FUSIONS, *SQUARES] if isa.tiles else FUSIONS
