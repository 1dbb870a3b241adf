"""How array functions are called: what is compiled and kept, which arrays are taken, what is refused."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from barellm import kernels
from barellm.cpu import compilers
from barellm.kernels import arrays, compiled, executor, options
from barellm.program import layouts
from barellm.program.builder import Program, Store
from tests.cli.test_start import HEAVY, modules_after
from tests.kernels.cases import BFLOAT16, CASES, FLOAT32

EVERY = pytest.mark.parametrize("name", CASES)
ONE = np.ones((3, 5), np.float32)
IMAGE = np.ones((2, 2, 3, 3), np.float32)  # also a filter as large as the image
NEAR, AHEAD = (layouts.parse("all", length=3, block=16, heads=1, causal=causal) for causal in (True, False))


def test_the_names_are_imported_without_anything_heavy():
    assert not modules_after("from barellm import kernels; kernels.matmul, kernels.vjp") & HEAVY


def test_an_interrupted_call_ends_when_its_threads_have(monkeypatch):
    """Ctrl-C while they run: what they read and write must outlive them, so the exception waits for them."""
    a = np.ones((1500, 1500), np.float32)
    out = kernels.matmul(a, a)
    out[:] = 0
    pool, asked = executor.executor().pool, []
    run = pool.run

    def interrupted(table: int, entries: int) -> None:
        asked.append(entries)
        if len(asked) > 1:
            return run(table, entries)
        done = threading.Lock()
        done.acquire()
        pool._jobs.put((table, entries, 0, done))  # as Pool.run does, which waits for it
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.matmul(a, a, out=out)
    assert (out == 1500).all()
    assert asked[0] > 0 and asked[1:] == [0]


def test_a_second_call_compiles_nothing(monkeypatch):
    x = np.ones((3, 41), np.float32)
    kernels.rmsnorm(x)
    monkeypatch.setattr(compilers, "cached_objects", None)
    before = compiled.CACHE.misses
    kernels.rmsnorm(2 * x)
    kernels.rmsnorm(x, eps=1e-5)
    assert compiled.CACHE.misses == before
    with pytest.raises(TypeError):
        kernels.rmsnorm(x, eps=1e-6)  # another option is another program
    assert compiled.CACHE.misses == before + 1


def test_the_cache_forgets_what_was_used_longest_ago(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_CACHED", 2)
    cache = compiled.Cache()
    for key in ("a", "b", "a", "c"):
        cache.get(key, lambda key=key: key)  # pyright: ignore[reportArgumentType]
    assert list(cache.entries) == ["a", "c"]


@EVERY
@pytest.mark.extended
def test_bits_depend_on_no_number_of_threads(name, monkeypatch):
    case, found = CASES[name], []
    monkeypatch.setattr(executor, "INLINE_BYTES", 0)  # nothing is short enough for the calling thread
    for threads in (1, 2, 5):
        monkeypatch.setattr(executor, "thread_count", lambda threads=threads: threads)
        monkeypatch.setattr(executor, "_executor", None)
        monkeypatch.setattr(compiled, "CACHE", compiled.Cache())
        given = case.arguments(FLOAT32, len(case.shapes) - 1)
        y, vjp_fn = kernels.vjp(case.function, *given, **case.options)
        found.append([a.tobytes() for a in (y, *vjp_fn(y))])
        assert executor.executor().pool.threads == threads
        for pool in (executor.executor().pool, executor.executor().here):
            pool.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.extended
def test_calls_of_many_threads_at_once_do_not_meet():
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(n, 37)).astype(np.float32) for n in range(1, 60)]

    def both(x: np.ndarray) -> list[np.ndarray]:
        y, vjp_fn = kernels.vjp(kernels.layernorm, x, x[0], x[0])
        return [y, *vjp_fn(x), kernels.matmul(x, x.T)]

    wanted = [both(x) for x in given]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for found, exact in zip(pool.map(both, given), wanted, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(found, exact, strict=True))


@EVERY
@pytest.mark.parametrize("lies", ["reversed", "transposed", "unaligned", "read-only"])
@pytest.mark.extended
def test_arguments_may_lie_in_any_way(name, lies):
    case = CASES[name]
    given = case.arguments(FLOAT32)

    def laid(a: np.ndarray) -> np.ndarray:
        if lies == "reversed":
            return a[..., ::-1].copy()[..., ::-1]
        if lies == "transposed":
            return np.asfortranarray(a)
        if lies == "unaligned":
            return np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape)
        a.flags.writeable = False
        return a

    wanted, vjp_fn = kernels.vjp(case.function, *given, **case.options)
    others = [laid(a.copy()) for a in given]
    found, other = kernels.vjp(case.function, *others, **case.options)
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(other(laid(wanted.copy())), vjp_fn(wanted), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.extended
def test_no_byte_before_or_behind_an_argument_is_read(name, dtype):
    """Each lies between two pages that nobody may read."""
    case, page = CASES[name], mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    kept = []

    def fenced(a: np.ndarray, *, end: bool) -> np.ndarray:
        pages = -(-a.nbytes // page)
        room = mmap.mmap(-1, (pages + 2) * page)
        raw = np.frombuffer(room, np.uint8)
        start = page + (pages * page - a.nbytes if end else 0)
        held = raw[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        held[...] = a
        for at in (0, (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(arrays.address(raw) + at), ctypes.c_size_t(page), 0) == 0
        kept.append((room, raw, page, pages))
        return held

    for which in range(len(case.shapes)):
        for end in (False, True):
            given = [fenced(a, end=end) for a in case.arguments(dtype, which)]
            y, vjp_fn = kernels.vjp(case.function, *given, **case.options)
            vjp_fn(fenced(y, end=end))
    for _, raw, page, pages in kept:
        for at in (0, (pages + 1) * page):
            libc.mprotect(ctypes.c_void_p(arrays.address(raw) + at), ctypes.c_size_t(page), 3)


def test_an_address_is_where_numpy_says():
    x = np.ones((7, 5), BFLOAT16)
    for a in (x, x[2:, 1:], x.T, x[:0], np.array(1.0)):
        assert arrays.address(a) == a.ctypes.data


def test_results_are_aligned_and_go_into_out():
    x = np.arange(35, dtype=np.float32).reshape(5, 7)
    y = kernels.rmsnorm(x)
    assert y.ctypes.data % 64 == 0
    out = arrays.empty(x.shape, "fp32")
    assert kernels.rmsnorm(x, out=out) is out and np.array_equal(out, y)
    apart = np.zeros((5, 14), np.float32)[:, ::2]  # a copy goes there
    assert kernels.rmsnorm(x, out=apart) is apart and np.array_equal(apart, y)
    product = kernels.matmul(x, x.T)
    square = arrays.empty((5, 5), "fp32")
    square[...] = product
    assert np.allclose(kernels.matmul(square, square, out=square), product @ product, rtol=1e-5)  # out is read too


def test_a_large_result_is_written_past_the_caches_at_any_address():
    x = np.ones((3300, 2048), np.float32)
    out = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    assert (kernels.rmsnorm(x, out=out) == kernels.rmsnorm(x)).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_starts_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(executor, "INLINE_BYTES", 0)
    x = np.ones((3, 43), np.float32)
    wanted = kernels.rmsnorm(x)
    with compiled.CACHE._lock, executor._create_lock:  # by threads that the child does not have
        pid = os.fork()
        if pid == 0:
            os._exit(0 if np.array_equal(kernels.rmsnorm(x), wanted) else 1)
    assert os.waitpid(pid, 0)[1] == 0


REFUSED = [
    (lambda: kernels.matmul(ONE, ONE), "matmul expects b (K, N), K being 5 as in a (3, 5); it has shape (3, 5)"),
    (lambda: kernels.matmul(ONE, ONE[0]), "matmul expects b (K, N), it has shape (5,)"),
    (
        lambda: kernels.matmul(ONE, ONE.T.astype(np.float64)),
        "matmul expects b as float32 or bfloat16, it is float64: cast it with b.astype(np.float32)",
    ),
    (lambda: kernels.matmul(ONE, ONE.T.astype(BFLOAT16)), "matmul expects a and b of one dtype, a is fp32 and b is bf16"),
    (lambda: kernels.rmsnorm([1.0]), "rmsnorm expects NumPy arrays, x is of type list"),  # pyright: ignore
    (lambda: kernels.rmsnorm(ONE[:0]), "rmsnorm expects x with at least one element, it has shape (0, 5)"),
    (lambda: kernels.layernorm(ONE, ONE[0, 1:]), "layernorm expects weight (C,), C being 5 as in x (3, 5); it has shape (4,)"),
    (lambda: kernels.rmsnorm(ONE, out=ONE.T), "rmsnorm expects out (3, 5) float32, it is (5, 3) float32"),
    (lambda: kernels.top_k(ONE, 6), "top_k expects x (..., C) and 1 <= K <= C, K is 6: x (batch<=3, 5) fp32"),
    (lambda: kernels.attention(ONE, ONE, ONE), "attention expects q (B, T, H, D), it has shape (3, 5)"),
    (
        lambda: kernels.attention(ONE.reshape(1, 3, 1, 5), *[ONE.reshape(1, 5, 1, 3)] * 2, causal=False),
        "attention is given 3 queries and 5 keys, expected as many: it is of a sequence to itself",
    ),
    (
        lambda: kernels.attention(*[ONE.reshape(1, 1, 3, 5)] * 3, ONE.reshape(1, 3, 5)),
        "attention is given relative terms and no layout, expected a layout",
    ),
    (
        lambda: kernels.attention(*[ONE.reshape(1, 3, 1, 5)] * 3, ONE[:, None, :4], layout=NEAR),
        "attention expects relative (M, H, D), D being 5 as in q (1, 3, 1, 5); it has shape (3, 1, 4)",
    ),
    (
        lambda: kernels.attention(*[ONE.reshape(1, 3, 1, 5)] * 3, ONE.reshape(3, 1, 5)[:2], layout=AHEAD, causal=False),
        "block_sparse_attention expects relative (an odd number, 5) fp32: q (batch<=1, 3, 5) fp32, relative (2, 5) fp32",
    ),
    (lambda: kernels.vjp(kernels.rmsnorm, ONE)[1](ONE.T), "vjp_fn of rmsnorm expects dy (3, 5), it has shape (5, 3)"),
    (lambda: kernels.vjp(kernels.rmsnorm, ONE)[1](ONE, ONE), "vjp_fn of rmsnorm expects 1 gradients, it was given 2"),
    (
        lambda: kernels.vjp(np.sum, ONE),
        "vjp expects a function of barellm.kernels that has gradients; sum made 0 calls of such functions",
    ),
    (lambda: kernels.matmul(None, ONE), "matmul expects NumPy arrays, a is of type NoneType"),  # pyright: ignore
    (lambda: kernels.layernorm(ONE, None), "layernorm expects NumPy arrays, weight is of type NoneType"),  # pyright: ignore
    (lambda: kernels.layernorm(ONE, ONE[0], eps=-1e-5), "layernorm expects a finite eps of at least 0, it is -1e-05"),
    (lambda: kernels.rmsnorm(ONE, eps=np.nan), "rmsnorm expects a finite eps of at least 0, it is nan"),
    (lambda: kernels.rmsnorm(ONE, eps="1e-5"), "rmsnorm expects eps as a number, it is '1e-5'"),  # pyright: ignore
    (lambda: kernels.softmax(ONE, scale=ONE), "softmax expects scale as a number, it is of type ndarray"),  # pyright: ignore
    (lambda: kernels.softmax(ONE, scale=0), "softmax expects x (..., C) and a scale above 0, it is 0.0: x (batch<=3, 5) fp32"),
    (lambda: kernels.top_k(ONE, True), "top_k expects k as an integer, it is True"),
    (lambda: kernels.top_k(ONE, np.True_), "top_k expects k as an integer, it is np.True_"),  # pyright: ignore
    (
        lambda: kernels.top_k(ONE, np.ma.array(2)),
        "top_k expects k as an integer, it is masked_array(data=2, mask=False, fill_value=999999)",
    ),  # pyright: ignore
    (lambda: kernels.rmsnorm(ONE, eps=True), "rmsnorm expects eps as a number, it is True"),
    (lambda: kernels.softmax(ONE, scale=np.True_), "softmax expects scale as a number, it is np.True_"),  # pyright: ignore
    (lambda: kernels.conv2d(IMAGE, IMAGE, groups=True), "conv2d expects groups as an integer, it is True"),
    (lambda: kernels.conv2d(IMAGE, IMAGE, stride=True), "conv2d expects stride as an integer or two, it is True"),
    (lambda: kernels.conv2d(IMAGE, IMAGE, dilation=(1, True)), "conv2d expects dilation as an integer or two, it is (1, True)"),
    (lambda: kernels.conv2d(IMAGE, IMAGE, reflect="no"), "conv2d expects reflect as True or False, it is 'no'"),  # pyright: ignore
    (lambda: kernels.conv2d(IMAGE, IMAGE, flip_kernel=1), "conv2d expects flip_kernel as True or False, it is 1"),  # pyright: ignore
    (
        lambda: kernels.attention(*[ONE.reshape(1, 3, 1, 5)] * 3, causal=ONE[0] > 0),  # pyright: ignore
        "attention expects causal as True or False, it is array([ True, True, True, True, True])",
    ),
    (lambda: kernels.top_k(ONE, 2.5), "top_k expects k as an integer, it is 2.5"),  # pyright: ignore
    (
        lambda: kernels.attention(*[ONE.reshape(1, 3, 1, 5)] * 3, layout=np.eye(3)),  # pyright: ignore
        "attention expects a Layout, layout is of type ndarray",
    ),
    (
        lambda: kernels.conv2d(IMAGE, IMAGE, stride=(1, 1, 2)),  # pyright: ignore
        "conv2d expects stride as an integer or two, it is (1, 1, 2)",
    ),
    (
        lambda: kernels.conv2d(IMAGE, IMAGE, padding="same"),  # pyright: ignore
        "conv2d expects padding as an integer or two, it is 'same'",
    ),
    (lambda: kernels.conv2d(IMAGE, IMAGE, groups=1.5), "conv2d expects groups as an integer, it is 1.5"),  # pyright: ignore
    (lambda: kernels.quantize(ONE * np.inf), "row 0 of w has inf, expected finite numbers to quantize"),
    (
        lambda: kernels.quantize(ONE, None),  # pyright: ignore
        "quantize expects format as a text such as 'int4', it is of type NoneType",
    ),
]


def test_sizes_may_be_whatever_counts_as_integers():
    """Those of a list, and NumPy's own: the image is as wide as the filter, so its stride does not matter."""
    whole = kernels.conv2d(IMAGE, IMAGE)
    for stride in ([1, 2], (np.int64(1), 2), np.int64(1)):
        assert np.array_equal(kernels.conv2d(IMAGE, IMAGE, stride=stride), whole)  # pyright: ignore


@pytest.mark.parametrize("mistake, says", REFUSED, ids=[says for _, says in REFUSED])
def test_a_mistake_is_one_line(mistake, says):
    with pytest.raises(ValueError) as raised:  # of wrong types they are TypeErrors too
        mistake()
    assert str(raised.value) == says


def test_an_out_that_is_read_only_is_refused():
    out = np.empty_like(ONE)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="expects an out that can be written"):
        kernels.rmsnorm(ONE, out=out)


def test_options_are_taken_as_they_are_given():
    """The least number is allowed; of two integers the first is for rows."""
    assert options.number("layernorm", "eps", 0, least=0.0) == 0.0
    assert options.integer_or_pair("conv2d", "stride", [2, 3]) == (2, 3)
    assert options.integer_or_pair("conv2d", "stride", np.int64(2)) == 2


@pytest.mark.parametrize("what", [*CASES, "quantize", "dequantize", "vjp_fn", "out"])
def test_arrays_with_a_mask_are_refused(what):
    """Nothing would read the mask, and the numbers below it would count. Each argument of each function is looked at."""
    if what in ("vjp_fn", "out"):
        _, vjp_fn = kernels.vjp(kernels.rmsnorm, ONE)
        calls = [
            ("dy" if what == "vjp_fn" else "out", lambda a: vjp_fn(a) if what == "vjp_fn" else kernels.rmsnorm(ONE, out=a), ONE)
        ]
    elif what.endswith("quantize"):
        codes, scales = kernels.quantize(ONE)
        calls = [("w", kernels.quantize, ONE)]
        if what == "dequantize":
            calls = [
                ("codes", lambda a: kernels.dequantize(a, scales), codes),
                ("scales", lambda a: kernels.dequantize(codes, a), scales),
            ]
    else:
        case = CASES[what]
        given = case.arguments(FLOAT32)

        def at(i):
            return lambda a: case.function(*given[:i], a, *given[i + 1 :], **case.options)

        names = list(inspect.signature(case.function).parameters)
        calls = [(names[i], at(i), a) for i, a in enumerate(given)]
    for name, call, array in calls:
        with pytest.raises(ValueError, match=rf"expects arrays without a mask, {name} has one: fill it with {name}.filled"):
            call(np.ma.masked_array(array, np.zeros(array.shape, bool)))


def test_numbers_of_numpy_are_numbers():
    assert np.array_equal(kernels.top_k(ONE, np.uint8(2))[0], kernels.top_k(ONE, 2)[0])
    assert np.array_equal(kernels.softmax(ONE, scale=np.float16(0.5)), kernels.softmax(ONE, scale=0.5))
    q = ONE.reshape(1, 3, 1, 5)
    assert np.array_equal(kernels.attention(q, q, q, causal=np.False_), kernels.attention(q, q, q, causal=False))


def test_conv2d_takes_its_old_names():
    """`reflect` and `mirrored` were the names of padding_mode and flip_kernel."""
    x, w = np.random.default_rng(1).normal(size=(2, 1, 1, 5, 5)).astype(np.float32)[..., :5, :5]
    new = kernels.conv2d(x, w[..., :3, :3], padding=1, padding_mode="reflect", flip_kernel=True)
    assert np.array_equal(new, kernels.conv2d(x, w[..., :3, :3], padding=1, reflect=True, mirrored=True))
    assert not np.array_equal(new, kernels.conv2d(x, w[..., :3, :3], padding=1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reflected'"):
        kernels.conv2d(x, w, reflected=True)
    with pytest.raises(ValueError, match='padding_mode "zeros" or "reflect": \'wrap\''):
        kernels.conv2d(x, w, padding_mode="wrap")
    p = Program(Store())
    given = p.parameter("x", x.shape), p.parameter("w", (1, 1, 3, 3))
    for how in ({"padding_mode": "reflect", "flip_kernel": True}, {"reflect": True, "mirrored": True}):
        p.conv2d(*given, padding=1, **how)
    assert p.ops[0].attrs == p.ops[1].attrs and p.ops[0].attrs["flip_kernel"]
