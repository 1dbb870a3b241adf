"""The lm-evaluation-harness on a run, beside its own model of transformers' on the same weights, exported. The tasks are local."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.bpe import trained_bpe
from barellm.errors import UserError
from barellm.models.gpt2 import Config as ModelConfig
from tests.interop.models import checkpoint_of, random_arrays

pytest.importorskip("torch")
pytest.importorskip("accelerate")  # which the harness's own model needs
lm_eval = pytest.importorskip("lm_eval")

pytestmark = pytest.mark.oracle
TEXT = "A man holds a ladder. He climbs up and sees the sea: it's blue, isn't it? Then two more come.\n" * 20
ROWS = [
    {"question": "A man holds a", "choices": [" ladder", " sea: it's blue", "n", " two men"], "answer": 0},
    {"question": "Then two", "choices": [" more come.", " climb", " sees the", " it's"], "answer": 0},
    {"question": "He climbs up and ", "choices": ["sees the sea", "holds", "a ladder. He", "blue"], "answer": 2},
    {"question": "It", "choices": ["'s", " is", " isn't", "?"], "answer": 1},
]
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{question * 9}}'\n"
    "metric_list:\n  - metric: bits_per_byte\n",
    "go_on": "output_type: generate_until\ndoc_to_text: question\ndoc_to_target: question\n"
    "generation_kwargs:\n  until: ['e', 'zz']\n  max_gen_toks: 12\nmetric_list:\n  - metric: bypass\n",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, body in TASKS.items():
        head = f"task: barellm_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\n"
        (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{body}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of random weights with a tokenizer; beside it, in hf, the same for transformers."""
    bpe = trained_bpe(lambda: [TEXT], vocab=300)
    model = ModelConfig(layers=2, heads=2, d_model=16, vocab_size=bpe.vocab_size, max_seq=24)
    checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)
    command = ["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "hf")]
    assert main(command) == 0
    return tmp_path / "run"


def test_the_harness_finds_what_it_finds_with_transformers(tasks, run):
    from lm_eval.tasks import TaskManager

    import barellm.cli.lm_eval  # noqa: F401  (registers the model)

    known = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"barellm_{name}" for name in TASKS]
    found = {}
    for model, where in (("barellm", f"run={run},dtype=fp32"), ("hf", f"pretrained={run.parent / 'hf'},dtype=float32")):
        found[model] = lm_eval.simple_evaluate(
            model=model, model_args=where, tasks=names, task_manager=known, batch_size=3, device="cpu", bootstrap_iters=0,
        )  # fmt: skip
    ours, theirs = found["barellm"]["samples"], found["hf"]["samples"]
    for name in names:
        assert len(ours[name]) == len(ROWS)
        for mine, other in zip(ours[name], theirs[name], strict=True):
            for a, b in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                if name == "barellm_choose":
                    assert a[1] == b[1]
                    np.testing.assert_allclose(a[0], b[0], rtol=1e-4)
                elif name == "barellm_roll":
                    np.testing.assert_allclose(a, b, rtol=1e-4)
                else:
                    assert a == b and a
    for name in names[:2]:
        mine, other = found["barellm"]["results"][name], found["hf"]["results"][name]
        for key, value in other.items():
            if "," in key and "stderr" not in key:
                assert mine[key] == pytest.approx(value, rel=1e-4), key


def test_a_task_with_beams_is_refused(run):
    from barellm.cli.lm_eval import Barellm

    with pytest.raises(UserError, match="a task asks for num_beams 4, and barellm has no beam search, expected 1"):
        Barellm(str(run))._answers(["A man"], {"num_beams": 4})


def test_the_harness_s_command_knows_the_model_and_mistakes_are_one_line(tasks, run, monkeypatch, capsys):
    from barellm.cli.lm_eval import main as harness

    def command(*words: str) -> int:
        base = ["lm_eval", "run", "--model", "barellm", "--include_path", str(tasks), "--tasks", "barellm_choose"]
        monkeypatch.setattr(sys, "argv", [*base, *words])
        return harness()

    assert command("--model_args", f"run={run}", "--batch_size", "2") == 0
    assert "|barellm_choose|" in capsys.readouterr().out
    assert command("--model_args", f"run={run}-none") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("barellm: error: ")
