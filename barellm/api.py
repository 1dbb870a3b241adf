"""A trained model from Python: `barellm.load`."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from barellm.assembly import quantized
from barellm.assembly.build import check_device, chosen_device, opened, proven_options, resolved
from barellm.assembly.logits import logits_program
from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.checkpoint.weights import Weights
from barellm.config import AdapterConfig, Config, overrides
from barellm.config.aliases import accepts_old_names
from barellm.config.fields import converted, path_of
from barellm.data.tokenizers import Ids, Tokenizer
from barellm.errors import UserError, shown
from barellm.generation.decode import Decoder, cache_positions, open_decoder
from barellm.generation.samplers import Sampling, sampling
from barellm.generation.writing import Written, unseen, write
from barellm.interop import imported
from barellm.interop.sources import is_checkpoint, open_weights, with_adapter
from barellm.models.training_schedule import on_step

R = TypeVar("R")


def load(
    path: str | Path, *, device: str = "auto", dtype: str | None = None, tokenizer: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None, exact: bool = False,
) -> Model:  # fmt: skip
    """Open a trained model.

    `path` is a run or a checkpoint of barellm (of a run the newest checkpoint that is whole), a folder of Hugging Face with
    config.json and model.safetensors, a model of its hub ("hf:OWNER/NAME"), or a file of llama.cpp (GGUF) or llm.c. `device` is
    "auto" (a GPU that has passed its self-check, else the CPU), "cpu", "cuda" or "reference"; `dtype` is "fp32", "bf16" or "auto",
    and without it what the model was trained in. `tokenizer` names a kind or a folder where the model has none of its own.
    A run that trained an adapter is its base with that. `adapters` names others of this model, runs or folders of PEFT's, between
    which `Model.use` changes. With `exact`, on a CPU, a token has the same bits in a prompt and as it is generated.

    Nothing is computed yet, and the weights are only mapped. UserError, a ValueError of one line, for a path that holds no model.
    """
    check_device(device)
    kind = "" if tokenizer is None else str(path_of("tokenizer", tokenizer))
    weights = open_weights(path_of("path", path), tokenizer=kind)
    if weights.tokenizer is None:
        weights = replace(weights, tokenizer=Ids(weights.model.vocab_size))
    meta: dict[str, Any] = {"step": 0}
    if is_checkpoint(weights):
        meta = checkpoint.read_meta(weights.path)
        config = replace(overrides.from_json(meta["config"], weights.path / checkpoint.META), adapter=AdapterConfig())
    else:
        config = imported.like(weights)
    config = overrides.changed(config, {} if dtype is None else {"train.dtype": dtype})
    device = chosen_device(device, config)
    if exact and device != "cpu":
        raise UserError(f"exact is for the CPU, and the device is {device}")
    model = Model(weights, resolved(config, device), device, meta["step"], meta.get("total_steps"))
    model._exact = exact
    model._variants |= {name: with_adapter(weights, path_of(f"adapters[{name!r}]", one)) for name, one in (adapters or {}).items()}
    return model


@dataclass(frozen=True)
class _Wanted:
    """The programs that a model has open, and the sizes that they were planned for."""

    programs: frozenset[str] = frozenset()
    batch: int = 1
    seq: int = 1
    positions: int = 1

    def and_also(self, program: str, *, batch: int = 1, seq: int = 1, positions: int = 1) -> _Wanted:
        sizes = {"batch": batch, "seq": seq, "positions": positions}
        return _Wanted(self.programs | {program}, **{name: max(getattr(self, name), n) for name, n in sizes.items()})


class Model:
    """Weights and what they compute. `barellm.load` makes it.

    Memory is taken when something is computed for the first time, for what is computed alone, and given back by `close` or at the
    end of a `with`. Results have the same bits in every process and for every number of threads.

    Any number of threads may call it: calls run one after the other, and each gets what it would get alone. A `stream` lets others
    in between its pieces, and goes on with the same text."""

    config: Config
    """The configuration that it was trained with; `config.model` has the sizes."""
    tokenizer: Tokenizer
    """`tokenizer.encode(text)` gives ids, an array of int32, and `tokenizer.decode(ids)` a text."""

    def __init__(self, weights: Weights, config: Config, device: str, step: int, total: int | None) -> None:
        """Made by `load`; nothing is allocated before the first computation."""
        assert weights.tokenizer is not None
        self.config, self.tokenizer = config, weights.tokenizer
        self._weights, self._device, self._step, self._total = weights, device, step, total
        self._variants: dict[str | None, Weights] = {None: weights}
        self._open, self._wanted, self._session, self._closed = ExitStack(), _Wanted(), None, False
        self._lock = threading.RLock()  # who holds it may use the session
        self._computing = self._interrupted = self._exact = False
        self._cached: weakref.ref[_Place] | None = None  # of the text whose keys and values the session has
        _models.add(self)

    def __repr__(self) -> str:
        sizes = f"{self.parameters:,} parameters, {self.config.model.vocab_size:,} ids"
        return f"<barellm.Model {self._weights.path}: {sizes}, {self.config.train.dtype} on {self._device}>"

    @property
    def parameters(self) -> int:
        """How many numbers it has, without the padded rows of the vocabulary."""
        return sum(t.trained for t in self._weights.tensors.values())

    def weight(self, name: str) -> np.ndarray:
        """A copy of one parameter, fp32, by its name, for example "wte"."""
        tensors = self._weights.tensors
        if not isinstance(name, str) or name not in tensors:
            raise UserError(f"{self._weights.path} has no parameter {shown(name)} (known: {', '.join(tensors)})")
        return self._weights.read_rows(name, 0, int(tensors[name].shape[0]))

    def logits(self, tokens: ArrayLike) -> np.ndarray:
        """The next-token logits at every position: tokens (B, T) -> logits (B, T, V), float32."""
        ids = self._ids("tokens", tokens)
        (B, T), V = ids.shape, self.config.model.vocab_size

        def compute() -> np.ndarray:
            session = self._opened("logits", batch=B, seq=T)
            session.write("tokens", ids)
            session.run("logits", batch=B, seq=T)
            return session.read("logits").reshape(B, T, -1)[:, :, :V].astype(np.float32)

        return self._alone(compute)

    def loss(self, tokens: ArrayLike, targets: ArrayLike) -> float:
        """The mean cross-entropy in nats of targets (B, T) after tokens (B, T). A target of -1 does not count."""
        ids, wanted = self._ids("tokens", tokens), self._ids("targets", targets, least=-1)
        if ids.shape != wanted.shape:
            raise UserError(f"targets is {wanted.shape}, expected the shape of tokens, {ids.shape}")
        if not (counted := int(np.count_nonzero(wanted >= 0))):
            raise UserError("all targets are -1, expected at least one that counts")
        B, T = ids.shape

        def compute() -> float:
            session = self._opened("eval", batch=B, seq=T)
            session.write("tokens", ids)
            session.write("targets", wanted)
            session.run("eval", batch=B, seq=T, inv_targets=1 / counted)
            return float(session.read("loss")[0])

        return self._alone(compute)

    @accepts_old_names
    def generate(
        self, prompt: str | ArrayLike = "", *, max_new_tokens: int = 256, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
        repetition_penalty: float | None = None, stop: str | Sequence[str] = (), seed: int = 1337,
    ) -> str:  # fmt: skip
        """The completion of the prompt, a text or token ids, in one piece. The options are those of `stream`."""
        cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
        how = sampling(self.tokenizer.conventions.sampling, temperature=temperature, seed=seed, **cuts)
        _, pieces = self._text(prompt, max_new_tokens, how=how, stop=stop)
        return self._alone(lambda: "".join(pieces))

    @accepts_old_names
    def stream(
        self, prompt: str | ArrayLike = "", *, max_new_tokens: int = 256, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
        repetition_penalty: float | None = None, stop: str | Sequence[str] = (), seed: int = 1337,
    ) -> Iterator[str]:  # fmt: skip
        """The completion of the prompt, streamed piece by piece.

        The prompt is a text, or token ids, which are taken as they are, with nothing before them. The completion has at most
        `max_new_tokens`, and ends where the model ends its document, or before a `stop` text. `temperature` 0 is greedy
        decoding; `top_k`, `top_p` (nucleus sampling) and `min_p` keep the most likely tokens only (0, 1 and 0: all);
        `repetition_penalty` above 1 makes tokens that the text has already less likely. What is None is as the model's
        generation_config.json says it, else 0.8, 0, 1, 0 and 1. The same seed gives the same text, which is also that of
        `barellm sample`.

        Between two pieces the model may compute anything else, other streams included; what that displaces of this text's KV cache
        is kept meanwhile. UserError at once for an argument that cannot be."""
        cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
        how = sampling(self.tokenizer.conventions.sampling, temperature=temperature, seed=seed, **cuts)
        return _Stream(self, *self._text(prompt, max_new_tokens, how=how, stop=stop))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        variables: Mapping[str, Any] | None = None, **options: Any,
    ) -> str:  # fmt: skip
        """The answer to a conversation: messages, each with a role and a content, by the model's chat template, whose own
        `variables` may be given. The `options` are those of `stream`, which gives an answer piece by piece for
        `model.tokenizer.chat(messages)`. It ends where the model ends a text, or the template a turn."""
        ids, how = (self.tokenizer.chat(messages, **(variables or {})), sampling(self.tokenizer.conventions.sampling, **options))
        stops = [*([stop] if isinstance(stop, str) else stop), *self.tokenizer.turn_stops]
        _, pieces = self._text(ids, max_new_tokens, how=how, stop=stops, ends=self.tokenizer.turn_ends)
        return self._alone(lambda: "".join(pieces))

    def _text(
        self, prompt: str | ArrayLike, tokens: int, *, how: Sampling, stop: str | Sequence[str],
        ends: AbstractSet[int] | None = None,
    ) -> tuple[_Place, Generator[str, None, None]]:  # fmt: skip
        """Check the arguments; the session is opened when the first piece is generated."""
        tokens = converted("max_new_tokens", tokens, int)
        if tokens < 1:
            raise UserError(f"max_new_tokens is {tokens}, expected at least 1")
        self._check_open()
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
            raise UserError(f"stop is {shown(stop)}, expected a text or a list of texts")
        fed = self.tokenizer.prompt(prompt) if isinstance(prompt, str) else self._ids("prompt", prompt, axes="T").tolist()
        if warning := unseen(fed, self.config.model.max_seq):
            warnings.warn(warning, stacklevel=4)
        place = _Place(cache_positions(len(fed) + tokens, self.config.model.max_seq))
        begins = not (isinstance(prompt, str) and prompt)  # nothing of a text before it, or ids such as those of a chat
        text = partial(Written, self.tokenizer, stops=stops, begins=begins, ends=ends)
        return place, self._pieces(place, fed, text, tokens=tokens, how=how)

    def _pieces(
        self, place: _Place, fed: Sequence[int], written: Callable[..., Written], *, tokens: int, how: Sampling
    ) -> Generator[str, None, None]:
        """Generate the pieces of a text, with the lock held; between two of them other computations may use the session."""
        pieces: list[str] = []
        text = written(emit=pieces.append)
        try:
            for _ in write(self._resume(place), [fed], [text], count=tokens, hows=[how]):
                yield from filter(None, pieces)
                pieces.clear()
                self._resume(place)
            yield from filter(None, pieces)
        finally:
            place.ended, place.kept = True, {}

    def use(self, adapter: str | None) -> None:
        """Compute with this one of the adapters that `load` was given, or with None without one. What it changes is written into
        the memory that is open; texts that are being streamed go on with it."""
        if adapter not in self._variants:
            raise UserError(f"adapter is {shown(adapter)}, expected one of {', '.join(map(repr, self._variants))}")

        def change() -> None:
            self._check_open()
            new = self._variants[adapter]
            if self._session is not None:
                changed = {name for name in self._weights.tensors if new.arrays[name] is not self._weights.arrays[name]}
                new.load(self._session, changed)
            self._weights = new

        self._alone(change)

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint into the new or empty folder `path`, which `load` and every command read; the same bits come back. It
        has no state of an optimizer: begin a run with `init_from`. Gives the folder of the checkpoint itself."""
        return imported.save(self._weights, path_of("path", path), config=self.config, step=self._step, total=self._total)

    def close(self) -> None:
        """Give the memory back, once what other threads compute is done. A closed model computes nothing any more."""

        def close() -> None:
            self._closed, self._session, self._cached = True, None, None
            self._open.close()

        self._alone(close)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ids(self, name: str, values: ArrayLike, *, least: int = 0, axes: str = "B, T") -> np.ndarray:
        """int32 ids. UserError for another shape, for what is no integer, and for ids that the vocabulary lacks."""
        wanted, model = f"integers ({axes}{',' * (axes == 'T')})", self.config.model
        if isinstance(values, np.ma.MaskedArray):
            raise UserError(f"{name} has a mask, expected {wanted} without one")
        try:
            ids = np.asarray(values)
        except ValueError:  # rows of different lengths
            raise UserError(f"{name} is {shown(values)}, expected {wanted}") from None
        if ids.ndim != axes.count(",") + 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise UserError(f"{name} is {ids.dtype} {ids.shape}, expected {'a text or ' * (axes == 'T')}{wanted}")
        if axes != "T" and ids.shape[1] > model.max_seq:
            raise UserError(f"{name} is {ids.shape}, the model has {model.max_seq} positions (model.max_seq)")
        for at in np.argwhere((ids < least) | (ids >= model.vocab_size))[:1].tolist():
            known = f"from {least} to {model.vocab_size - 1}"
            raise UserError(f"{name}{at} is {ids[tuple(at)]}, expected an id {known}")
        return ids.astype(np.int32)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"the model of {self._weights.path} is closed: load it again")

    def _alone(self, compute: Callable[[], R]) -> R:
        """What `compute` gives, while no other thread uses the session."""
        with self._lock:
            if self._computing:  # a signal handler, or a finalizer: the thread would wait for itself
                raise UserError("the model is asked by a handler that came in the middle of its own computation")
            try:
                self._computing = True
                if self._device == "cuda" and self._session is not None:
                    self._session.context.enter()  # another thread may have opened it
                return compute()
            except Exception:
                raise
            except BaseException:  # Ctrl-C: its threads may still run what was begun
                self._interrupted = True
                raise
            finally:
                self._computing = False

    def _forked(self) -> None:
        """In a forked child: the lock may be held, and the session computed on, by threads that are not here."""
        self._lock, self._computing = threading.RLock(), False
        self._open, self._wanted, self._session, self._cached = ExitStack(), _Wanted(), None, None

    def _resume(self, place: _Place) -> Decoder:
        """The decoder of a text, with the text's keys and values in the session's KV cache."""
        session = self._opened("decode", positions=place.positions)
        if place.decoder is None:
            place.process = os.getpid()
            place.decoder = open_decoder(session, self.config.model, self.tokenizer, positions=self._wanted.positions)
        if self._cached is None or self._cached() is not place:
            self._set_aside()
            place.decoder.session = session
            for name, values in place.kept.items():
                cache = np.zeros(session.tensors[name].shape, values.dtype)  # it may have more positions than before
                cache[tuple(slice(n) for n in values.shape)] = values
                session.write(name, cache)
            place.kept, self._cached = {}, weakref.ref(place)
        return place.decoder

    def _set_aside(self) -> None:
        """Copy the session's KV cache, which is about to go, for the text that it belongs to."""
        place = self._cached() if self._cached else None
        if place is not None and not place.ended and self._session is not None:
            ops = self._session.programs["decode"].ops
            caches = {t.name for op in ops for t in op.outputs.values() if t.role == "cache"}
            place.kept = {name: self._session.read(name) for name in caches}
        self._cached = None

    def _opened(self, program: str, *, seq: int = 1, **sizes: int) -> Any:
        """A session that has this program for these sizes. One that lacks it is closed, and opened again with both. It is planned
        for a power of two of tokens, so that a text that grows by a few does not open it each time."""
        self._check_open()
        seq = min(self.config.model.max_seq, 1 << (seq - 1).bit_length())
        wanted = self._wanted.and_also(program, seq=seq, **sizes)
        if self._session is not None and wanted == self._wanted and not self._interrupted:
            return self._session
        programs = self._programs(wanted)  # where they are refused, the open session stays
        self._set_aside()
        self._session, self._wanted, self._interrupted = None, _Wanted(), False
        self._open.close()
        with ExitStack() as opening:
            session = opening.enter_context(self._session_of(programs))
            self._open = opening.pop_all()
        self._session, self._wanted = session, wanted
        return session

    @contextmanager
    def _session_of(self, programs: dict[str, Any], matrices: Mapping[str, quantized.Matrix] | None = None) -> Iterator[Any]:
        """A session of programs of this model, with its weights; `matrices`: those of which the programs read codes."""
        options = proven_options(self.config, self._device, training=False)
        if self._device == "cpu":
            quantized.keep_operands(programs, frozenset.intersection(*(w.bf16 for w in self._variants.values())))
        with opened(programs, self._device, **options) as session:
            loading: Any = quantized.Quantizing(session, matrices) if matrices else session
            self._weights.load(loading)
            on_step(session, self.config, self._step, self._total)
            yield session

    def _programs(self, wanted: _Wanted) -> dict[str, Any]:
        """The programs for these sizes, {name: program}, over one store, so that they share the weights."""
        model, compute = self.config.model, self.config.train.dtype
        evaluated, decoded = "eval" in wanted.programs, "decode" in wanted.programs
        store, programs = build(
            model, batch=wanted.batch if evaluated else 0, seq=wanted.seq, compute=compute, decode_batch=1 if decoded else 0,
            decode_seq=wanted.positions if decoded else 0, exact=self._exact,
        )  # fmt: skip
        if "logits" in wanted.programs:
            programs["logits"] = logits_program(store, model, batch=wanted.batch, seq=wanted.seq, compute=compute)
        pieces = ["prefill"] if decoded and "prefill" in programs else []
        return {name: programs[name] for name in (*sorted(wanted.programs), *pieces)}


@dataclass(eq=False)
class _Place:
    """Where a text stands that is being generated: what the session has of it, and what it has where others took its place."""

    positions: int
    decoder: Decoder | None = None
    kept: dict[str, np.ndarray] = field(default_factory=dict)  # its KV cache, while the session's holds something else
    ended: bool = False
    process: int = 0  # that has begun it


class _Stream(Iterator[str]):
    """The pieces of a text, for any number of threads: each holds the model's lock for one piece. They refer to no stream, so that
    one that is dropped is gone at once."""

    def __init__(self, model: Model, place: _Place, pieces: Generator[str, None, None]) -> None:
        self._model, self._place, self._pieces, self._failed = model, place, pieces, False

    def __next__(self) -> str:
        if self._place.process not in (0, os.getpid()):
            raise UserError("this stream was begun in another process, of which this one was forked: begin it again")
        return self._model._alone(self._next)

    def _next(self) -> str:
        self._model._check_open()
        if self._failed:
            raise UserError("this stream ended with an error or was interrupted: begin it again")
        try:
            return next(self._pieces)
        except BaseException as error:
            self._failed = not isinstance(error, StopIteration)
            raise

    def close(self) -> None:
        """End it here. A stream that is dropped needs no closing."""
        self._model._alone(self._pieces.close)


_models: weakref.WeakSet[Model] = weakref.WeakSet()


def _forked() -> None:
    for model in list(_models):
        model._forked()


os.register_at_fork(after_in_child=_forked)
