"""Hugging Face's own GPT2LMHeadModel: its logits from an imported folder, and an exported folder as it reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.cpu.step import CpuSession
from barellm.data.bpe import trained_bpe
from barellm.interop.sources import open_weights
from barellm.models.gpt2 import Config as ModelConfig
from barellm.models.llama3 import Config as Llama
from tests.interop.models import checkpoint_of, random_arrays

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.oracle.test_gpt2 import tokens_and_targets  # noqa: E402
from tests.oracle.torch_gpt2 import relative  # noqa: E402

pytestmark = pytest.mark.oracle
LIMIT = 1e-4  # relative, fp32
MODEL = ModelConfig(layers=3, heads=4, d_model=48, vocab_size=256, max_seq=40)


def theirs(folder: Path, *, seed: int = 0, dtype=torch.float32):
    """A random GPT2LMHeadModel, saved by transformers; biases and norms away from 0 and 1."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 48, "vocab_size": 256, "n_positions": 40}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB" if seed else "1GB")
    return model


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.float()(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.fixture
def ours():
    """(B, T) -> (B, T, V) logits of a folder's weights, by the CPU backend in fp32."""
    sessions = []

    def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
        weights = open_weights(folder)
        batch, seq = tokens.shape
        _, programs = build(weights.model, batch=batch, seq=seq)
        program = programs["eval"]
        program.output("logits", next(op.logits for op in program.ops if op.name == "cross_entropy"))
        sessions.append(CpuSession(programs))
        weights.load(sessions[-1])
        sessions[-1].write("tokens", tokens)
        sessions[-1].write("targets", tokens)
        sessions[-1].run("eval", batch=batch, seq=seq, inv_targets=1 / tokens.size)
        return sessions[-1].read("logits").astype(np.float32)[..., : weights.model.vocab_size]

    yield logits
    for session in sessions:
        session.close()


@pytest.mark.parametrize("seed", [0, 1], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_imported_model_has_their_logits(tmp_path, monkeypatch, ours, seed, dtype):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    model = theirs(tmp_path / "hf", seed=seed, dtype=dtype)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 or seed
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    tokens, _ = tokens_and_targets(MODEL, 2, 37)
    expected = logits_of(model, tokens)
    for source in ("hf", "run"):
        error = relative(ours(tmp_path / source, tokens), expected)
        print(f"{source}: {error:.1e}")
        assert error <= LIMIT


@pytest.mark.parametrize("dtype, limit", [("fp32", LIMIT), ("bf16", 2e-2)])
def test_an_exported_model_has_our_logits(tmp_path, monkeypatch, ours, dtype, limit):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    step = checkpoint_of(tmp_path / "run", MODEL, random_arrays(MODEL))
    command = ["export", str(step), "--format", "huggingface", "--dtype", dtype, "--out", str(tmp_path / "hf")]
    assert main(command) == 0
    model, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype="auto")
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert not any(said.values()), said
    tokens, _ = tokens_and_targets(MODEL, 2, 37)
    assert relative(logits_of(model.eval(), tokens), ours(step, tokens)) <= limit


def test_export_of_an_import_is_what_transformers_saved(tmp_path, monkeypatch):
    """Every bit of every tensor, read back by transformers."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    expected = theirs(tmp_path / "hf").state_dict()
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "again")]) == 0
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_exported_tokenizer_has_our_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    text = "To be, or not to be: that's the question  of naïve\n\n12 345 tries, isn't it? " * 20
    bpe = trained_bpe(lambda: [text], vocab=320)
    model = ModelConfig(layers=1, heads=1, d_model=8, vocab_size=bpe.vocab_size, max_seq=16)
    checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)
    assert main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "hf")]) == 0
    for kind in (transformers.GPT2Tokenizer, transformers.AutoTokenizer):
        found = kind.from_pretrained(tmp_path / "hf")
        for sample in (text, "never seen: Übermut \t\n  x", "it'll"):
            assert found(sample, add_special_tokens=False)["input_ids"] == bpe.encode(sample).tolist()
            assert found(sample)["input_ids"] == bpe.prompt(sample) == [bpe.eot, *bpe.encode(sample)]
        assert (found.eos_token_id, len(found), found.model_max_length) == (bpe.eot, bpe.vocab_size, 16)
    found.save_pretrained(tmp_path / "saved")  # what is beside a model that was tuned there
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    for folder in ("hf", "saved"):
        back = open_weights(tmp_path / folder).tokenizer
        assert (back.hash, back.prompt(text)) == (bpe.hash, bpe.prompt(text))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_exported_folder_is_loaded_as_it_is(tmp_path, monkeypatch, kind):
    """By the classes that know no architecture; its card's head is what the hub reads."""
    import yaml

    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    bpe = trained_bpe(lambda: ["To be, or not to be: that's the question. " * 20], vocab=300)
    sizes = {"layers": 1, "heads": 2, "d_model": 16, "vocab_size": bpe.vocab_size, "max_seq": 16}
    model = ModelConfig(**sizes) if kind == "gpt2" else Llama(**sizes, kv_heads=1, d_ff=24)
    checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)
    rows = [{"kind": "eval", "step": 0, "val_nats": 3.25, "val_bits_per_byte": 1.5}]
    rows += [{"kind": "hellaswag", "step": 0, "acc": 0.25, "acc_norm": 0.5, "total": 4}, rows[0] | {"step": 9}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "hf"
    command = ["export", str(tmp_path / "run"), "--format", "huggingface", "--license", "mit", "--out", str(out)]
    assert main(command) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    written = loaded.generate(**tokenizer("To be", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert written.shape[1] > len(bpe.encode("To be")) and (loaded.config.eos_token_id == bpe.eot)
    _, head, card = (out / "README.md").read_text().split("---\n", 2)
    said = yaml.safe_load(head)
    assert (said["license"], said["library_name"]) == ("mit", "transformers")
    assert "| validation loss | 3.2500 nats per token, 1.5000 bits per byte |" in card
    assert "| HellaSwag | acc 0.2500, acc_norm 0.5000 (4 examples) |" in card and "AutoTokenizer" in card
