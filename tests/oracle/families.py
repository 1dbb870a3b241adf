"""The table of families: what transformers' own classes, with random weights, and barellm agree about.

    python -m tests.oracle.families [FAMILY ...]     `make families`: the table; ends with 1 where a cell is not green

A row is a family, a column a function of COLUMNS that raises where the two differ. Each column is tried for every variant of a
family. Every tensor of a model is random, its norms and biases too; heads are no fraction of the width where a family lets them.
Tokenizers have the pipelines of the family's published models, and are trained here; chat templates are TRL's (`chats.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from barellm.api import load as barellm_load
from barellm.assembly.build import opened
from barellm.assembly.programs import build
from barellm.checkpoint.weights import Weights, parameters
from barellm.cli.main import main as barellm
from barellm.config import ModelConfig, OptimConfig
from barellm.data.kinds import load_tokenizer
from barellm.data.tokenizers import Chars
from barellm.generation.decode import Decoder
from barellm.generation.samplers import Sampling
from barellm.interop import huggingface
from barellm.interop.sources import open_weights
from barellm.optim.adamw import adamw
from tests.chat import families as pipelines
from tests.models import test_documents as documents
from tests.oracle import chats
from tests.oracle.torch_gpt2 import relative

SIZES = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 40,
    "vocab_size": 61, "max_position_embeddings": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 12}  # four heads of 12 columns beside a width of 32
PARTS = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.2, 2.0],
    "long_factor": [1.5, 2.0, 6.0],
}  # fmt: skip
WINDOW = {"sliding_window": 7}
TAIL = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}  # layers 1 and 2
LISTED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = WIDE | WINDOW | {"query_pre_attn_scalar": 20}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 200.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
LIMIT = 1e-5  # relative, per tensor
Variants = dict[str, dict[str, Any]]
FAMILIES: dict[str, tuple[str, Variants]] = {  # model_type -> transformers' class, and what differs from SIZES by variant
    "llama": (
        "Llama",
        {
            "": WIDE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        },
    ),
    "mistral": ("Mistral", {"": WIDE | WINDOW, "whole": {"sliding_window": None, "tie_word_embeddings": True}}),
    "qwen2": ("Qwen2", {"": {"tie_word_embeddings": True}, "yarn": {"rope_parameters": YARN}, "windows": TAIL}),
    "qwen3": (
        "Qwen3",
        {
            "": WIDE | {"tie_word_embeddings": True}, "biases": WIDE | {"attention_bias": True},
            "windows": WIDE | TAIL | {"layer_types": LISTED},
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "": {"no_rope_layers": [1, 0, 1]}, "untied": {"no_rope_layers": [0, 0, 1], "tie_word_embeddings": False},
            "windows": WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0, 0]},
        },
    ),
    "olmo2": ("Olmo2", {"": {}, "biases": {"attention_bias": True}}),
    "olmo3": (
        "Olmo3",
        {
            "": WINDOW | {"layer_types": LISTED, "rope_parameters": {**LOCAL, "full_attention": YARN}},
            "biases": WINDOW | {"attention_bias": True, "num_hidden_layers": 4},
        },
    ),
    "gemma2": ("Gemma2", {"": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, "usual": WIDE | WINDOW}),
    "gemma3_text": (
        "Gemma3",
        {
            "": GEMMA | {"layer_types": LISTED, "rope_parameters": LOCAL},
            "usual": WIDE | WINDOW | {"num_hidden_layers": 6, "final_logit_softcapping": 3.0},
        },
    ),
    "phi3": (
        "Phi3",
        {
            "": WINDOW | {"rope_parameters": LONG, "original_max_position_embeddings": 96},
            "usual": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    ),
    "granite": (
        "Granite",
        {
            "": {
                "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 8,
                "tie_word_embeddings": True,
            },
            "biases": {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.5},
        },
    ),
    "arcee": ("Arcee", {"": WIDE, "biases": {"attention_bias": True, "mlp_bias": True}}),
    "stablelm": ("StableLm", {"": PARTS, "biases": PARTS | {"use_qkv_bias": True}}),
    "gpt_neox": (
        "GPTNeoX",
        {
            "": PARTS | {"num_key_value_heads": 4},
            "serial": PARTS | {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False},
        },
    ),
}  # fmt: skip


def made(family: str, variant: str = "", *, seed: int = 0, **more: Any) -> Any:
    """A model of the family, every tensor of it random, norms and biases too."""
    name, variants = FAMILIES[family]
    torch.manual_seed(seed)
    kind = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, kind)(**SIZES | variants[variant] | more, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@dataclass(frozen=True)
class Case:
    """A model of theirs, and the weights that its folder gives."""

    model: Any
    folder: Path
    weights: Weights

    @property
    def known(self) -> Any:
        return huggingface.hugging_face(self.weights.model)


def case(folder: Path, family: str, variant: str = "", **more: Any) -> Case:
    model = made(family, variant, **more)
    model.save_pretrained(folder)
    return Case(model, folder, open_weights(folder, tokenizer=""))


def batch_of(cfg: ModelConfig, batch: int = 2, seq: int = 29) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, some of which are ignored."""
    rng = np.random.default_rng(5)
    tokens, targets = (rng.integers(0, cfg.vocab_size, (batch, seq), dtype=np.int32) for _ in range(2))
    targets[0, 3:7] = -1
    return tokens, targets


def theirs(case: Case, tokens: np.ndarray, targets: np.ndarray, *, autocast: bool = False) -> dict[str, np.ndarray]:
    """Logits, the mean loss over valid targets, and each gradient by our names and in our order of rows."""
    case.model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = case.model(torch.as_tensor(tokens, dtype=torch.long)).logits
    logits = logits.float() if autocast else logits
    flat = torch.as_tensor(targets, dtype=torch.long).reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-1)
    loss.backward()
    there = {name.removeprefix(case.known.prefix): p.grad.numpy() for name, p in case.model.named_parameters()}
    there[case.known.head] = there.get("lm_head.weight")  # GPT-NeoX's has another name on disk
    found: dict[str, list[np.ndarray]] = {}
    for part in huggingface.parts(case.known, case.weights.model, parameters(case.weights.model)):
        grad = there[part.name]
        found.setdefault(f"{part.ours}.grad", []).append(grad if part.order is None else grad[part.order])
    gradients = {name: np.concatenate(grads) for name, grads in found.items()}
    return {"logits": logits.detach().numpy(), "loss": np.array([loss.item()])} | gradients


def ours(
    case: Case, tokens: np.ndarray, targets: np.ndarray, *, compute: str = "fp32", device: str = "cpu"
) -> dict[str, np.ndarray]:
    """The same of barellm, with the rows of padded ids cut off."""
    (batch, seq), cfg = tokens.shape, case.weights.model
    _, programs = build(cfg, batch=batch, seq=seq, compute=compute, recompute=True, optimizer=partial(adamw, config=OptimConfig()))
    micro = programs["forward_backward"]
    loss = next(op for op in micro.ops if op.name.endswith("cross_entropy"))
    micro.output("logits", loss.logits)
    with opened(programs, device) as session:
        case.weights.load(session)
        session.write("tokens", tokens)
        session.write("targets", targets)
        count = (targets >= 0).sum()
        session.run("forward_backward", batch=batch, seq=seq, accumulate=0, inv_targets=1 / count, step=1)
        names = ["loss", *(name for name, t in session.tensors.items() if t.role == "gradient")]
        rows = {name: t.valid_rows for name, t in parameters(cfg).items()}
        found = {name: session.read(name)[: rows.get(name.removesuffix(".grad"))].copy() for name in names}
        logits, cap = session.read("logits")[..., : cfg.vocab_size].astype(np.float64), getattr(cfg, "logits_softcap", 0.0)
        return {"logits": cap * np.tanh(logits / cap) if cap else logits} | found


def greedy(case: Case, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """Ours and theirs, each with its own cache."""
    cfg = case.weights.model
    _, programs = build(cfg, decode_batch=1)
    with opened(programs, "cpu") as session:
        case.weights.load(session)
        decoder = Decoder(session, max_seq=cfg.max_seq, vocab_size=cfg.vocab_size)
        found = list(decoder.tokens(prompt, count=count, how=Sampling(temperature=0.0)))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = case.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return found, out[0, len(prompt) :].tolist()


def tokenizer_of(folder: Path, ids: int) -> Path:
    """A tokenizer of so many ids."""
    folder.mkdir(exist_ok=True)
    Chars(chr(ord("0") + i) for i in range(ids)).save(folder)
    return folder


def exported(case: Case, into: Path, *, dtype: str = "fp32") -> Path:
    """The folder that was imported as a checkpoint and exported again."""
    vocab = str(tokenizer_of(into / "tokenizer", case.model.config.vocab_size))
    run, again = str(into / "run"), into / "again"
    commands = (
        ["import", str(case.folder), "--out", run, "--tokenizer", vocab],
        ["export", run, "--format", "huggingface", "--dtype", dtype, "--out", str(again)],
    )
    for command in commands:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            assert barellm(command) == 0, said.getvalue()
    return again


# --- columns ---


def check_import(case: Case) -> None:
    """Its configuration is what was asked for, and every tensor has its place."""
    assert case.known.model_type == case.model.config.model_type, case.known.model_type
    assert sum(t.valid_rows * t.size // int(t.shape[0]) for t in parameters(case.weights.model).values()) == sum(
        p.numel() for p in case.model.parameters()
    )


def _compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], limit: float) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = {key: relative(found[key], expected[key]) for key in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= limit, f"{worst} {errors[worst]:.1e}"


def check_logits(case: Case) -> None:
    batch = batch_of(case.weights.model)
    wanted = ("logits", "loss")
    found, expected = ours(case, *batch), theirs(case, *batch)
    _compare({k: found[k] for k in wanted}, {k: expected[k] for k in wanted}, LIMIT)


def check_greedy(case: Case) -> None:
    """After a prompt that is longer than the windows, in one piece; the logits of "logits" too, which are as a user has them."""
    prompt = [1, 4, 2, 3, 9, 7, 5, 11, 2, 8, 13]
    found, expected = greedy(case, prompt, 50)
    assert found == expected, f"{found} {expected}"
    with torch.no_grad():
        logits = case.model(torch.tensor([prompt])).logits.numpy()
    with barellm_load(case.folder, device="cpu", dtype="fp32") as model:
        _compare({"logits": model.logits(np.array([prompt]))}, {"logits": logits}, LIMIT)


def check_gradients(case: Case) -> None:
    """Per tensor, of fp32 to 1e-5, of bf16 to 1.5 times the worst error of PyTorch's autocast."""
    batch = batch_of(case.weights.model)
    expected, autocast = theirs(case, *batch), theirs(case, *batch, autocast=True)
    _compare(ours(case, *batch), expected, LIMIT)
    worst = max(relative(autocast[key], expected[key]) for key in expected)
    _compare(ours(case, *batch, compute="bf16"), expected, 1.5 * worst)


def check_export(case: Case) -> None:
    """Each tensor bit for bit, and transformers reads it with nothing missing and equal logits."""
    with tempfile.TemporaryDirectory() as into:
        again = exported(case, Path(into))
        found, expected = (load_file(folder / huggingface.FILE) for folder in (again, case.folder))
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        kind = type(case.model)
        read, said = kind.from_pretrained(again, output_loading_info=True, attn_implementation="eager")
        assert not any(said.values()), said
        before = kind.from_pretrained(case.folder, attn_implementation="eager")
        tokens = torch.arange(58).reshape(2, 29)
        with torch.no_grad():
            assert torch.equal(read.eval()(tokens).logits, before.eval()(tokens).logits)


@cache
def _tokenizers(family: str) -> list[tuple[Any, Any, bool]]:
    """Ours and theirs for each pipeline of the family, from a folder with a model of as many rows; whether the template has a
    system message."""
    found = []
    for pipeline, template in chats.PAIRS[family]:
        with tempfile.TemporaryDirectory() as name:
            folder = pipelines.folder(Path(name), pipeline, template=chats.template(template))
            made(family, vocab_size=len(load_tokenizer(folder).tokens) + 3).save_pretrained(folder)
            ours, theirs = open_weights(folder).tokenizer, transformers.AutoTokenizer.from_pretrained(folder)
            found.append((ours, theirs, template != "llama2"))
    return found


def check_chat(case: Case) -> None:
    """The text and the ids of 40 drawn conversations."""
    for ours, theirs, system in _tokenizers(case.known.model_type):
        chats.check_chats(ours, theirs, 40, system=system)


def check_ids(case: Case) -> None:
    """Of 2,000 drawn strings."""
    for ours, theirs, _ in _tokenizers(case.known.model_type):
        chats.check_ids(ours, theirs, 2000)


def check_packed(case: Case) -> None:
    """The loss of documents in one row, and its gradients, are the sums of those of each alone; so is theirs."""
    cfg = case.weights.model
    with opened(documents.programs(cfg), "cpu") as session:
        case.weights.load(session)
        documents.check_packed(session, cfg, LIMIT)
        packed = documents.trained_on(session, [documents.texts(cfg)])
    each = [theirs(case, text[None, :-1], text[None, 1:]) for text in documents.texts(cfg)]
    wanted = sum(float(one["loss"][0]) * length for one, length in zip(each, documents.LENGTHS, strict=True))
    _compare({"loss": packed["loss"]}, {"loss": np.array([wanted])}, LIMIT)


COLUMNS: dict[str, Callable[[Case], None]] = {
    "import": check_import,
    "logits 1e-5": check_logits,
    "50 greedy tokens": check_greedy,
    "gradients": check_gradients,
    "packed": check_packed,
    "chat text": check_chat,
    "ids": check_ids,
    "export, bit for bit": check_export,
}


def rows(wanted: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """family -> column -> "yes", or what is wrong."""
    for family in wanted:
        row: dict[str, str] = dict.fromkeys(COLUMNS, "yes")
        for variant in FAMILIES[family][1]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    one = case(Path(folder), family, variant)
                except Exception as error:  # a cell says so
                    row["import"] = f"{variant}: {type(error).__name__}: {error}"
                    continue
                for column, check in COLUMNS.items():
                    try:
                        check(one)
                    except Exception as error:
                        row[column] = f"{variant}: {type(error).__name__}: {error}"
        yield family, row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"one of {', '.join(FAMILIES)}; all unless given")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    began, wrong = monotonic(), []
    print(f"| family | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for family, row in rows(args.families or list(FAMILIES)):
        print(f"| `{family}` | {' | '.join('yes' if cell == 'yes' else 'NO' for cell in row.values())} |", flush=True)
        wrong += [f"{family}, {column}: {cell}" for column, cell in row.items() if cell != "yes"]
    print(*wrong, f"{monotonic() - began:.0f} s", sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
