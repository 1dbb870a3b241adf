"""`barellm.load`: every kind of model that the command line opens, and what it computes."""

from __future__ import annotations

import gc
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import barellm
from barellm import models
from barellm.cli.main import main, parsed
from barellm.config import TrainConfig
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.interop import imported
from barellm.models import gpt2, llama3, sparse
from tests.interop.models import checkpoint_of, hugging_face, random_arrays, their_tensors, weights_of
from tests.models.test_speedrun import SMALL as SPEEDRUN

MODEL = gpt2.Config(layers=1, heads=2, d_model=24, vocab_size=256, max_seq=13)
TOKENS = np.random.default_rng(1).integers(0, 256, (3, 7))
TARGETS = np.where(TOKENS % 5 == 0, -1, (TOKENS * 7 + 1) % 256)


def mean_nats(logits: np.ndarray, targets: np.ndarray) -> float:
    """The loss by its formula, in float64."""
    z = logits.astype(np.float64)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return float(-chosen[targets >= 0].mean())


def checkpoint(folder, model=MODEL):
    return checkpoint_of(folder, model, random_arrays(model), Bytes())


@pytest.fixture
def model(tmp_path, own_cache):
    with barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device="reference") as opened:
        yield opened


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_logits_loss_and_what_decoding_draws_from_are_one_model(tmp_path, own_cache, device):
    model = barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device=device)
    logits = model.logits(TOKENS)
    assert (logits.shape, logits.dtype) == ((3, 7, 256), np.float32)
    assert model.loss(TOKENS, TARGETS) == pytest.approx(mean_nats(logits, TARGETS), rel=1e-6)
    ids = model.tokenizer.prompt("squared")
    greedy = model.tokenizer.decode([int(model.logits([ids])[0, -1].argmax())])
    assert model.generate("squared", max_new_tokens=1, temperature=0) == greedy


SMALL = {
    "llama-15m": llama3.Config(layers=1, heads=4, kv_heads=2, d_model=24, d_ff=40, vocab_size=61, max_seq=13),
    "sparse-char": sparse.Config(layers=1, heads=2, d_model=24, vocab_size=61, max_seq=16, block=16, layout="local:8"),
    "shakespeare-unit": gpt2.Config(layers=1, heads=2, d_model=24, vocab_size=61, max_seq=16, unit_scaling=True, bias=False),
}


@pytest.mark.parametrize("preset", [*SMALL, "speedrun-small"])
def test_the_loss_is_that_of_the_logits_for_every_architecture(tmp_path, own_cache, preset):
    """Also where logits are capped, and where the step says how far attention looks. The speedrun's loss counts padded ids too, so
    here it has none."""
    model = SMALL.get(preset) or replace(SPEEDRUN, vocab_size=64)
    config = replace(models.preset(preset), model=model, train=TrainConfig(micro_batch_size=1, seq=40, steps=9, dtype="fp32"))
    imported.save(weights_of(model, random_arrays(model)), tmp_path / "run", config=config, step=7, total=9)
    with barellm.load(tmp_path / "run", device="reference") as opened:
        tokens, targets = TOKENS[:1] % 61, np.minimum(TARGETS[:1], 60)
        assert opened.loss(tokens, targets) == pytest.approx(mean_nats(opened.logits(tokens), targets), rel=1e-5)
        assert opened.logits(tokens).std() > 1e-3  # the gains of unit scaling are constants, which no file has


def test_a_saved_model_has_the_same_bits_and_configuration(model, tmp_path, capsys):
    saved = model.save(tmp_path / "saved")
    with barellm.load(tmp_path / "saved", device="reference") as again:
        assert again.config == model.config
        assert (again.logits(TOKENS) == model.logits(TOKENS)).all()
    assert (saved / "weights.safetensors").read_bytes() == (next((tmp_path / "run").rglob("weights.safetensors")).read_bytes())
    capsys.readouterr()
    sample = ["sample", str(tmp_path / "saved"), "--prompt", "a", "--max-new-tokens", "9", "--seed", "5"]
    assert main([*sample, "--device", "reference"]) == 0
    assert capsys.readouterr().out == "a" + model.generate("a", max_new_tokens=9, seed=5) + "\n"
    with pytest.raises(UserError, match="is not empty"):
        model.save(tmp_path / "saved")


def test_a_folder_of_hugging_face_is_the_same_model(model, tmp_path):
    arrays = {name: model.weight(name) for name in random_arrays(MODEL)}
    folder = hugging_face(tmp_path / "hf", MODEL, their_tensors(arrays))
    with barellm.load(folder, dtype="fp32", device="reference") as other:  # without a tokenizer there are ids alone
        assert (other.logits(TOKENS) == model.logits(TOKENS)).all()
        for prompt in ("a", [1, 2]):
            with pytest.raises(
                UserError, match=r"no tokenizer, so there is no text: name one by --tokenizer when it is imported, or tokenizer="
            ):
                other.generate(prompt)
    with barellm.load(folder, tokenizer="bytes", dtype="fp32", device="reference") as other:
        assert (other.logits(TOKENS) == model.logits(TOKENS)).all()
        assert other.parameters == model.parameters


def test_more_sequences_than_before_do_not_change_the_first(model):
    first = model.logits(TOKENS[:1, :5])
    assert (model.logits(TOKENS)[:1, :5] == model.logits(TOKENS[:, :5])[:1]).all()
    assert np.abs(model.logits(TOKENS)[:1, :5] - first).max() < 1e-5
    said = "the prompt has 20 tokens: the model has 13 positions and sees the last 6"
    with pytest.warns(UserWarning, match=said) as warned:
        assert model.generate("x" * 20, max_new_tokens=1, seed=2) == model.generate("x" * 6, max_new_tokens=1, seed=2)
    assert [w.filename for w in warned] == [__file__]  # of the line that asked


def test_what_is_not_said_is_what_the_command_takes():
    usual = vars(parsed(["sample", "run"]))
    for function in (barellm.Model.generate, barellm.Model.stream):
        given = {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default != p.empty}
        assert given.pop("prompt") == "" and list(given.pop("stop")) == usual["stop"]
        assert given == {name: usual[name] for name in given} and len(given) == 7


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m.logits([1, 2]), r"tokens is int64 \(2,\), expected integers \(B, T\)"),
        (lambda m: m.logits([[0.5]]), r"tokens is float64 \(1, 1\), expected integers"),
        (lambda m: m.logits([[3, 256]]), r"tokens\[0, 1\] is 256, expected an id from 0 to 255"),
        (lambda m: m.logits([[1 << 32]]), r"tokens\[0, 0\] is 4294967296"),
        (lambda m: m.logits([[-1]]), r"tokens\[0, 0\] is -1, expected an id from 0"),
        (lambda m: m.logits([[0] * 14]), r"tokens is \(1, 14\), the model has 13 positions"),
        (lambda m: m.loss([[1, 2]], [[1]]), r"targets is \(1, 1\), expected the shape of tokens, \(1, 2\)"),
        (lambda m: m.loss([[1]], [[-1]]), "all targets are -1"),
        (lambda m: m.loss([[1]], [[-2]]), r"targets\[0, 0\] is -2, expected an id from -1"),
        (lambda m: m.generate(max_new_tokens=0), "max_new_tokens is 0, expected at least 1"),
        (lambda m: m.generate(top_p=0), "top_p is 0.0, expected 0 < top_p <= 1"),
        (lambda m: m.stream(min_p=np.nan), "min_p is nan, expected a number"),
        (lambda m: m.logits(np.ma.array([[1]])), r"tokens has a mask, expected integers \(B, T\) without one"),
        (lambda m: m.loss([[1]], np.ma.array([[1]])), "targets has a mask"),
        (lambda m: m.logits([[1], [1, 2]]), r"tokens is \[\[1\], \[1, 2\]\], expected integers \(B, T\)"),
        (lambda m: m.logits([[True]]), r"tokens is bool \(1, 1\), expected integers"),
        (lambda m: m.generate([]), r"prompt is float64 \(0,\), expected a text or integers \(T,\)"),
        (lambda m: m.generate([[1]]), r"prompt is int64 \(1, 1\), expected a text or integers"),
        (lambda m: m.generate([1, 256]), r"prompt\[1\] is 256, expected an id from 0 to 255"),
        (lambda m: m.stream(b"ab"), r"prompt is \|S2 \(\), expected a text or integers"),
        (lambda m: m.stream(max_new_tokens=2.5), "max_new_tokens is 2.5, expected an integer"),
        (lambda m: m.stream(tokens=True), "max_new_tokens is True, expected an integer"),
        (lambda m: m.stream(temperature="hot"), "temperature is 'hot', expected a number"),
        (lambda m: m.stream(top_k=1.5), "top_k is 1.5, expected an integer"),
        (lambda m: m.stream(seed=None), "seed is None, expected an integer"),
        (lambda m: m.stream(top_p=np.ones(2)), r"top_p is array\(\[1., 1.\]\), expected a number"),
        (lambda m: m.stream(stop=3), "stop is 3, expected a text or a list of texts"),
        (lambda m: m.stream(stop=["a", 3]), r"stop is \['a', 3\], expected a text"),
        (lambda m: m.weight(["wte"]), r"has no parameter \['wte'\]"),
        (lambda m: m.save(3), "path is 3, expected a path"),
        (lambda m: barellm.load(3), "path is 3, expected a path"),
        (lambda m: barellm.load("x", tokenizer=3), "tokenizer is 3, expected a path"),
        (lambda m: barellm.load("x", device=3), "device is 3, expected auto, cpu, cuda, reference"),
        (lambda m: barellm.load(m.path, dtype=16), "train.dtype is 16, expected a text"),
        (lambda m: m.weight("wtf"), r"has no parameter 'wtf' \(known: wte, wpe, "),
    ],
)
def test_mistakes_are_named(model, call, message):
    model.path = model._weights.path
    with pytest.raises(UserError, match=message) as raised:
        call(model)
    assert "\n" not in str(raised.value)


def test_token_ids_are_a_prompt_and_numbers_of_numpy_are_numbers(model):
    """Ids are taken as they are: nothing is put before them."""
    whole = model.generate("squared", max_new_tokens=6, temperature=0.5, top_k=3, seed=4)
    ids = model.tokenizer.prompt("squared")
    how = {"tokens": np.int64(6), "temperature": np.float32(0.5), "top_k": np.uint8(3), "seed": np.int32(4)}
    for prompt in ("squared", ids, tuple(ids), np.array(ids, np.uint16)):
        assert model.generate(prompt, **how) == "".join(model.stream(prompt, **how)) == whole


@pytest.fixture
def on_cpu(tmp_path, own_cache):
    """The same with sessions that are planned and closed."""
    with barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device="cpu") as opened:
        yield opened


@pytest.fixture(params=["reference", "cpu"])
def on_both(tmp_path, own_cache, request):
    with barellm.load(checkpoint(tmp_path / "run"), dtype="fp32", device=request.param) as opened:
        yield opened


def test_a_stream_goes_on_whatever_the_model_computes_between_its_pieces(on_both):
    """Whether that opens the session again, for more positions too, or takes the KV cache."""
    model = on_both
    whole, other = model.generate("ab", max_new_tokens=9, seed=3), model.generate("xyz", max_new_tokens=9, seed=4)
    others = [
        lambda: model.logits(TOKENS),
        lambda: model.loss(TOKENS, TARGETS),
        lambda: next(model.stream("xyz", max_new_tokens=9)),
        lambda: model.generate("x" * 8, max_new_tokens=40),
    ]
    for more in others:
        stream, waiting = (model.stream("ab", max_new_tokens=9, seed=3) for _ in range(2))
        pieces = []
        for piece in stream:
            pieces.append(piece)
            more()
        assert "".join(pieces) == "".join(waiting) == whole
    pairs = list(zip(model.stream("ab", max_new_tokens=9, seed=3), model.stream("xyz", max_new_tokens=9, seed=4), strict=False))
    assert whole.startswith("".join(a for a, _ in pairs)) and other.startswith("".join(b for _, b in pairs))
    assert len(pairs) > 4


def test_a_stream_has_its_own_text_where_the_cache_is_larger_than_its_own(tmp_path, own_cache):
    """The session is opened again with more positions in the middle of it."""
    long = replace(MODEL, max_seq=1100)
    with barellm.load(checkpoint(tmp_path / "long", long), dtype="fp32") as model:
        whole = model.generate("ab", max_new_tokens=30, seed=3)
        stream = model.stream("ab", max_new_tokens=30, seed=3)
        pieces = [next(stream) for _ in range(9)]
        positions = model._wanted.positions
        model.generate("x" * 600, max_new_tokens=1)
        assert model._wanted.positions > positions
        assert "".join([*pieces, *stream]) == whole


def test_many_threads_get_what_each_would_get_alone(on_both):
    """logits, loss, generate, streams of their own, and one stream that all take pieces from."""
    model = on_both
    requested: list[Callable[[], object]] = []
    for i in range(4):
        tokens = (TOKENS[: i % 3 + 1, : 3 + i] + i) % 256
        requested += [
            lambda tokens=tokens: model.logits(tokens).tobytes(),
            lambda tokens=tokens: model.loss(tokens, (tokens + 1) % 256),
            lambda i=i: model.generate("x" * i, max_new_tokens=5 + i, seed=i),
            lambda i=i: "".join(model.stream("ab" * i, max_new_tokens=6, seed=i)),
        ]
    wanted = [ask() for ask in requested]
    whole, shared = model.generate("q", max_new_tokens=40, seed=9), model.stream("q", max_new_tokens=40, seed=9)
    pieces: list[str] = []
    wrong: list[object] = []
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        order = random.Random(number).sample(range(len(requested)), len(requested))
        begin.wait()
        for at in order * 2:
            with taking:
                pieces.append(next(shared, ""))
            try:
                if (found := requested[at]()) != wanted[at]:
                    wrong.append((at, found))
            except BaseException as error:
                wrong.append((at, error))

    taking = threading.Lock()  # what a piece is, and its place among the others, belong together
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "".join(pieces) + "".join(shared) == whole


def test_two_threads_may_take_pieces_of_one_stream(on_cpu):
    """Each gets some, and none is lost or twice."""
    whole = sorted(on_cpu.stream("q", max_new_tokens=60, seed=9))
    stream = on_cpu.stream("q", max_new_tokens=60, seed=9)
    with ThreadPoolExecutor(3) as pool:
        found = [piece for part in pool.map(lambda _: list(stream), range(3)) for piece in part]
    assert sorted(found) == whole


def test_a_stream_that_is_left_half_way_holds_nothing(on_cpu):
    """Neither the lock nor memory, whether it is dropped, closed, or ends with an error of whoever reads it."""
    wanted = on_cpu.logits(TOKENS)
    stream = on_cpu.stream("ab", max_new_tokens=9)
    next(stream)
    place = weakref.ref(stream._place)  # pyright: ignore[reportAttributeAccessIssue]
    other = on_cpu.stream("cd", max_new_tokens=9)
    next(other)
    assert place().kept  # pyright: ignore[reportOptionalMemberAccess]
    gc.disable()
    try:
        del stream
        assert place() is None
    finally:
        gc.enable()
    other.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert list(other) == [] and not other._place.kept  # pyright: ignore[reportAttributeAccessIssue]
    left = on_cpu.stream("ef", max_new_tokens=9)
    next(left)
    with ThreadPoolExecutor(1) as pool:
        assert (pool.submit(on_cpu.logits, TOKENS).result(timeout=60) == wanted).all()


def test_a_closed_model_ends_its_streams(on_cpu):
    stream = on_cpu.stream("ab", max_new_tokens=9)
    next(stream)
    on_cpu.close()
    for _ in range(2):
        with pytest.raises(UserError, match="is closed: load it again"):
            next(stream)


def test_an_interrupted_computation_reaches_into_no_other(on_cpu, monkeypatch):
    """After Ctrl-C the threads may still run what was begun: the next call opens the session again. The stream that it hit says
    so, others go on."""
    whole, wanted = on_cpu.generate("ab", max_new_tokens=9, seed=3), on_cpu.logits(TOKENS)
    hit, other = (on_cpu.stream("ab", max_new_tokens=9, seed=3) for _ in range(2))
    begun = [next(hit), next(other)]
    session = on_cpu._session
    next(hit)
    with monkeypatch.context() as patch:
        patch.setitem(session._starts, "decode", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            next(hit)
    with pytest.raises(UserError, match="this stream ended with an error or was interrupted"):
        next(hit)
    assert begun[1] + "".join(other) == whole and (on_cpu.logits(TOKENS) == wanted).all()
    assert on_cpu._session is not session


def test_a_handler_in_the_middle_of_a_computation_is_refused(on_cpu, monkeypatch):
    """It would wait for its own thread for ever, or change what that computes."""
    wanted, answers = on_cpu.logits(TOKENS), []
    run = on_cpu._session.pool.run

    def interrupted(*table):
        for ask in (lambda: on_cpu.loss(TOKENS, TARGETS), lambda: next(on_cpu.stream("a")), on_cpu.close):
            with pytest.raises(UserError, match="in the middle of its own computation"):
                ask()
            answers.append(ask)
        run(*table)

    on_cpu._session._starts["logits"] = lambda: interrupted(*on_cpu._session._tables["logits"])
    assert (on_cpu.logits(TOKENS) == wanted).all() and len(answers) == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_computes_with_a_session_of_its_own(on_cpu):
    """Also where a thread of the parent holds the lock. A stream that was begun in the parent says so."""
    wanted, text = on_cpu.logits(TOKENS), on_cpu.generate("ab", max_new_tokens=9, seed=3)
    begun, waiting = (on_cpu.stream("ab", max_new_tokens=9, seed=3) for _ in range(2))
    first = next(begun)
    held, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=lambda: on_cpu._alone(lambda: (held.set(), done.wait(60))))
    holder.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert (on_cpu.logits(TOKENS) == wanted).all() and "".join(waiting) == text
            with pytest.raises(UserError, match="was begun in another process"):
                next(begun)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    done.set()
    holder.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert first + "".join(begun) == text, "the parent goes on"


def test_a_refused_opening_leaves_the_model_alive(on_cpu, monkeypatch):
    logits = on_cpu.logits(TOKENS)
    session = on_cpu._session
    many = np.broadcast_to(np.int8(0), (1 << 21, 9))
    with pytest.raises(UserError, match="expected at most 16777216"):
        on_cpu.loss(many, many)
    assert (on_cpu.logits(TOKENS) == logits).all() and on_cpu._session is session
    with monkeypatch.context() as patch:
        patch.setattr("barellm.api.on_step", lambda *words: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            on_cpu.loss(TOKENS, TARGETS)
    assert (on_cpu.logits(TOKENS) == logits).all()


def test_a_growing_text_opens_no_session_for_each_token(model):
    sessions = set()
    for tokens in range(5, 9):
        model.logits(TOKENS[:, :tokens])
        sessions.add(model._session)
    assert len(sessions) == 1


def test_options_reach_the_sampler(model):
    greedy = model.generate("1", max_new_tokens=9, temperature=0)
    assert model.generate("1", max_new_tokens=9, min_p=1) == greedy
    assert model.generate("1", max_new_tokens=9, temperature=0, repetition_penalty=50) != greedy
    for stop in (greedy[4:6], ["never", greedy[4:6]]):
        assert model.generate("1", max_new_tokens=9, temperature=0, stop=stop) == greedy[: greedy.index(greedy[4:6])]
    with pytest.raises(UserError, match="min_p is 2"):
        model.stream(min_p=2)


def test_a_closed_model_says_so(model):
    model.logits(TOKENS)
    model.close()
    with pytest.raises(UserError, match="is closed: load it again"):
        model.logits(TOKENS)


def test_importing_barellm_is_light_and_unknown_names_are_errors():
    script = (
        "import barellm, sys; assert not {'numpy', 'barellm.api', 'barellm.kernels'} & set(sys.modules)\n"
        "barellm.kernels.matmul; assert 'numpy' not in sys.modules; print(dir(barellm)); barellm.lode"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "module 'barellm' has no attribute 'lode'" in done.stderr and "'kernels'" in done.stdout and "'train'" in done.stdout
