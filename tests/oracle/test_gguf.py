"""Files of llama.cpp's: what it computes from them, and how it cuts texts, beside barellm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.cpu.step import CpuSession
from barellm.data.bpe import trained_bpe
from barellm.data.huggingface import HuggingFace
from barellm.data.tokenizers import Bytes
from barellm.interop.gguf import LLAMA_3_WORDS
from barellm.interop.sources import open_weights
from barellm.models.gpt2 import Config as Gpt2
from barellm.models.llama3 import Config as Llama
from tests.interop.models import checkpoint_of, random_arrays

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.oracle
TEXT = "To be, or not to be: that's the question  of naïve\n\n12 345 tries, isn't it? " * 20
SAMPLES = (TEXT, "never seen: Übermut \t\n  x", "it'll", "2026 IT'LL 12345")


def llama_3_tokenizer() -> HuggingFace:
    """A small BPE that cuts words as Llama-3 does, with its special tokens behind the others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA_3_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    library.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return HuggingFace(library.to_str().encode(), path=Path("made"))


def ours(step: Path, tokens: np.ndarray) -> np.ndarray:
    """(T, V) logits of the CPU backend in fp32."""
    weights = open_weights(step)
    _, programs = build(weights.model, batch=1, seq=len(tokens))
    program = programs["eval"]
    program.output("logits", next(op.logits for op in program.ops if op.name == "cross_entropy"))
    session = CpuSession(programs)
    weights.load(session)
    session.write("tokens", tokens[None])
    session.write("targets", tokens[None])
    session.run("eval", batch=1, seq=len(tokens), inv_targets=1.0)
    found = session.read("logits")[0, :, : weights.model.vocab_size].astype(np.float64)
    session.close()
    return found


def theirs(path: Path):
    kinds = {"type_k": 0, "type_v": 0}  # caches in fp32
    return llama_cpp.Llama(str(path), n_ctx=64, n_batch=64, logits_all=True, verbose=False, n_threads=1, **kinds)


def model_of(kind: str):
    if kind == "gpt2":
        bpe = trained_bpe(lambda: [TEXT], vocab=320)
        return Gpt2(layers=2, heads=3, d_model=96, vocab_size=bpe.vocab_size, max_seq=64), bpe
    tokenizer = llama_3_tokenizer()
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "d_model": 64, "d_ff": 96, "max_seq": 64}
    stretch = {"rope_factor": 8.0, "rope_old_seq": 16, "rope_theta": 100.0, "tied": False}
    return Llama(**sizes, vocab_size=tokenizer.vocab_size, **(stretch if kind == "stretched" else {})), tokenizer


@pytest.mark.parametrize("kind, dtype, limit", [
    ("gpt2", "fp32", 2e-3), ("gpt2", "bf16", 2e-2), ("llama", "fp32", 1e-4), ("stretched", "fp32", 1e-4), ("llama", "fp16", 5e-3),
])  # fmt: skip
def test_llama_cpp_has_our_logits_and_ids(tmp_path, monkeypatch, capsys, kind, dtype, limit):
    """GPT-2's GELU comes from a table of 16 bits there."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    model, tokenizer = model_of(kind)
    arrays = random_arrays(model)
    arrays = {name: array if array.ndim == 1 else array / 2 for name, array in arrays.items()}
    step = checkpoint_of(tmp_path / "run", model, arrays, tokenizer)
    out = tmp_path / "model.gguf"
    assert main(["export", str(step), "--format", "gguf", "--dtype", dtype, "--out", str(out)]) == 0
    assert "without a tokenizer" not in capsys.readouterr().out
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 37).astype(np.int32)
    llama = theirs(out)
    llama.eval(tokens.tolist())
    got, want = np.array(llama.scores[: len(tokens)], np.float64), ours(step, tokens)
    assert got.shape == want.shape
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"{kind} {dtype}: {error:.1e}")
    assert error <= limit
    for text in SAMPLES:
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text).tolist()
        assert llama.detokenize(tokenizer.encode(text).tolist()) == text.encode()
    assert llama.token_eos() in tokenizer.ends


def test_a_vocabulary_that_llama_cpp_has_not_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    model = Gpt2(layers=1, heads=1, d_model=32, vocab_size=256, max_seq=64)
    step = checkpoint_of(tmp_path / "run", model, random_arrays(model), Bytes())
    assert main(["export", str(step), "--format", "gguf", "--out", str(tmp_path / "b.gguf")]) == 0
    assert "without a tokenizer: llama.cpp has none of kind bytes" in capsys.readouterr().out
    llama = theirs(tmp_path / "b.gguf")
    llama.eval([1, 2, 3])
    assert np.isfinite(llama.scores[:3]).all()
    found = json.loads(llama_3_tokenizer().content)
    found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\p{N}"
    other = HuggingFace(json.dumps(found).encode(), path=Path("made"))
    model = Gpt2(layers=1, heads=1, d_model=32, vocab_size=other.vocab_size, max_seq=64)
    step = checkpoint_of(tmp_path / "other", model, random_arrays(model), other)
    assert main(["export", str(step), "--format", "gguf", "--out", str(tmp_path / "o.gguf")]) == 0
    assert "its rule for words is not that of GPT-2, SmolLM, Llama 3 or Qwen 2" in capsys.readouterr().out
