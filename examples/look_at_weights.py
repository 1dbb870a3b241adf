"""Looks at the weights of a trained model: numbers in the terminal, pictures in a folder.

    python examples/look_at_weights.py runs/default --out pictures
    python examples/look_at_weights.py runs/gpt2 --out pictures --tokens " the" Paris

RUN is whatever `barellm.load` opens: a run, a Hugging Face folder, a GGUF or llm.c file. positions.svg has the position embeddings
as an image and a few columns as curves, tokens.svg the norms of the token embeddings, layers.svg the norms of each layer's matrices
and the singular values of a few. docs/path.md shows those of the default run and says what is seen in them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import barellm
from barellm.checkpoint.weights import parameters
from barellm.data.tokenizers import Ids
from barellm.errors import UserError

TRIED = (" the", " and", "self", " self", "return", " return", "0", "(", "e")  # tokens to find neighbours of, where they are one
NEAREST, ENDS, COLUMNS = 5, 8, 3


def sine_share(columns_TC: np.ndarray) -> np.ndarray:
    """(T, C) -> (C,): the largest share that one frequency has in a column's variance. 1 is a sine of whole periods."""
    power = abs(np.fft.rfft(columns_TC - columns_TC.mean(0), axis=0)) ** 2
    return power.max(0) / np.maximum(power.sum(0), 1e-30)


def neighbour_cosine(rows_TC: np.ndarray) -> float:
    """The mean cosine of each row and the next one."""
    unit = rows_TC / np.linalg.norm(rows_TC, axis=1, keepdims=True)
    return float((unit[:-1] * unit[1:]).sum(1).mean())


def nearest(wte_VC: np.ndarray, token: int, count: int = NEAREST) -> list[tuple[int, float]]:
    """The other tokens whose embeddings have the largest cosines with this one's, the largest first."""
    norms = np.maximum(np.linalg.norm(wte_VC, axis=1), 1e-30)
    cosines = wte_VC @ wte_VC[token] / (norms * norms[token])
    cosines[token] = -np.inf
    best = np.argsort(-cosines, kind="stable")[: min(count, len(cosines) - 1)]
    return [(int(i), float(cosines[i])) for i in best]


def spectrum(matrix: np.ndarray) -> np.ndarray:
    """Singular values, the largest first."""
    return np.linalg.svd(matrix.astype(np.float64), compute_uv=False)


def stable_rank(singular: np.ndarray) -> float:
    """The sum of the squared singular values over the largest square: a rank that small ones do not count in."""
    return float((singular**2).sum() / singular[0] ** 2)


def shown(model: barellm.Model, token: int) -> str:
    """A token as text; its bytes where they are no whole character, its id where the model has no tokenizer."""
    if isinstance(model.tokenizer, Ids):
        return str(token)
    data = model.tokenizer.token_bytes(int(token))
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)


def chosen(model: barellm.Model, texts: Sequence[str]) -> list[int]:
    """The ids of the texts, each of which has to be one token; without texts those of TRIED that are."""
    found = []
    for text in texts or (() if isinstance(model.tokenizer, Ids) else TRIED):
        ids = [int(i) for i in model.tokenizer.encode(text)]
        if len(ids) == 1:
            found.append(ids[0])
        elif texts:
            raise UserError(f"--tokens: {text!r} is {len(ids)} tokens, expected a text that is one token")
    return found


def look_at_positions(model: barellm.Model, out: Path) -> None:
    wpe_TC = model.weight("wpe")
    shares, norms = sine_share(wpe_TC), np.linalg.norm(wpe_TC, axis=1)
    print(f"positions: {wpe_TC.shape[0]} of {wpe_TC.shape[1]} numbers, norms {norms.min():.3f} to {norms.max():.3f}")
    print(f"  neighbours have a cosine of {neighbour_cosine(wpe_TC):.3f}")
    print(f"  one frequency has {np.median(shares):.3f} of a column's variance (median), {shares.max():.3f} at most")
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    limit = float(np.quantile(abs(wpe_TC), 0.99))
    left.imshow(wpe_TC, aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit, interpolation="none")
    left.set(title="position embeddings", xlabel="column", ylabel="position")
    for column in np.sort(np.argsort(-np.linalg.norm(wpe_TC, axis=0), kind="stable")[:COLUMNS]):
        right.plot(wpe_TC[:, column], linewidth=0.8, label=f"column {column}")
    right.set(title=f"the {COLUMNS} columns of the largest norm", xlabel="position")
    right.legend(frameon=False, fontsize=8)
    save(figure, out / "positions.svg")


def look_at_tokens(model: barellm.Model, tokens: Sequence[int], out: Path) -> None:
    wte_VC = model.weight("wte")[: model.config.model.vocab_size]
    norms = np.linalg.norm(wte_VC, axis=1)
    order = np.argsort(norms, kind="stable")
    ends = {"smallest": order[:ENDS], "largest": order[::-1][:ENDS]}
    print(f"token embeddings: {wte_VC.shape[0]} of {wte_VC.shape[1]} numbers, the median of their norms is {np.median(norms):.3f}")
    for name, ids in ends.items():
        print(f"  {name}: {', '.join(f'{shown(model, i)} {norms[i]:.3f}' for i in ids)}")
    for token in tokens:
        found = ", ".join(f"{shown(model, i)} {cosine:.3f}" for i, cosine in nearest(wte_VC, token))
        print(f"  nearest to {shown(model, token)}: {found}")
    figure = Figure(figsize=(9.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(norms[order], color="#5b8def")
    for name, place in (("smallest", 0.12), ("largest", 0.62)):
        text = "\n".join(shown(model, i).replace("$", r"\$") for i in ends[name])
        axes.text(place, 0.96, f"{name}:\n{text}", transform=axes.transAxes, va="top", fontsize=8)
    axes.set(title="norms of the token embeddings, sorted", xlabel="tokens", ylabel="norm")
    save(figure, out / "tokens.svg")


def look_at_layers(model: barellm.Model, out: Path) -> None:
    """Matrices of the blocks, `h.LAYER.KIND`: their root mean squares, and singular values of those of the first and last block."""
    found: dict[str, dict[int, str]] = {}
    for name, t in parameters(model.config.model).items():
        prefix, _, rest = name.partition(".")
        layer, _, kind = rest.partition(".")
        if prefix == "h" and layer.isdigit() and len(t.shape) == 2:
            found.setdefault(kind.removesuffix(".weight"), {})[int(layer)] = name
    figure = Figure(figsize=(9.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    print("matrices of the blocks: root mean square, largest singular value, stable rank")
    for i, (kind, names) in enumerate(found.items()):
        sizes = {}
        for layer, name in names.items():
            matrix = model.weight(name)
            sizes[layer], singular = float(np.sqrt((matrix.astype(np.float64) ** 2).mean())), spectrum(matrix)
            print(f"  {name}: {sizes[layer]:.4f}, {singular[0]:.3f}, {stable_rank(singular):.1f} of {len(singular)}")
            if layer in (min(names), max(names)):
                style = "-" if layer == max(names) else ":"
                right.plot(singular, style, color=f"C{i}", linewidth=1, label=f"{kind}, layer {layer}")
        left.plot(sizes.keys(), sizes.values(), "o-", color=f"C{i}", markersize=3, label=kind)
    left.set(
        title="root mean square of each layer's matrices", xlabel="layer", ylim=(0, None), xticks=range(model.config.model.layers)
    )
    right.set(title="singular values, first and last layer", xlabel="index")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=7)
    save(figure, out / "layers.svg")


def save(figure: Figure, path: Path) -> None:
    style = {"svg.hashsalt": "barellm", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, facecolor="white", metadata={"Date": None})
    print(f"  {path}")


def look(run: str | Path, out: Path, texts: Sequence[str] = ()) -> None:
    with barellm.load(run) as model:
        tokens, names = chosen(model, texts), parameters(model.config.model)
        out.mkdir(parents=True, exist_ok=True)
        if "wpe" in names:
            look_at_positions(model, out)
        else:
            print("positions: the model has no position embeddings, such as one with RoPE")
        look_at_tokens(model, tokens, out)
        look_at_layers(model, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run, a checkpoint, or a model of another program")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--tokens", nargs="+", default=[], metavar="TEXT", help="tokens whose nearest are listed")
    args = parser.parse_args()
    try:
        look(args.run, args.out, args.tokens)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
