"""Which ways of feeding a text give the same bits: the table of docs/generation.md."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from barellm.assembly.build import open_model
from barellm.config import Config as Run
from barellm.config import TrainConfig
from barellm.cpu import isa, step
from barellm.cpu.lang.emit import Builder
from barellm.generation.decode import Decoder
from barellm.models.gpt2 import Config as Gpt2
from barellm.models.llama3 import Config as Llama

VOCAB, LENGTH, ROWS, POSITIONS = 320, 200, 64, 256  # LENGTH: beyond a block of keys, and of more pieces than one
SMALL = Llama(layers=2, heads=6, kv_heads=2, d_model=96, d_ff=136, vocab_size=VOCAB, max_seq=POSITIONS)
MODELS = {
    "llama": SMALL,
    "gpt2": Gpt2(layers=2, heads=3, d_model=60, vocab_size=VOCAB, max_seq=POSITIONS),
    "windows": replace(SMALL, sliding_window=40, window_layers="0", head_dim=24, qk_norm="head"),
    "softcap": replace(SMALL, attention_softcap=20.0, logits_softcap=15.0),
}


class Fed:
    """A model of random weights, and the ways of feeding it."""

    def __init__(self, compiled) -> None:
        self.session = compiled.session
        self.decoder = Decoder(self.session, max_seq=POSITIONS, vocab_size=VOCAB)
        self.ids = np.random.default_rng(5).integers(0, VOCAB, (ROWS, LENGTH))

    def logits(self, rows: int, first: int, last: int) -> np.ndarray:
        return self.decoder._logits(self.ids[:rows, first:last].tolist(), pos=first)

    def copy(self, row: int, *, to: int) -> None:
        """Copy what the KV caches have of a text."""
        for cache in self.decoder.caches:
            self.session.write_rows(cache, to, self.session.read_rows(cache, row, row + 1))

    def by_cuts(self, cuts: list[int]) -> dict[int, np.ndarray]:
        """{position: the logits there} of the first text, fed in pieces that end at the cuts."""
        return {last: self.logits(1, first, last)[0] for first, last in zip([0, *cuts], cuts, strict=False)}


@contextmanager
def opened(model, dtype):
    config = Run(preset="", model=model, train=TrainConfig(micro_batch_size=1, seq=8, dtype=dtype))
    with open_model(config, device="cpu", training=False, positions=POSITIONS, rows=ROWS, exact=True) as compiled:
        for name, t in compiled.session.tensors.items():
            if t.role == "parameter":
                values = np.random.default_rng(len(name)).normal(size=t.shape).astype(np.float32)
                compiled.session.write(name, 0.2 * values)
        yield Fed(compiled)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_text_has_the_same_bits_however_it_is_fed(name, dtype):
    """One by one, whole, in pieces of many lengths, behind a prefix that another text has computed, and beside 63 others."""
    with opened(MODELS[name], dtype) as fed:
        assert fed.decoder.piece == ROWS
        one = fed.by_cuts(list(range(1, LENGTH + 1)))
        assert len({x.tobytes() for x in one.values()}) == LENGTH
        random = np.cumsum(np.random.default_rng(2).integers(1, 60, 6)).tolist()[:-1]
        for cuts in ([LENGTH], [64, 128, 192], list(range(2, LENGTH, 2)), list(range(7, LENGTH, 7)), random):
            for position, found in fed.by_cuts(cuts).items():
                assert np.array_equal(found, one[position]), (cuts[:3], position)
        fed.by_cuts([150])
        fed.copy(0, to=1)
        fed.decoder._logits([fed.ids[7, :199].tolist()], pos=0)
        fed.copy(1, to=0)
        assert np.array_equal(fed.logits(1, 150, LENGTH)[0], one[LENGTH])
        for row in reversed(range(ROWS)):
            fed.decoder._logits([fed.ids[row, :130].tolist()], pos=0)
            fed.copy(0, to=row)
        together = [fed.logits(ROWS, position, position + 1) for position in range(130, 140)]
        for row in (0, 41):
            fed.ids[0] = fed.ids[row]
            alone = fed.by_cuts(list(range(1, 141)))
            for i, found in enumerate(together):
                assert np.array_equal(found[row], alone[131 + i]), (row, i)


@pytest.mark.extended
def test_with_a_dot_instruction_too(own_cache, monkeypatch):
    """On AVX2 with vdpbf16ps replaced by two multiply-adds: bf16 pairs are then what attention's kernels read."""

    def dot(k, acc, a, b):
        low = [k.bitcast(k.bitcast(x, k.ivec) << 16, k.vec) for x in (a, b)]
        high = [k.bitcast(k.bitcast(x, k.ivec) & k.const(-65536, k.ivec), k.vec) for x in (a, b)]
        return k.fma(*high, k.fma(*low, acc))

    if "avx2" not in isa.available():
        pytest.skip("the processor has no AVX2")
    monkeypatch.setattr(Builder, "dot", dot)
    monkeypatch.setattr(step, "host", lambda *args: replace(isa.X86["avx2"], name="avx2_pairs", dot="x86"))
    for name in ("llama", "windows"):
        with opened(MODELS[name], "bf16") as fed:
            one = fed.by_cuts(list(range(1, LENGTH + 1)))
            for position, found in fed.by_cuts([3, 10, 64, 129, LENGTH]).items():
                assert np.array_equal(found, one[position]), position
