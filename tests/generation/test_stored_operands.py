"""Sessions that train nothing keep 16 bits of a weight where no op reads more: the same results from half the memory."""

from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import barellm
from barellm.assembly import quantized
from barellm.cli.checkpoints import found
from barellm.config import TrainConfig
from barellm.interop import imported
from barellm.models import gpt2, llama3, preset
from barellm.program.dtypes import encode
from tests.interop.models import checkpoint_of, hugging_face, random_arrays, their_tensors, weights_of
from tests.models.test_speedrun import SMALL as SPEEDRUN

TOKENS = np.random.default_rng(1).integers(0, 61, (2, 9))
GPT2 = gpt2.Config(layers=1, heads=2, d_model=24, vocab_size=256, max_seq=16)
MODELS = {
    "tied": GPT2,
    "untied": llama3.Config(layers=1, heads=4, kv_heads=2, d_model=24, d_ff=40, vocab_size=61, max_seq=16, tied=False),
    "gates": replace(SPEEDRUN, vocab_size=64),
}
PRESETS = {"tied": "shakespeare-char", "untied": "llama-15m", "gates": "speedrun-small"}


def arrays_with_ties(model) -> dict[str, np.ndarray]:
    """Random weights, of which every third lies in the middle between two bf16 numbers."""
    arrays = random_arrays(model)
    for array in arrays.values():
        bits = array.reshape(-1).view(np.uint32)
        bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000
    return arrays


def results(path, dtype: str) -> tuple[np.ndarray, str, int, dict[str, str]]:
    """The logits, a text, bytes of the arena, and how the parameters are stored."""
    with barellm.load(path, dtype=dtype, device="cpu", tokenizer="bytes" if path.name == "hf" else None) as model:
        logits, session = model.logits(TOKENS), cast(Any, model._session)
        stored = {name: t.dtype for name, t in session.tensors.items() if t.role == "parameter"}
        return logits, model.generate([1, 2, 3], max_new_tokens=5, seed=1), session.plan.arena_bytes, stored


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_whole_weights(tmp_path, own_cache, monkeypatch, name, dtype):
    model = MODELS[name]
    seq = 40 if name == "gates" else 16
    config = replace(preset(PRESETS[name]), model=model, train=TrainConfig(micro_batch_size=1, seq=seq, steps=9))
    config = replace(config, data=replace(config.data, tokenizer="bytes"))
    imported.save(weights_of(model, arrays_with_ties(model)), tmp_path / "run", config=config, step=7, total=9)
    logits, text, nbytes, stored = results(tmp_path / "run", dtype)
    with found(str(tmp_path / "run"), device="cpu", dtype=dtype).opened(positions=8) as compiled:
        by_command = {name: t.dtype for name, t in compiled.session.tensors.items() if t.role == "parameter"}
    monkeypatch.setattr(quantized, "keep_operands", lambda programs, bf16: None)
    whole, whole_text, more, planes = results(tmp_path / "run", dtype)
    assert np.array_equal(logits.view(np.uint32), whole.view(np.uint32))
    assert (text, nbytes < more) == (whole_text, True)
    matrices = {name for name, how in planes.items() if how != "fp32"}
    kept_whole = {name for name in matrices if stored[name] == planes[name]}
    assert {stored[name] for name in matrices - kept_whole} == {dtype}
    assert kept_whole == {"tied": {"wte", "wpe"}, "untied": {"wte"}}.get(name, kept_whole)
    assert by_command == stored


def test_an_embedding_of_bf16_is_kept_as_it_is(tmp_path, own_cache):
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in random_arrays(GPT2).items()}
    folder = hugging_face(tmp_path / "hf", GPT2, their_tensors(arrays))
    wide = checkpoint_of(tmp_path / "run", GPT2, {name: array.astype(np.float32) for name, array in arrays.items()}, None)
    stored = results(folder, "bf16")
    assert stored[3]["wte"] == stored[3]["wpe"] == "bf16"
    assert results(wide, "bf16")[3]["wte"] == "bf16_i16"
    assert np.array_equal(stored[0], results(wide, "bf16")[0])


@pytest.mark.parametrize("name, expected", [("hf", "bf16"), ("run", "bf16_i16")])
def test_an_embedding_beside_codes_is_kept_as_it_is_too(tmp_path, own_cache, name, expected):
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in random_arrays(GPT2).items()}
    hugging_face(tmp_path / "hf", GPT2, their_tensors(arrays))
    checkpoint_of(tmp_path / "run", GPT2, random_arrays(GPT2))
    with found(str(tmp_path / name), device="cpu", dtype="bf16", weights="int8").opened(positions=8) as compiled:
        assert compiled.session.tensors["wte"].dtype == expected


def test_weights_that_are_drawn_and_other_dtypes_stay_whole(tmp_path, own_cache):
    checkpoint_of(tmp_path / "run", GPT2, random_arrays(GPT2))
    assert set(results(tmp_path / "run", "fp32")[3].values()) == {"fp32"}


def test_an_adapter_that_changes_an_embedding_finds_room_for_it(tmp_path, own_cache):
    """One base in bf16, one variant with an fp32 embedding: whichever is in use, no bit is lost."""
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in random_arrays(GPT2).items()}
    with barellm.load(hugging_face(tmp_path / "hf", GPT2, their_tensors(arrays)), dtype="bf16", device="cpu") as model:
        wider = replace(model._weights, arrays=dict(model._weights.arrays) | {"wte": random_arrays(GPT2)["wte"]})
        model._variants["other"] = wider
        model.use("other")
        logits = model.logits(TOKENS)
        tensors = cast(Any, model._session).tensors
        assert (tensors["wte"].dtype, tensors["wpe"].dtype) == ("bf16_i16", "bf16")
    with barellm.load(checkpoint_of(tmp_path / "run", GPT2, {n: wider.read_rows(n, 0, len(a)) for n, a in arrays.items()})) as same:
        same.config = replace(same.config, train=replace(same.config.train, dtype="bf16"))
        assert np.array_equal(same.logits(TOKENS), logits)


def test_a_bf16_weight_is_the_operand_of_a_whole_one():
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    assert not np.array_equal(encode(ties, "bf16")[0], encode(ties, "bf16_i16")[0])  # the rounding of activations is another
