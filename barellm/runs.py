"""A training run from Python: `barellm.train`."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import BytesIO
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from barellm import models
from barellm.api import Model, load
from barellm.assembly import build
from barellm.checkpoint.folder import RunFolder
from barellm.config import Config, aliases, overrides
from barellm.config.aliases import PRESETS
from barellm.config.fields import converted, path_of
from barellm.errors import UserError, shown
from barellm.interop.sources import starting_weights
from barellm.training import curve, metrics, run
from barellm.training.console import Console
from barellm.training.resume import resume_from

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Step:
    """What a callback of `barellm.train` gets: one step that was done. `loss` and `norm` (of the gradient) are NaN where they were
    not finite."""

    step: int
    loss: float
    norm: float
    lr: float
    tokens_per_s: float
    seconds: float
    """Time since the beginning of the run."""
    _stop: list[bool] = field(repr=False)
    muon_lr: float | None = None
    """The rate of the matrices that Muon updates; None where there are none."""

    def stop(self) -> None:
        """End the run after this step, as Ctrl-C does: a checkpoint is saved, from which it can be resumed."""
        self._stop.append(True)


@dataclass(frozen=True)
class Run:
    """What `barellm.train` gives back. `finished` is False for a run that a callback or a signal has stopped."""

    folder: Path
    finished: bool
    rows: list[dict[str, Any]]
    """All rows of metrics.jsonl (docs/checkpoints.md), from step 1 on, also of a run that was resumed."""

    def __repr__(self) -> str:
        steps, found = len(self.losses), self.val_nats
        validation = "" if found is None else f", {found:.4f} nats on validation"
        return f"<barellm.Run {self.folder}: {steps} steps, {'' if self.finished else 'not '}finished{validation}>"

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each step, in nats per token; None where it was not finite."""
        return [row["loss"] for row in self.rows if row["kind"] == "train"]

    @property
    def val_nats(self) -> float | None:
        """The validation loss in nats per token, the latest there is; None where nothing was evaluated."""
        return next((row["val_nats"] for row in reversed(self.rows) if "val_nats" in row), None)

    @property
    def bits_per_byte(self) -> float | None:
        """The same in bits per byte of text; None where the bytes of the tokens are not known."""
        return next((row["val_bits_per_byte"] for row in reversed(self.rows) if "val_nats" in row), None)

    def plot(self, y: str = "loss", *, axis: str = "steps", log: str = "") -> Figure:
        """The curve as a figure of matplotlib, which a notebook shows: `y` is loss, bits (per byte), lr, norm, speed or hellaswag,
        over steps, tokens or seconds; `log` names logarithmic axes: x, y or xy. UserError for a quantity that the run has not."""
        for name, value, known in (("y", y, curve.QUANTITIES), ("axis", axis, curve.AXES), ("log", log, ("", "x", "y", "xy"))):
            if value not in known:
                raise UserError(f"{name} is {shown(value)}, expected {', '.join(map(repr, known))}")
        found = curve.Curve(str(self.folder), *curve.series(self.rows, axis=axis, y=y), y, curve.gzip_line(self.rows, y=y))
        if not (found.train or found.val):
            raise UserError(f"{self.folder} has no {curve.QUANTITIES[y].label}")
        figure = curve.picture([found], title=self.folder.name, axis=axis, log=log)
        figure._repr_png_ = partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]  (for notebooks without pyplot)
        return figure

    def to_pandas(self) -> DataFrame:
        """The steps and evaluations as a pandas.DataFrame, a row for each step. UserError where pandas is missing."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise UserError("to_pandas needs the package pandas: pip install pandas") from None
        steps: dict[int, dict[str, Any]] = {}
        for row in self.rows:
            if row["kind"] in ("train", "eval", "hellaswag"):
                steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k not in ("kind", "step")})
        return pandas.DataFrame.from_dict(steps, orient="index").rename_axis("step").sort_index()

    def load(self, **how: Any) -> Model:
        """`barellm.load` of the run's folder."""
        return load(self.folder, **how)


def train(
    config: str | Config | None = None, *, out: str | Path | None = None, resume: bool = False, device: str = "auto",
    callbacks: Iterable[Callable[[Step], object]] = (), quiet: bool = False, **changes: Any,
) -> Run:  # fmt: skip
    """Train a model: the run that `barellm train` does, with its folder, checkpoints, metrics, evaluation and samples.

    `config` is the name of a preset ("default" unless it is given) or a `barellm.config.Config`, which may be of a model of your
    own. `changes` replace its keys: the short names of the command line (data, steps, minutes, batch, seq, seed, lr, schedule,
    dtype, recompute, init_from, gemm_backend), or sections, such as `model={"layers": 2}`, `optim=`, `train=` and `data=`.

    `out` is the run's folder, new or empty (default: runs/PRESET-DATE-TIME). With `resume` the run in `out` resumes from its newest
    checkpoint, and is bitwise identical to one that never stopped. Each of `callbacks` gets a `Step` after every step and may
    stop the run; an exception that it raises ends the run without a checkpoint. `quiet`: nothing is printed.

    UserError, a ValueError of one line, for what does not fit together, and for a loss that stays not finite."""
    started = time.monotonic()
    build.check_device(device)
    if not isinstance(config, str | Config | None):
        raise UserError(f"config is {shown(config)}, expected the name of a preset or a barellm.config.Config")
    out = None if out is None else path_of("out", out)
    resume, quiet = converted("resume", resume, bool), converted("quiet", quiet, bool)
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks := list(callbacks))):
        raise UserError(f"callbacks is {shown(callbacks)}, expected a list of functions")
    requested = _Arguments(config, overrides.named(changes))
    if line := aliases.renamed([*changes, *requested.changes]):
        warnings.warn(line, FutureWarning, stacklevel=2)
    listener = _Callbacks(callbacks)
    with ExitStack() as files:
        console = Console(stream=files.enter_context(open(os.devnull, "w")) if quiet else None)
        if resume:
            if out is None:
                raise UserError("resume is True and out is not given, expected the folder of a run")
            chosen, keys, start = resume_from(out, preset=requested.preset, requested=requested.keys, console=console)
            keys = keys if start else overrides.flat(chosen)
        else:
            chosen, keys, start = requested.chosen()
        chosen, weights = starting_weights(chosen, keys, start)
        chosen.check()
        before = start.meta["machine"].get("device", "") if start else ""
        device = build.chosen_device(device, chosen, before=before)
        path = Path("runs", f"{chosen.preset}-{time.strftime('%Y%m%d-%H%M%S')}") if out is None else out
        folder = files.enter_context(RunFolder(path, resume=resume, numbered=out is None))
        job = run.Run(
            chosen, start=start, weights=weights, device=device, console=console, started=started,
            requested=resume or isinstance(config, Config) or "data.tokenizer" in keys, listen=listener.listen,
        )  # fmt: skip
        job.check_vocabulary(keys)
        files.callback(gc.unfreeze)  # the loop takes what there is for permanent, and this process goes on
        status = job.execute(folder)
    found = Run(folder.path, status == 0, metrics.read(folder.path / "metrics.jsonl"))
    if console.notebook and found.losses:
        import_module("IPython.display").display(found.plot())
    return found


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@dataclass(frozen=True)
class _Arguments:
    """The arguments that say which run is wanted."""

    config: str | Config | None
    changes: dict[str, object]

    @property
    def preset(self) -> str | None:
        return self.config.preset if isinstance(self.config, Config) else PRESETS.get(self.config or "", self.config)

    def keys(self, base: Config) -> dict[str, Any]:
        return overrides.checked(self.changes, base)

    def chosen(self) -> tuple[Config, dict[str, Any], None]:
        """The configuration of a new run, and which of its keys were asked for."""
        base = self.config if isinstance(self.config, Config) else models.preset(self.preset or "default")
        keys = self.keys(base)
        return overrides.changed(base, keys), keys, None


@dataclass(frozen=True)
class _Callbacks:
    """Callbacks, and whether one of them has stopped the run."""

    callbacks: list[Callable[[Step], object]]
    stops: list[bool] = field(default_factory=list)

    def listen(self, row: dict[str, Any]) -> bool:
        if row["kind"] == "train":
            loss, norm = (nan if row[key] is None else row[key] for key in ("loss", "grad_norm"))
            known = (row["lr"], row["tokens_per_s"], row["seconds"])
            step = Step(row["step"], loss, norm, *known, self.stops, row.get("muon_lr"))
            for callback in self.callbacks:
                callback(step)
        return bool(self.stops)
