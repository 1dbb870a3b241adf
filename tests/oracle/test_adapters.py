"""Adapters beside PEFT's own: twenty steps from the same weights, gradients of every A and B, and folders in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import barellm  # noqa: E402
from barellm.assembly.build import build_programs, opened  # noqa: E402
from barellm.config import AdapterConfig, Config, OptimConfig, TrainConfig  # noqa: E402
from barellm.errors import UserError  # noqa: E402
from barellm.interop import adapters  # noqa: E402
from barellm.interop.sources import begin_from, open_weights, with_adapter  # noqa: E402
from barellm.models import families  # noqa: E402
from barellm.models.adapters import DEFAULTS, modules, targeted  # noqa: E402
from tests.oracle.families import Case, batch_of, case  # noqa: E402
from tests.oracle.torch_gpt2 import relative  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.extended]
STEPS, LIMIT = 20, 1e-5
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "n_positions": 64}
# Fused here and several there, on a tied model; three matrices here too; fused there, with rows in another order; theirs (in, out).
FAMILIES = ["llama", "qwen3", "gpt_neox", "gpt2", "gemma3_text", "phi3"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def base_of(folder: Path, family: str) -> Case:
    if family != "gpt2":
        return case(folder, family)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return Case(model, folder, open_weights(folder, tokenizer=""))


def run_config(base: Case, **adapter: Any) -> Config:
    train = TrainConfig(micro_batch_size=2, seq=29, dtype="fp32", recompute=True)
    return Config("made", base.weights.model, OptimConfig(lr=3e-3), train=train, adapter=AdapterConfig(**adapter))


def adapter_in(session: Any, config: Config) -> adapters.Adapter:
    """The adapter as a session has it."""
    pairs, at = {}, {}
    for m in targeted(config.model, config.adapter.targets):
        a, b = (session.read(name) for name in m.factors)
        first = at[m.weight] = at.get(m.weight, -config.adapter.rank) + config.adapter.rank
        pairs[m] = adapters.Pair(a[first : first + config.adapter.rank], b, config.adapter.scale)
    return adapters.Adapter(Path("session"), pairs, {})


def peft_gradients(model: Any, base: Case) -> dict[str, np.ndarray]:
    """By our names, in our order of rows."""
    found: dict[str, list[np.ndarray]] = {}
    given = {name.replace(".default", ""): p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    for m in modules(base.weights.model):
        for half, ours in zip("AB", m.factors, strict=True):
            if (grad := given.pop(f"base_model.model.{m.name}.lora_{half}.weight", None)) is not None:
                order = adapters._order(base.weights.model, m) if half == "B" else None
                found.setdefault(f"{ours}.grad", []).append(grad if order is None else grad[order])
    assert not given
    return {name: np.concatenate(grads) for name, grads in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_are_pefts(tmp_path, family):
    """On all linear layers, or where PEFT puts them, from B that are not zero: then every A has a gradient too."""
    base = base_of(tmp_path / "base", family)
    config = run_config(base, method="lora:3", alpha=5.0, targets="all-linear" if family in ("llama", "gpt2") else "", rslora=True)
    tokens, targets = batch_of(base.weights.model)
    valid = int((targets >= 0).sum())
    programs = build_programs(config)
    with opened(programs, "cpu") as session:
        session.run("init", seed=7)
        base.weights.load(session)
        for name, t in session.tensors.items():
            if ".lora_B." in name and t.role == "parameter":
                session.write_rows(name, 0, np.random.default_rng(len(name)).normal(size=t.shape).astype(np.float32) * 0.1)
        adapters.write(adapter_in(session, config), tmp_path / "start", config=config, base=str(tmp_path / "base"))
        start = replace(config, adapter=AdapterConfig("lora"), train=replace(config.train, init_from=str(tmp_path / "start")))
        begun, weights = begin_from(start, {"adapter.method": "lora"})
        assert (begun.adapter.rank, begun.adapter.scale) == (3, pytest.approx(config.adapter.scale))
        session.run("init", seed=8)  # other A, B zero: what the steps begin with is the folder's
        weights.load(session)
        model = peft.PeftModel.from_pretrained(base.model, tmp_path / "start", is_trainable=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        session.write("tokens", tokens)
        session.write("targets", targets)
        first = 0.0
        for step in range(STEPS):
            sizes = {"batch": 2, "seq": 29, "accumulate": 0, "last": 1, "seed": 1, "step": step + 1, "sample": 0}
            session.run("forward_backward", inv_targets=1 / valid, **sizes)
            logits = model(torch.as_tensor(tokens, dtype=torch.long)).logits
            flat = torch.as_tensor(targets, dtype=torch.long).reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-1)
            loss.backward()
            if step == 0:
                expected = peft_gradients(model, base)
                assert {n for n, t in session.tensors.items() if t.role == "gradient"} == set(expected)
                for name, grad in expected.items():
                    assert relative(session.read(name), grad) < LIMIT, name
            assert float(session.read("loss")[0]) == pytest.approx(loss.item(), rel=1e-4), step
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.run("optimizer_step", lr=3e-3, step=step + 1)
            first = first or loss.item()
        assert loss.item() < 0.97 * first


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_folder_gives_pefts_logits(tmp_path, family):
    """With ranks and alphas of single modules. Written again here, it has the same tensors, and PEFT the same logits."""
    base = base_of(tmp_path / "base", family)
    known = modules(base.weights.model)
    words = {"target_modules": "all-linear", "r": 3, "lora_alpha": 5, "rank_pattern": {known[0].leaf: 4}}
    words |= {"alpha_pattern": {known[0].name: 7}, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base.model, peft.LoraConfig(**words)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(tmp_path / "adapter")
    tokens, _ = batch_of(base.weights.model)
    expected = model(torch.as_tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    with barellm.load(tmp_path / "base", device="cpu", dtype="fp32", adapters={"one": tmp_path / "adapter"}) as ours:
        plain = ours.logits(tokens)
        ours.use("one")
        assert relative(ours.logits(tokens), expected) < LIMIT < relative(plain, expected)
        ours.use(None)
        np.testing.assert_array_equal(ours.logits(tokens), plain)

    found = adapters.read(tmp_path / "adapter", base.weights.model)
    one = [m for m in found.pairs if len(found.pairs[m].a) == 3]
    some = adapters.Adapter(found.path, {m: found.pairs[m] for m in one}, {})
    config = run_config(base, method="lora:3", alpha=5.0)
    adapters.write(some, tmp_path / "again", config=config, base=str(tmp_path / "base"))
    before, after = (dict(_arrays(tmp_path / name)) for name in ("adapter", "again"))
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name])
    plain_model = type(base.model).from_pretrained(tmp_path / "base").eval()
    again = peft.PeftModel.from_pretrained(plain_model, tmp_path / "again").eval()
    wanted = again(torch.as_tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    weights = with_adapter(base.weights, tmp_path / "again")
    assert relative(_logits(weights, tokens), wanted) < LIMIT


def test_what_peft_has_and_barellm_has_not_is_refused(tmp_path):
    base = base_of(tmp_path / "base", "llama")
    for words, said in (({"use_dora": True}, "use_dora is True"), ({"bias": "all"}, "bias is 'all'")):
        model = peft.get_peft_model(base_of(tmp_path / "base", "llama").model, peft.LoraConfig(target_modules=["q_proj"], **words))
        model.save_pretrained(tmp_path / "no")
        with pytest.raises(UserError, match=said):
            adapters.read(tmp_path / "no", base.weights.model)


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    return load_file(folder / "adapter_model.safetensors")


def _logits(weights: Any, tokens: np.ndarray) -> np.ndarray:
    from barellm.assembly.logits import logits_program
    from barellm.assembly.programs import build

    store, programs = build(weights.model, compute="fp32")
    programs["logits"] = logits_program(store, weights.model, batch=2, seq=29, compute="fp32")
    with opened({"logits": programs["logits"]}, "cpu") as session:
        weights.load(session)
        session.write("tokens", tokens)
        session.run("logits", batch=2, seq=29)
        return session.read("logits").reshape(2, 29, -1)[..., : weights.model.vocab_size]


def test_modules_that_have_adapters_if_nobody_says_are_pefts():
    """Families that PEFT has none for get them on all linear layers."""
    theirs = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    known = {name: ",".join(theirs[name]) for name in (*families.NAMES, "gpt2") if name in theirs}
    assert known == DEFAULTS and len(known) >= 8
