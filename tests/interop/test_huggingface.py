"""Hugging Face folders: every way in which GPT-2 comes, every way in which it may be wrong, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from barellm.checkpoint import storage, tensorfile
from barellm.cli.main import main
from barellm.interop.sources import open_weights
from tests.interop.models import ODD, TINY, checkpoint_of, hugging_face, random_arrays, rounded, their_config, their_tensors

ARRAYS = random_arrays(TINY)
THEIRS = their_tensors(ARRAYS)
MASK = {"h.0.attn.bias": np.ones((1, 1, 20, 20), bool), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
BFLOAT16 = ml_dtypes.bfloat16


def imported(source: Path, out: Path) -> Path:
    assert main(["import", str(source), "--out", str(out), "--tokenizer", "bytes"]) == 0
    return out / "checkpoints" / "step-000000" / "weights.safetensors"


@pytest.mark.parametrize(
    "tensors",
    [
        THEIRS,
        their_tensors(ARRAYS, prefix=""),
        THEIRS | {"lm_head.weight": ARRAYS["wte"]},
        THEIRS | {f"transformer.{name}": mask for name, mask in MASK.items()},
        their_tensors(ARRAYS, prefix="") | MASK,
    ],
    ids=["as saved today", "without prefix", "with its head", "with masks", "as OpenAI's on the Hub"],
)
@pytest.mark.parametrize("shards", [0, 3])
def test_every_layout_gives_the_weights_bit_by_bit(tmp_path, tensors, shards):
    file = imported(hugging_face(tmp_path / "hf", TINY, tensors, shards=shards), tmp_path / "run")
    found = load_file(file)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, name)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16])
def test_16_bit_tensors_are_widened_exactly(tmp_path, dtype):
    source = hugging_face(tmp_path / "hf", TINY, rounded(THEIRS, dtype))
    found = load_file(imported(source, tmp_path / "run"))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array.astype(dtype).astype(np.float32), name)


@pytest.mark.parametrize("piece", [1, 100, 8 << 20])
def test_there_and_back_is_the_same_file(tmp_path, monkeypatch, piece):
    """However small the pieces; with a vocabulary that is padded here and not there."""
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    arrays = random_arrays(ODD)
    (tmp_path / "tokenizer").mkdir()
    step = checkpoint_of(tmp_path / "run", ODD, arrays)
    out = tmp_path / "hf"
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(out)]) == 0
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    found, expected = load_file(out / "model.safetensors"), their_tensors(arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)
    again = checkpoint_of(tmp_path / "again", ODD, dict(open_weights(out).arrays))
    assert (again / "weights.safetensors").read_bytes() == (step / "weights.safetensors").read_bytes()


def test_bf16_is_rounded_to_nearest(tmp_path):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    out = tmp_path / "new" / "hf"
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--dtype", "bf16", "--out", str(out)]) == 0
    for name, array in load_file(out / "model.safetensors").items():
        np.testing.assert_array_equal(array, THEIRS[name].astype(BFLOAT16), name)
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and their_config(TINY).items() <= config.items()


# --- what is refused ---


def without(name: str) -> dict:
    return {key: array for key, array in THEIRS.items() if key != name}


WRONG_TENSORS = {
    "one is missing": (without("transformer.h.1.ln_2.bias"), "lacks the tensor 'transformer.h.1.ln_2.bias' (1 missing in all)"),
    "one too many": (
        THEIRS | {"transformer.h.0.attn.rotary": np.ones(3, np.float32)},
        "has the tensor 'transformer.h.0.attn.rotary', which this model lacks",
    ),
    "a layer too many": (
        THEIRS | {"transformer.h.2.ln_1.bias": np.ones(12, np.float32)},
        "has the tensor 'transformer.h.2.ln_1.bias'",
    ),
    "matrices as nn.Linear has them": (
        THEIRS | {"transformer.h.0.attn.c_attn.weight": ARRAYS["h.0.attn.c_attn.weight"]},
        "model.safetensors: transformer.h.0.attn.c_attn.weight is (36, 12), expected (12, 36) by config.json",
    ),
    "integers": (
        THEIRS | {"transformer.wpe.weight": np.ones((20, 12), np.int8)},
        "model.safetensors: transformer.wpe.weight is int8, expected float32, bfloat16 or float16",
    ),
    "a head of its own": (
        THEIRS | {"lm_head.weight": ARRAYS["wte"] + 1},
        "model.safetensors: lm_head.weight is not transformer.wte.weight, expected a classifier that is tied to it",
    ),
    "both names": (THEIRS | {"wpe.weight": ARRAYS["wpe"]}, "has the tensor 'wpe.weight', and "),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_an_unexpected_tensor_is_named(tmp_path, refused, wrong):
    tensors, message = WRONG_TENSORS[wrong]
    hugging_face(tmp_path / "hf", TINY, tensors)
    assert message in refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")
    assert not (tmp_path / "run").exists()


WRONG_CONFIGS = {
    "model_type": ("bloom", "model_type is 'bloom', expected 'gpt2' or 'llama'"),
    "activation_function": ("relu", "activation_function is 'relu', expected 'gelu_new' or 'gelu_pytorch_tanh'"),
    "layer_norm_epsilon": (1e-6, "layer_norm_epsilon is 1e-06, expected 1e-05"),
    "scale_attn_by_inverse_layer_idx": (True, "scale_attn_by_inverse_layer_idx is True, expected False"),
    "n_inner": (100, "n_inner is 100, expected 48 by the other keys"),
    "n_layer": ("2", "n_layer is '2', expected an integer"),
    "n_head": (5, "model.heads 5 does not divide model.d_model 12"),
    "n_positions": (21, "wpe.weight is (20, 12), expected (21, 12) by config.json"),
}


@pytest.mark.parametrize("key", WRONG_CONFIGS)
def test_another_model_is_refused_by_its_key(tmp_path, refused, key):
    value, message = WRONG_CONFIGS[key]
    hugging_face(tmp_path / "hf", TINY, THEIRS, **{key: value})
    assert message in refused("import", tmp_path / "hf", "--out", tmp_path / "run", "--tokenizer", "bytes")


def test_damaged_folders(tmp_path, refused):
    def message(folder: Path) -> str:
        return refused("import", folder, "--out", tmp_path / "run", "--tokenizer", "bytes")

    whole = hugging_face(tmp_path / "whole", TINY, THEIRS)
    file = whole / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    assert f"{file}: " in (said := message(whole)) and "the file has" in said
    file.write_bytes(b"\0" * 100)
    assert "is not a safetensors file" in message(whole)
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "its header is list, expected an object" in message(whole)
    file.unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in message(whole)
    (whole / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is not read, save it with safe_serialization=True" in message(whole)
    shards = hugging_face(tmp_path / "shards", TINY, THEIRS, shards=2)
    (shards / "model-00002-of-00002.safetensors").rename(tmp_path / "elsewhere")
    assert "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json lists" in message(shards)
    (tmp_path / "elsewhere").rename(shards / "model-00002-of-00002.safetensors")
    (shards / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../../secret"}}')
    assert "weight_map is " in message(shards)
    (shards / "config.json").unlink()
    assert "config.json is missing" in message(shards)


# --- what appears, appears whole ---


def test_a_failing_disk_leaves_nothing(tmp_path, monkeypatch, capsys):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    command = ["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "hf")]

    class Failing:
        def __init__(self, at: int) -> None:
            self.left = at

        def __getattr__(self, name: str):
            call = getattr(real, name)

            def counted(*args, **more):
                self.left -= 1
                if self.left == 0:
                    raise OSError(28, "No space left on device")
                return call(*args, **more)

            return counted if name in ("mkdir", "open", "write", "fsync", "rename", "posix_fallocate") else call

    real, at = storage.system, 1
    while True:
        monkeypatch.setattr(storage, "system", Failing(at))
        status = main(command)
        monkeypatch.setattr(storage, "system", real)
        if status == 0:
            break
        error = capsys.readouterr().err
        assert status == 2 and error.endswith("No space left on device\n") and error.count("\n") == 1
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["run"] or (at > 10 and names == ["hf", "run"] and len(list((tmp_path / "hf").iterdir())) == 3)
        if "hf" in names:  # the sync of the parent failed, after the rename
            storage.remove(tmp_path / "hf")
        at += 1
    assert at > 10


def test_a_killed_export_is_replaced_and_a_whole_one_is_not(tmp_path, refused, capsys):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    (tmp_path / ".tmp-hf").mkdir()
    (tmp_path / ".tmp-hf" / "model.safetensors").write_text("half")
    command = ("export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "hf"))
    assert main(command) == 0
    assert "without a tokenizer: transformers has none of kind bytes" in capsys.readouterr().out
    assert not (tmp_path / ".tmp-hf").exists()
    assert refused(*command) == f"--out {tmp_path / 'hf'} exists, expected a new folder"
