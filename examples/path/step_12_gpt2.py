"""12. GPT-2: what was written on the way is the model that barellm ships, in numbers and in its file format.

The shipped GPT-2 of these sizes trains by the same recipe from the same seed: its losses are those of our model, bit for bit. Then
our weights go to a Hugging Face folder, config.json and model.safetensors, whose linear layers are (in, out), as Conv1D of
transformers has them. `barellm.load` opens it as it opens OpenAI's weights, and its loss is that of our model."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
from common import FOLDER, dataset, report, steps_asked, train
from step_09_mixed_precision import MIXED
from step_10_optimizer import recipe
from step_11_kv_cache import Config, gpt

import barellm
from barellm.models import gpt2

COMPARED = 20  # steps that the shipped model takes beside ours


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The format is 8 bytes with the length of a header, the header in JSON, and the arrays one after another."""
    ends = list(accumulate(array.nbytes for array in tensors.values()))
    places = zip(tensors.items(), [0, *ends], ends, strict=False)
    header = {name: {"dtype": "F32", "shape": a.shape, "data_offsets": [lo, hi]} for (name, a), lo, hi in places}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for a in tensors.values()))


def hugging_face(model: barellm.Model, folder: Path) -> Path:
    """The model's weights as Hugging Face has GPT-2's."""
    cfg, tensors = model.config.model, {}
    for name in gpt2_names(cfg.layers):
        array = model.weight(name)[: cfg.vocab_size] if name == "wte" else model.weight(name)  # without the padded rows
        conv1d = array.ndim == 2 and name.startswith("h.")
        theirs = f"transformer.{name}.weight" if name in ("wte", "wpe") else f"transformer.{name}"
        tensors[theirs] = np.ascontiguousarray(array.T if conv1d else array)
    folder.mkdir()
    sizes = {
        "n_layer": cfg.layers,
        "n_head": cfg.heads,
        "n_embd": cfg.d_model,
        "n_positions": cfg.max_seq,
        "vocab_size": cfg.vocab_size,
    }
    kind = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(kind | sizes))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def gpt2_names(layers: int) -> list[str]:
    kinds = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names = [*(f"h.{i}.{kind}" for i in range(layers) for kind in kinds), "ln_f"]
    return ["wte", "wpe", *(f"{name}.{part}" for name in names for part in ("weight", "bias"))]


def main(steps: int) -> float:
    run = train(Config(**gpt.GPT), steps, "ours", optim=recipe(steps), **MIXED)
    compared = min(steps, COMPARED)
    shipped_model = gpt2.Config(**gpt.GPT, d_model=Config().d_model, max_seq=Config().max_seq)
    shipped = train(shipped_model, steps, "shipped", optim=recipe(steps), stop_at=compared, **MIXED)
    same = shipped.losses == run.losses[:compared]
    print(f"losses of the first {compared} steps, ours and the shipped GPT-2's: {'equal' if same else 'different'}")

    rows = dataset().validation(seq=Config().max_seq)
    tokens_BT, targets_BT = rows.batch(0, 32)
    with run.load(device="cpu", dtype="fp32") as ours:
        folder = hugging_face(ours, FOLDER / "gpt2")
        nats = ours.loss(tokens_BT, targets_BT)
    with barellm.load(folder, device="cpu", dtype="fp32") as theirs:
        found = theirs.loss(tokens_BT, targets_BT)
    print(f"our weights in our model: {nats:.6f} nats; from GPT-2's file in the shipped model: {found:.6f}")
    return report(run.val_nats)


if __name__ == "__main__":
    main(steps_asked())
