"""The docs' way through, for four families: a folder that transformers saved is imported, talked to, fine-tuned on conversations,
sampled and exported, and transformers gives the export the same logits and the same text of a conversation."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import barellm  # noqa: E402
from barellm.cli.main import main  # noqa: E402
from barellm.training import curve  # noqa: E402
from tests.chat import families as pipelines  # noqa: E402
from tests.oracle import chats  # noqa: E402
from tests.oracle.families import LIMIT, made  # noqa: E402
from tests.oracle.torch_gpt2 import relative  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.extended]
SUMS = [(a, b) for a in range(4) for b in range(4)]
SAYS = {"qwen3": "", "smollm3": "You add.", "olmo2": "You add.", "gemma3_text": ""}  # Qwen's parts of a content are below


def saved(folder, family):
    """As transformers saves a model with its tokenizer; the model has a few rows more than ids."""
    pipeline, template = chats.PAIRS[family][0]
    try:
        made_here = pipelines.folder(folder / "pipeline", pipeline, template=chats.template(template))
    except LookupError as error:
        pytest.skip(str(error))
    tokenizer = transformers.AutoTokenizer.from_pretrained(made_here)
    end = tokenizer.convert_tokens_to_ids(pipelines.END[pipeline])
    model = made(family, vocab_size=len(tokenizer) + 3, max_position_embeddings=256, eos_token_id=end)
    model.generation_config.do_sample, model.generation_config.top_p = True, 0.9
    for each in (model, tokenizer):
        each.save_pretrained(folder / "hf")
    return folder / "hf"


def conversation(family, a, b):
    question = f"What is {a} plus {b}?"
    asked = {"role": "user", "content": [{"type": "text", "text": question}] if family == "qwen3" else question}
    system = [{"role": "system", "content": SAYS[family]}] if SAYS[family] else []
    return [*system, asked, {"role": "assistant", "content": f"It is {a + b}."}]


@pytest.mark.parametrize("family", SAYS)
def test_from_a_folder_to_a_folder(own_cache, tmp_path, monkeypatch, capsys, family):
    monkeypatch.setattr(curve, "image", lambda path, *args, **more: path.write_bytes(b""))
    (tmp_path / "pipeline").mkdir()
    folder, run, tuned, out = saved(tmp_path, family), tmp_path / "run", tmp_path / "tuned", tmp_path / "out"
    talks = [conversation(family, a, b) for a, b in SUMS]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert main(["import", str(folder), "--out", str(run)]) == 0
    said = capsys.readouterr().out
    was = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert f": {family} (architecture llama3), {was.num_parameters():,} parameters" in said
    train = next(line for line in said.splitlines() if "--init-from" in line).split()[1:-1]  # as it is printed
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi there\n"))
    assert main(["chat", str(run), "-n", "4", "--dtype", "fp32"]) == 0
    assert "its chat template" in capsys.readouterr().out
    words = ["--lr", "1e-3", "--optim.min_lr", "0", "--warmup", "1", "--batch", "4", "--gradient-accumulation-steps", "1"]
    words += ["--seq", "96", "--steps", "30", "--dtype", "fp32", "--out", str(tuned)]
    assert main([*train, str(tmp_path / "sums.jsonl"), *words]) == 0
    losses = [row["loss"] for row in map(json.loads, (tuned / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    assert main(["sample", str(tuned), "-n", "8", "--prompt", "What is 2 plus 3?"]) == 0
    assert main(["export", str(tuned), "--format", "hf", "--out", str(out)]) == 0

    model, missing = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    assert not any(missing.values()), missing
    first = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for key in ("eos_token_id", "top_p"):
        assert getattr(model.generation_config, key) == getattr(was.generation_config, key)
    with barellm.load(tuned) as ours:
        for talk in talks[:3]:
            # Their template may write parts as they stand; then it is given one text.
            plain = [{**m, "content": m["content"][0]["text"] if isinstance(m["content"], list) else m["content"]} for m in talk]
            text = ours.tokenizer.chat_text(talk, add_generation_prompt=False)
            assert text == theirs.apply_chat_template(plain, tokenize=False) == first.apply_chat_template(plain, tokenize=False)
            ids = ours.tokenizer.chat(talk, add_generation_prompt=False)
            assert ids.tolist() == theirs.apply_chat_template(plain, return_dict=False)
            with torch.no_grad():
                expected = model.eval()(torch.as_tensor(ids, dtype=torch.long)[None]).logits.numpy()
            assert relative(ours.logits(ids[None]), expected) <= LIMIT
            assert np.abs(expected).max() > 0.1
