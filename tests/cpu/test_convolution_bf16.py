"""bf16 implicit GEMM convolutions: on AMX tiles, on bf16 dot products, and those of other machines emulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from barellm.cpu import isa as isas
from barellm.cpu import jit
from barellm.cpu.kernel import KernelBuilder, Specialisation
from barellm.cpu.kernels.conv import conv_algorithm, conv_implicit_gemm_bf16, conv_wgrad_bf16
from barellm.cpu.kernels.conv.conv_polyphase import PolyphaseLayout
from barellm.cpu.kernels.conv.im2col import ConvGeometry
from barellm.cpu.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.program.ops import Conv2dDw
from barellm.tools.inspect.kernels import X86_TRIPLE
from tests.conv_cases import FORMS, case
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.simulators import amx_emulator

OPS = ("conv2d", "conv2d_dx", "conv2d_dw")
# What every way is tried with; EVERY by one way.
SOME = ("reflected", "of many channels")
MORE = {
    "of one element, strided": ((3, 5, 7, 8), (6, 1, 1), {"stride": (2, 2)}),
    "past the image": ((1, 2, 2, 3), (2, 2, 2), {"padding": (4, 5)}),
}
ALL = FORMS | MORE
LEFT_OUT = ("one pixel", "padded", "of many channels to few", "strided past the filter", "depthwise")
EVERY = [form for form in ALL if form not in (*SOME, *LEFT_OUT)]
KNOWN = isas.ARM if isas.arm() else isas.X86


def pairs_in_fp32(k, acc, a, b):
    """`k.dot` where no instruction does it: the lower and the upper halves of 32 bits are numbers of fp32."""
    for half in (lambda x: x << 16, lambda x: x & -65536):
        acc = k.fma(k.bitcast(half(a), k.vec), k.bitcast(half(b), k.vec), acc)
    return acc


def machine(name: str, monkeypatch: pytest.MonkeyPatch) -> isas.ISA:
    """An ISA whose convolutions take products of pairs of this kind whatever their shape."""
    tiles = name.endswith("tiles")
    monkeypatch.setattr(conv_algorithm, "AMX_SPEEDUP", 1e9 if tiles else 0.0)
    monkeypatch.setattr(conv_algorithm, "DOT_SPEEDUP", 1e6)
    if name == "emulated tiles":
        monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)
        return amx_emulator.ISA_EMULATED
    if name.endswith("lanes"):
        monkeypatch.setattr(KernelBuilder, "dot", pairs_in_fp32)
        lanes = int(name.split()[0])
        return replace(isa_named(ISAS[0]), lanes=lanes, registers=32, dot="emulated", tiles=False, masked=lanes == 16)
    return isa_named("amx_bf16" if tiles else next(n for n in ISAS if KNOWN[n].dot))


MACHINES = [
    *(["emulated tiles"] if amx_emulator.EMULATED else []),
    *(["real tiles"] if "amx_bf16" in ISAS else []),
    *(["real dots"] if any(KNOWN[n].dot for n in ISAS) else []),
    "4 lanes",
]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("on, form", [(on, form) for on in MACHINES for form in (SOME[1:] if "real" in on else SOME)])
@pytest.mark.extended
def test_products_of_pairs(on, name, form, monkeypatch):
    check_op(isa=machine(on, monkeypatch), **case(name, ALL[form], "bf16"))


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.extended
def test_products_of_pairs_of_every_form(name, form, monkeypatch):
    """Sixteen lanes, as the tiles' kernels have them."""
    check_op(isa=machine("16 lanes", monkeypatch), **case(name, ALL[form], "bf16", "add"))


CUT: tuple[Any, ...] = ((3, 38, 6, 5), (35, 3, 3), {"padding": (1, 1)})


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("on", [on for on in MACHINES if "real" in on] or MACHINES[-1:])
def test_bits_do_not_depend_on_how_a_product_is_cut(on, name, monkeypatch):
    """One line at a time, a K block and a split of the output channels."""
    isa = machine(on, monkeypatch)
    whole = check_op(isa=isa, threads=(1,), **case(name, CUT, "bf16"))
    changed(monkeypatch, conv_implicit_gemm_bf16, MAX_POSITIONS=6, SUM_BYTES=4 * 32 * 6, KC=1, PACK_POSITIONS=6)
    monkeypatch.setattr(conv_wgrad_bf16, "SUM_BYTES", 1)  # its KC is part of the result's definition
    cut = check_op(isa=isa, threads=(1, 5), **case(name, CUT, "bf16"))
    for output, values in whole.items():
        assert np.array_equal(values.view(np.uint8), cut[output].view(np.uint8)), output


@pytest.mark.parametrize("on", MACHINES[-1:])
@pytest.mark.extended
def test_blocks_of_several_lines_and_images(on, monkeypatch):
    """A gradient of filters whose blocks are of two lines, then of two images."""
    isa = machine(on, monkeypatch)
    for positions in (12, 80):
        monkeypatch.setattr(conv_wgrad_bf16, "KC", positions)
        check_op(isa=isa, **case("conv2d_dw", CUT, "bf16"))


def test_the_way_follows_from_the_shape():
    """Tiles for many channels; dot products where groups are narrow; fp32 for channels each for itself, for dilations that see many
    lines and for outputs of few pixels."""
    amx, dots = (isas.cross(name, X86_TRIPLE) for name in ("amx_bf16", "avx512_bf16"))

    def geometry(channels: int, size: int = 28, dilation: int = 1, outputs: int | None = None) -> ConvGeometry:
        offsets = (-dilation, 0, dilation)
        return ConvGeometry((size, size), channels, (outputs or size, outputs or size), (1, 1), offsets, offsets)

    def use_amx(isa: isas.ISA, g: ConvGeometry, width: int) -> list[bool | None]:
        g = replace(g, rows=width)
        kernels = [conv_algorithm.select_bf16(isa, "bf16", g, wgrad=wgrad) for wgrad in (False, True)]
        return [kernel and kernel.use_amx for kernel in kernels]

    assert use_amx(amx, geometry(64), 64) == [True, True]
    assert use_amx(amx, geometry(4), 48) == [False, None]
    assert use_amx(dots, geometry(64), 64) == [False, False]
    assert use_amx(amx, geometry(1), 1) == [None, None]
    assert use_amx(amx, geometry(64, 8, 40), 64) == [None, None]
    assert use_amx(amx, geometry(64, 3, 1, 1), 64) == [None, None]
    assert use_amx(amx, geometry(64, 5000), 64) == [None, None]
    assert (
        conv_algorithm.select_bf16(amx, "fp32", replace(geometry(64), rows=64), wgrad=False)
        is conv_algorithm.select_bf16(isas.X86["avx512"], "bf16", replace(geometry(64), rows=64), wgrad=False)
        is None
    )


@pytest.mark.parametrize("isa, instruction", [
    (isas.cross("amx_bf16", X86_TRIPLE), "tdpbf16ps"),
    (isas.cross("avx512_bf16", X86_TRIPLE), "vdpbf16ps"),
    (isas.cross("neon_bf16", "aarch64-unknown-linux-gnu"), "bfdot"),
], ids=lambda v: v if isinstance(v, str) else v.name)  # fmt: skip
def test_images_of_bf16_are_multiplied_by_the_instruction_for_pairs(isa, instruction):
    """With "auto" too: Winograd's algorithm multiplies fp32."""
    p = Program(Store())
    x = p.parameter("x", (1, 64, 28, 28), dtype="bf16")
    y = p.conv2d(x, p.parameter("w", (64, 64, 3, 3)), padding=1)
    p.output("dw", p.apply(Conv2dDw, dy=y, x=x, size=(3, 3), **y_attrs(p)).dw)
    products = 0
    for spec in lower_and_plan({"p": p}, threads=2, isa=isa).specs:
        text = jit.target_machine(isa).emit_assembly(jit.module(spec.ir(isa), isa))
        products += f"\t{instruction}\t" in text
        assert f"\t{instruction}\t" in text or spec.name == "pack_filters"
    assert products == 2


def y_attrs(p: Program) -> dict[str, Any]:
    """The attributes of the program's first convolution."""
    return next(op.attrs for op in p.ops if op.name == "conv2d")


def shared_is_zero(layout: PolyphaseLayout, pitch: int) -> bool:
    """Whether every position that a line of `pitch` shares with the next one lies behind the image's columns for it, and before
    them for the next, in all planes."""
    (phases, first, reach), geometry = layout.columns, layout.geometry

    def column(position: int, phase: int) -> int:
        return (position + first) * geometry.stride[1] + phase

    shared = [(position, i) for position in range(pitch, geometry.output_size[1] + reach) for i in phases]
    return all(column(p, i) >= geometry.input_size[1] and column(p - pitch, i) < 0 for p, i in shared)


def test_lines_are_as_near_each_other_as_the_zeros_between_them_allow():
    shorter, sizes = 0, ((1, 2, 5, 8), (1, 3, 4, 7), (1, 2, 4), (1, 2, 3), range(-5, 3))
    for width, outputs, filters, stride, first in product(*sizes):
        columns = tuple(first + i for i in range(filters))
        geometry = ConvGeometry((1, width), 1, (1, outputs), (1, stride), (0,), columns)
        layout = PolyphaseLayout(geometry, lines=2, tile_m=16)
        assert shared_is_zero(layout, layout.pitch)
        assert not any(shared_is_zero(layout, pitch) for pitch in range(outputs, layout.pitch))
        shorter += layout.pitch < outputs + layout.columns.reach
    assert shorter > 100
