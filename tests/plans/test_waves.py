"""Tiling of GEMMs on a GPU: waves, padding and occupancy, by hand and by the backend's own launches."""

import json

import pytest

from barellm.assembly.build import build_programs
from barellm.cli import main
from barellm.config.overrides import changed
from barellm.cuda.kernel import Sizes, Target
from barellm.errors import UserError
from barellm.models import preset
from barellm.tools.plan import devices, waves
from barellm.tools.plan.roofline import primitives

H100 = devices.sheet("h100")


def tilings(M, N, K, dtype="bf16"):
    """By transpose mode."""
    built = devices.lower({"product": waves.one_gemm(M, N, K, dtype)}, Target())
    return {tiling.transpose_mode: tiling for tiling in waves.gemms(built, ["product"], Sizes(batch=M))}


@pytest.mark.parametrize(
    "shape, transpose_mode, tiles, split_k, percent",
    [
        ((65536, 768, 768), "nt", 1536, 1, 97),
        ((65536, 768, 768), "tn", 18 * 7, 7, 95),
        ((65536, 2304, 768), "tn", 54 * 7, 7, 95),
        ((65536, 3072, 768), "tn", 72 * 9, 9, 98),
        ((65536, 50304, 768), "tn", 1179, 1, 99),
    ],
    ids=str,
)
def test_waves_of_gpt2_on_132_multiprocessors(shape, transpose_mode, tiles, split_k, percent):
    tiling = tilings(*shape)[transpose_mode]
    assert (tiling.tiles, tiling.split_k, tiling.padding) == (tiles, split_k, 0)
    assert round(100 * tiling.efficiency) == percent


def test_an_odd_product_hangs_over_its_tiles_and_leaves_multiprocessors_idle():
    """1000 columns of tiles of 64 or 128 rows: 1024 x 1024 are computed, by 128 of 132 multiprocessors."""
    for tiling in tilings(1000, 1000, 1000).values():
        assert tiling.padding == pytest.approx(1 - 1000**2 / 1024**2)
        assert tiling.idle == pytest.approx(4 / 132) and tiling.waves == 1
        assert tiling.efficiency == pytest.approx(1000**2 / 1024**2 * 128 / 132)


def test_a_few_rows_are_no_padding():
    tiling = tilings(5, 3072, 768)["nt"]
    assert (tiling.kernel, tiling.M, tiling.tile_m, tiling.padding) == ("skinny_gemm", 5, 5, 0)


def test_blocks_of_a_multiprocessor_share_it():
    """More blocks at a time make fewer waves; the busiest multiprocessor has as many tiles as before."""
    one = waves.Tiling("gemm", "nt", 1024, 1024, 1024, "bf16", 64, 64, 1, 132, 1)
    two = waves.Tiling("gemm", "nt", 1024, 1024, 1024, "bf16", 64, 64, 1, 132, 2)
    assert (one.tiles, one.waves, two.waves) == (256, 2, 1)
    assert (round(100 * one.idle), round(100 * two.idle)) == (6, 3)
    assert one.efficiency == two.efficiency == 256 / 264


def test_the_speed_of_light_is_that_of_memory_or_of_the_tensor_cores():
    large, small = tilings(8192, 8192, 8192)["nt"], tilings(16, 4096, 4096)["nt"]
    assert large.roofline_s(H100) == pytest.approx(2 * 8192**3 / 989.4e12)
    assert small.roofline_s(H100) == pytest.approx(2 * (4096 * 4096 + 2 * 16 * 4096) / (0.9 * 3.35e12))


@pytest.mark.parametrize(
    "threads, registers, shared, blocks",
    [(384, 168, 200 << 10, 1), (128, 255, 0, 2), (128, 32, 100 << 10, 2), (1024, 32, 0, 2), (32, 16, 0, 32), (96, 33, 0, 17)],
    ids=str,
)  # fmt: skip
def test_registers_shared_memory_threads_or_their_number_limit_blocks(threads, registers, shared, blocks):
    assert waves.Multiprocessor().occupancy(threads=threads, registers=registers, shared=shared) == blocks


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-124m"])
def test_the_products_of_a_step_are_all_its_operations_but_attentions(name):
    config = changed(preset(name), {"train.dtype": "bf16", "train.micro_batch_size": 2, "train.seq": 1024, "model.layers": 2})
    built = devices.lower({"forward_backward": build_programs(config)["forward_backward"]}, Target())
    found = waves.gemms(built, ["forward_backward"], Sizes(2, 1024))
    done = sum(2 * c.M * c.N * c.K * count for c, count in found.items())
    ops = [p for op in built.lowered["forward_backward"].ops for p in primitives(op)]
    assert done == sum(op.flops() for op in ops if op.product and op.name.startswith("matmul"))


def test_products_that_other_kernels_do_are_said():
    config = changed(preset("gpt2-124m"), {"train.dtype": "bf16", "train.micro_batch_size": 2, "train.seq": 64, "model.layers": 2})
    built = devices.lower({"forward_backward": build_programs(config)["forward_backward"]}, Target())
    assert waves.uncounted(built, ["forward_backward"]) == {"attention": 2, "attention_backward": 2}
    assert waves.uncounted(devices.lower({"product": waves.one_gemm(8, 8, 8, "bf16")}, Target()), ["product"]) == {}


def test_the_command_prints_a_product_of_any_shape(capsys):
    assert main.main(["plan", "--device", "cuda", "--gemm", "300", "7", "50", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["gemms"]
    assert {(c["transpose_mode"], c["M"], c["N"], c["K"]) for c in found} == {
        ("nt", 300, 7, 50), ("nn", 300, 50, 7), ("tn", 7, 50, 300),
    }  # fmt: skip
    assert main.main(["plan", "gpt2-124m", "--device", "cuda", "--dtype", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "hopper_gemm" in said and "not counted, as their tiles are not known here: attention 12, attention_b" in said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gemm", "1", "2", "3"], "add --device cuda"),
        (["--device", "cuda", "--gemm", "1", "0", "3"], "sizes of at least 1"),
        (["--device", "cuda", "--gemm", "1", "2", "3", "--card", "h10"], "did you mean"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main.main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_unknown_cards():
    with pytest.raises(UserError, match="unknown card"):
        devices.sheet("b100")
