"""bench attention: what is counted, how turns are compared, and runs of the real sides."""

import importlib
import json
import sys

import pytest

from barellm.cli import main
from barellm.cpu.backend import Bench
from barellm.tools.bench import attentions, interleaved
from benchmarks import baseline_process, baselines

FAKE = """
import json, sys
assert [c["seq"] for c in json.loads(sys.argv[1])] == [24, 24] and sys.argv[2] == "cpu"
print(json.dumps({"version": "0", "threads": 2}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["case"] in (0, 1) and asked["what"] in ("forward", "both")
    print(json.dumps({"s": [1.0 + i for i in range(asked["calls"])]}), flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(Bench, "peak", lambda self, dtype: {"fp32": 2e11, "bf16": 4e11}[dtype])
    monkeypatch.setattr(attentions, "PAUSE", 0.0)
    monkeypatch.setattr(attentions, "TOKENS", {"cpu": 48})
    monkeypatch.setattr(attentions, "WIDTH", 128)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(baselines, "baseline_script", lambda name: script)


def test_cases_hold_as_many_tokens_as_they_can():
    assert attentions.cases("bf16", (16, 48, 96)) == [
        {"batch": batch, "seq": seq, "heads": 128 // D, "D": D, "dtype": "bf16"}
        for D in (64, 128)
        for batch, seq in ((3, 16), (1, 48), (1, 96))
    ]


@pytest.mark.extended
def test_heads_that_share_keys(monkeypatch):
    """Half as many heads of keys are measured, said and written down; operations are those of the heads of queries."""
    monkeypatch.setattr(attentions, "WIDTH", 256)
    lines = []
    r = attentions.measure("fp32", torch=False, rounds=1, report=lines.append, lengths=(24,))
    shared = attentions.measure("fp32", torch=False, rounds=1, report=lines.append, lengths=(24,), share=2)
    assert not any("kv_heads" in case for case in r["cases"])
    assert [(c["heads"], c["kv_heads"]) for c in shared["cases"]] == [(4, 2), (4, 2), (2, 1), (2, 1)]
    assert lines[0] == lines[5] == attentions.HEAD  # a line for each pass of the two head sizes below it
    assert lines[6].split()[3:5] == ["4/2", "64"] and lines[9].split()[3:5] == ["2/1", "128"]
    assert [c["flops"] for c in shared["cases"]] == [c["flops"] for c in r["cases"]]


def test_a_row_is_of_medians_by_turn():
    case = {"batch": 2, "seq": 99, "heads": 3, "D": 64, "dtype": "bf16"}
    work = 2 * 2 * 64 * 6 * (99 * 100 // 2)
    assert attentions.flops(case, "forward") == work and attentions.flops(case, "both") == 3.5 * work
    turns = {"ours": [[1.0, 9.0, 2.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0]], "peer": [[6.0], [8.0], [10.0]]}  # medians 2, 4, 3
    r = attentions.row(case, "forward", turns, work / 2)
    assert (r["ours_s"], r["peer_s"], r["ratio"]) == (3, 8, 3)  # ratios of turns: 3, 2, 10 / 3
    assert r["percent_of_peak"] == pytest.approx(100 * 2 / 3)
    assert r["of_square"] == pytest.approx(3 / 2 * 100 / 198)


def test_of_several_backends_each_has_a_ratio_and_the_fastest_is_the_peer():
    case = {"batch": 2, "seq": 99, "heads": 3, "D": 64, "dtype": "bf16"}
    turns = {"ours": [[2.0], [4.0]], "flash": [[4.0], [4.0]], "cudnn": [[3.0], [4.0]], "efficient": [[8.0], [8.0]]}
    r = attentions.row(case, "both", turns, 1.0)
    assert r["ratios"] == {"flash": 1.5, "cudnn": 1.25, "efficient": 3.0}
    assert (r["backend"], r["peer_s"], r["ratio"]) == ("cudnn", 3.5, 1.25)
    assert attentions.line(r).endswith(" 1.25x cudnn")
    alone = attentions.row(case, "both", {"ours": [[2.0]], "peer": [[3.0]]}, 1.0)
    assert "ratios" not in alone and attentions.line(alone).endswith(" 1.50x")


class FakePeer:
    """Its calls take as many seconds as their names are long; "cudnn" has none of them."""

    def __init__(self):
        self.asked = []

    def run(self, case, what, *, calls, warm_up):
        if what.endswith("cudnn"):
            raise interleaved.BaselineError("PyTorch's side could not do it")
        self.asked.append((case, what, calls, warm_up))
        return [float(len(what))] * calls


def test_backends_take_turns_but_for_those_that_a_card_lacks():
    baseline, ours = FakePeer(), lambda what, calls: [2.0] * calls
    options = {"what": "both", "rounds": 3, "turn_s": 42.0, "long_s": 9.0, "pause": lambda: None}
    found = interleaved.samples(ours, baseline, 4, **options, backends=("flash", "cudnn", "efficient"))
    assert found == {"ours": [[2.0] * 3] * 3, "flash": [[10.0] * 3] * 3, "efficient": [[14.0] * 3] * 3}
    turns = baseline.asked[4:]  # two calls of each before, to learn how long they take
    assert [what for _, what, *_ in turns] == ["both efficient", "both flash"] + ["both flash", "both efficient"] * 1 + [
        "both efficient", "both flash"
    ]  # fmt: skip
    assert {(case, calls, warm_up) for case, _, calls, warm_up in turns} == {(4, 3, 0)}
    alone = interleaved.samples(ours, None, 4, **options, backends=("flash",))
    assert set(alone) == {"ours"}
    baseline.run = FakePeer.run.__get__(baseline)
    with pytest.raises(interleaved.BaselineError):
        interleaved.samples(ours, baseline, 4, **options | {"what": "cudnn"})


def test_a_call_that_fails_does_not_end_the_peer(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import json, sys\nprint(json.dumps({}), flush=True)\nfor line in sys.stdin:\n    what = json.loads(line)['what']\n"
        "    print(json.dumps({'error': 'no kernel'} if what == 'bad' else {'s': [1.0]}), flush=True)\n"
    )
    with baseline_process.opened(script, [], device="cuda", environment={}) as baseline:
        assert baseline.run(0, "good", calls=1, warm_up=1) == [1.0]
        with pytest.raises(interleaved.BaselineError, match="could not do 'bad': no kernel"):
            baseline.run(0, "bad", calls=1, warm_up=1)
        assert baseline.run(0, "good", calls=1, warm_up=0) == [1.0]


@pytest.mark.oracle
def test_pytorch_itself_by_backends(monkeypatch):
    """On a CPU it has flash attention and none of cuDNN's; what it takes by itself is told by the step's twin."""
    torch = pytest.importorskip("torch")
    monkeypatch.undo()  # the real script
    case = {"batch": 1, "seq": 16, "heads": 2, "D": 16, "dtype": "bf16"}
    script = baselines.baseline_script("torch_attention.py")
    with baseline_process.opened(script, [case], device="cpu", environment={}) as baseline:
        for what in ("both flash", "forward flash", "both", "forward"):
            assert baseline.run(0, what, calls=1, warm_up=0)[0] > 0
        with pytest.raises(interleaved.BaselineError, match="both cudnn"):
            baseline.run(0, "both cudnn", calls=1, warm_up=0)
        assert baseline.run(0, "both", calls=1, warm_up=0)[0] > 0
    monkeypatch.syspath_prepend(script.parent)
    step = importlib.import_module("torch_step")
    q = torch.randn(1, 2, 16, 16, requires_grad=True)

    def attend(**options):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, **options).sum().backward()

    assert step.attention_of(attend, "cpu") == {"ops": ["flash"], "kernels": []}
    assert step.attention_of(lambda: attend(dropout_p=0.5), "cpu")["ops"] == ["math"]
    assert step.attention_of(lambda: q + q, "cpu") == {"ops": [], "kernels": []}
    names = ["void pytorch_flash::flash_fwd_kernel<>", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(P)",
             "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"]  # fmt: skip
    assert all(step.KERNELS.search(name) for name in names)
    assert not any(step.KERNELS.search(n) for n in ("aten::_flash_attention_forward", "triton_poi_fused_add_0", "sm90_gemm"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_ours_alone(dtype, capsys):
    lines = []
    r = attentions.measure(dtype, torch=False, rounds=2, report=lines.append, lengths=(16, 33))
    assert [(c["batch"], c["seq"], c["D"], c["what"]) for c in r["cases"]] == [
        (batch, seq, D, what) for D in (64, 128) for batch, seq in ((3, 16), (1, 33)) for what in ("forward", "both")
    ]
    assert len(lines) == 9 and max(map(len, lines)) <= 80 and "torch" not in "".join(lines) and "peer" not in r
    assert all(0 < c["percent_of_peak"] < 100 and len(c["turns_s"]["ours"]) == 2 for c in r["cases"])


def test_turns_with_a_peer_and_the_line_of_the_table(table):
    r = attentions.measure("bf16", torch=True, rounds=3, report=lambda line: None, lengths=(24,))
    assert (r["peer"], r["peer_threads"]) == ("PyTorch 0", 2) and "{cpus}" in json.dumps(r["environment"])
    for case in r["cases"]:
        assert case["turns_s"]["peer"] == [[1.0]] * 3  # calls of a second and more: one a turn, none to warm up
        assert case["ratio"] == pytest.approx(1 / case["ours_s"], rel=0.9)
    (text,) = table.facts({"file.json": r})
    assert "causal attention bf16, T 24 to 24, heads of 64 and 128" in text and "PyTorch 0" in text


def test_a_peer_that_ends_is_told(monkeypatch, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(baselines, "baseline_script", lambda name: script)
    with pytest.raises(RuntimeError, match="status 3"):
        attentions.measure("bf16", torch=True, rounds=1, report=lambda line: None, lengths=(24,))


@pytest.mark.parametrize("argv, words", [
    (["--interleave", "0"], ["--interleave is 0"]),
    (["--baselines", f"llmc={sys.executable}"], ["bench attention", "--baselines torch"]),
    (["--share", "2"], ["--share is 2", "2 and 1 heads"]),
    (["--share", "0"], ["--share is 0", "2 and 1 heads"]),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, capsys):
    assert main.main(["bench", "attention", *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words)
