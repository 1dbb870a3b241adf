"""llm.c's whole checkpoints, beside a loader, a generator and a writer that follow its C and know nothing of barellm's."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from barellm.cli.main import main
from barellm.data.shards import write_shard
from barellm.interop import llmc_state
from barellm.training import metrics
from tests.interop.models import TINY, checkpoint_of, llmc_file, random_arrays

B, T, ACCUMULATE = 2, 8, 3
LENGTHS = (90, 141)  # tokens of the training shards: 5 and 8 micro-batches
SIZES = ("--model.layers", 2, "--model.heads", 2, "--model.d_model", 12, "--model.max_seq", 20, "--model.bias", "true")
KEYS = (
    "--data.tokenizer",
    "bytes",
    "--data.order",
    "llmc",
    "--batch",
    B,
    "--seq",
    T,
    "--train.gradient_accumulation_steps",
    ACCUMULATE,
)
HOW = ("--optim.name", "adamw", "--optim.warmup", 2, "--train.eval_tokens", 64, "--train.eval_every", 0, "--dtype", "fp32")
SEVEN = ("--steps", 7, "--device", "reference")


class Twister:
    """MT19937 (Matsumoto and Nishimura 1998), with the fields that llm.c's rand.h keeps."""

    def __init__(self, seed: int) -> None:
        self.key = [seed]
        for i in range(1, 624):
            self.key.append((1812433253 * (self.key[-1] ^ (self.key[-1] >> 30)) + i) & 0xFFFFFFFF)
        self.left, self.next = 1, 0

    def draw(self) -> int:
        self.left -= 1
        if self.left <= 0:
            key = self.key
            for i in range(624):
                y = (key[i] & 0x80000000) | (key[(i + 1) % 624] & 0x7FFFFFFF)
                key[i] = key[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
            self.left, self.next = 624, 0
        y = self.key[self.next]
        self.next += 1
        y ^= y >> 11
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        return y ^ (y >> 18)

    def shuffle(self, items: list[int]) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.draw() % (i + 1)
            items[i], items[j] = items[j], items[i]


class Loader:
    """llmc/dataloader.h for one process, shuffled."""

    def __init__(self) -> None:
        self.twister, self.shards = Twister(42), list(range(len(LENGTHS)))
        self.reset()

    def reset(self) -> None:
        self.shard = 0
        self.twister.shuffle(self.shards)
        self.open()

    def open(self) -> None:
        self.sample, self.samples = 0, list(range((LENGTHS[self.shards[self.shard]] - 1) // (B * T)))
        self.twister.shuffle(self.samples)

    def next_batch(self) -> None:
        if self.sample >= len(self.samples):
            if self.shard == len(self.shards) - 1:
                self.reset()
            else:
                self.shard += 1
                self.open()
        self.sample += 1

    def tail(self) -> bytes:
        found = struct.pack(f"<Q{len(self.shards)}i", len(self.shards), *self.shards)
        found += struct.pack(f"<Q{len(self.samples)}i", len(self.samples), *self.samples)
        t = self.twister
        return found + struct.pack("<QiI624I2I", 0, t.left, t.next, *t.key, 0, 0x9908B0DF)


def loader(micro_batches: int) -> Loader:
    made = Loader()
    for _ in range(micro_batches):
        made.next_batch()
    return made


def flat(arrays, padded: int = 256) -> list[np.ndarray]:
    """The tensors of a file in llm.c's order, each layer's by itself."""
    blocks = ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
              "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")  # fmt: skip
    pad = np.zeros((padded - len(arrays["wte"]), arrays["wte"].shape[1]), np.float32)
    found = [np.concatenate([arrays["wte"], pad]), arrays["wpe"]]
    found += [arrays[f"h.{layer}.{name}"] for name in blocks for layer in range(TINY.layers)]
    return [part.reshape(-1) for part in (*found, arrays["ln_f.weight"], arrays["ln_f.bias"])]


def state_files(folder, planes, *, step: int, tail: bytes = b"", ranks: int = 1, shares: bool = False, padded: int = 256, **words):
    """As save_state of llm.c's train_gpt2.cu. `shares`: each rank has its part of each tensor of each layer (ZeRO-1)."""
    for rank in range(ranks):
        header = np.zeros(256, "<i4")
        header[[0, 1, 2, 3, 4, 5, 10]] = 20240527, 1, ranks, rank, len(planes) == 3, bool(tail), step
        header[20:24].view("<u8")[:] = 0x123456789ABCDEF0 + rank, 0xFEDCBA9876543210
        for word, value in words.items():
            header[int(word[1:])] = value
        body = b""
        for plane in planes:
            for part in flat(plane, padded):
                n = len(part) // ranks
                body += (part[rank * n : (rank + 1) * n] if shares else part).tobytes()
        (folder / f"state_{step:08d}_{rank:05d}.bin").write_bytes(header.tobytes() + body + tail)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    r = np.random.default_rng(0)
    for name, count in (("val_000000", 300), ("train_000001", LENGTHS[0]), ("train_000002", LENGTHS[1])):
        write_shard(folder / f"x_{name}.bin", [r.integers(0, 256, count)], magic=20240520)
    return folder


def run(*words) -> int:
    return main([str(word) for word in words])


def moments(found, kind: str) -> dict[str, np.ndarray]:
    return {name.removesuffix(f".{kind}"): a for name, a in found.items() if name.endswith(f".{kind}")}


def test_a_run_goes_to_llm_c_and_back_and_ends_with_the_same_bits(shards, tmp_path, capsys):
    """At step 3 the data stands behind 9 micro-batches of an epoch's 13, at step 5 in the second epoch."""
    train = ("train", "shakespeare-char", "--data", shards, *SIZES, *KEYS, *HOW, *SEVEN)
    assert run(*train, "--out", tmp_path / "run", "--train.checkpoint_every", 1, "--train.save_total_limit", 9) == 0
    end = tmp_path / "run" / "checkpoints" / "step-000007"
    for step in (3, 5):
        source, log = tmp_path / "run" / "checkpoints" / f"step-{step:06d}", tmp_path / f"log{step}"
        capsys.readouterr()
        assert run("export", source, "--format", "llmc-checkpoint", "--out", log) == 0
        assert f"-o {log} -y 1 -b 2 -t 8 -d 48" in capsys.readouterr().out
        weights, adam = load_file(source / "weights.safetensors"), load_file(source / "optimizer.safetensors")
        (tmp_path / "expected").mkdir(exist_ok=True)
        at, planes = loader(ACCUMULATE * step), (moments(adam, "m"), moments(adam, "v"), weights)
        place = {"w30": at.shard, "w32": at.sample, "w20": 13371337, "w21": 0, "w22": 13371337, "w23": 0}
        state_files(tmp_path / "expected", planes, step=step, tail=at.tail(), **place)
        assert {path.name for path in log.iterdir()} == {f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", f"DONE_{step:08d}"}
        state = f"state_{step:08d}_00000.bin"
        assert (log / state).read_bytes() == (tmp_path / "expected" / state).read_bytes()

        again = (
            "import",
            log / f"model_{step:08d}.bin",
            "shakespeare-char",
            "--tokenizer",
            "bytes",
            "--out",
            tmp_path / f"back{step}",
        )
        assert run(*again, *KEYS, *HOW, "--steps", 7) == 0
        assert f"step {step}, both moments, master weights; resume with: barellm train" in capsys.readouterr().out
        there = tmp_path / f"back{step}" / "checkpoints" / f"step-{step:06d}"
        assert (there / "weights.safetensors").read_bytes() == (source / "weights.safetensors").read_bytes()
        found = load_file(there / "optimizer.safetensors")
        assert found.keys() == adam.keys() and all((found[name] == adam[name]).all() for name in adam)
        resume = ("train", "--out", tmp_path / f"back{step}", "--resume", "--data", shards, "--device", "reference")
        assert run(*resume) == 0
        last = tmp_path / f"back{step}" / "checkpoints" / "step-000007"
        assert (last / "weights.safetensors").read_bytes() == (end / "weights.safetensors").read_bytes()
    rows = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("run", "back5")]
    losses = [[row["loss"] for row in of if row["kind"] == "train"] for of in rows]
    assert losses[1] == losses[0][5:]


@pytest.mark.parametrize("ranks, shares, master, version, padded", [
    (1, False, True, 5, 384), (1, False, False, 3, 256), (2, False, True, 3, 256), (2, True, True, 5, 256),
    (4, True, False, 3, 384),
])  # fmt: skip
@pytest.mark.parametrize("shuffled", [False, True])
def test_an_import_has_llm_cs_numbers(tmp_path, ranks, shares, master, version, padded, shuffled):
    """Whoever wrote them: one process, several with the same, or several with their shares."""
    kinds = {kind: random_arrays(TINY, seed) for seed, kind in enumerate(("m", "v", "weights"))}
    llmc_file(tmp_path / "model_00000012.bin", TINY, kinds["weights"], version=version, padded=padded)
    planes = list(kinds.values())[: 3 if master else 2]
    tail = loader(4).tail() if shuffled else b""
    state_files(tmp_path, planes, step=12, ranks=ranks, shares=shares, tail=tail, padded=padded, w30=1, w32=4)
    words = ("import", tmp_path / "model_00000012.bin", "--tokenizer", "bytes", "--out", tmp_path / "run", *HOW, "--steps", 20)
    assert run(*words) == 0
    step = tmp_path / "run" / "checkpoints" / "step-000012"
    adam, weights = load_file(step / "optimizer.safetensors"), load_file(step / "weights.safetensors")
    for kind in "mv":
        for name, array in kinds[kind].items():
            np.testing.assert_array_equal(adam[f"{name}.{kind}"][: len(array)], array, name)
    assert adam["skipped"].tolist() == [0] and len(adam) == 2 * len(weights) + 1
    for name, array in kinds["weights"].items():
        exact = (weights[name] == array).all()
        assert exact if master or version == 3 else not exact, name


def test_the_moments_of_padded_ids_are_none(tmp_path):
    """Whatever the file has there."""
    model = type(TINY)(layers=2, heads=2, d_model=12, vocab_size=250, max_seq=20)
    arrays = random_arrays(model)
    full = arrays | {"wte": np.ones((256, 12), np.float32)}
    llmc_file(tmp_path / "model_00000001.bin", model, arrays, version=3, padded=256)
    state_files(tmp_path, [full, full], step=1)
    from barellm.interop.llmc import read

    weights = read(tmp_path / "model_00000001.bin")
    source = llmc_state.Training(weights, llmc_state.read(llmc_state.beside(weights.path), weights))
    assert source.read_rows("wte.m", 240, 256).sum() == 12 * 10 and source.read_rows("wte.v", 251, 256).sum() == 0


def written(folder, **words):
    """A checkpoint of step 12 with one state."""
    arrays = random_arrays(TINY)
    folder.mkdir(exist_ok=True)
    path = llmc_file(folder / "model_00000012.bin", TINY, arrays, version=3, padded=256)
    squares = {name: array**2 for name, array in arrays.items()}
    state_files(folder, [arrays, squares, arrays], step=12, tail=loader(36).tail(), **words)
    return path


@pytest.mark.parametrize("words, message", [
    ({"w0": 20240326}, "begins with [20240326, 1], expected [20240527, 1], a state of llm.c"),
    ({"w1": 2}, "begins with [20240527, 2], expected"), ({"w2": 3}, "is of process 0 of 3, expected 0 of 1, as many as"),
    ({"w3": 1}, "is of process 1 of 1, expected 0 of 1"), ({"w10": 13}, "is of step 13, and its name says another"),
    ({"w4": 0}, " bytes, expected the state of the 7,104 parameters of"), ({"w5": 0}, " bytes, expected the state of the"),
])  # fmt: skip
def test_a_state_that_is_another_is_refused(tmp_path, refused, words, message):
    path = written(tmp_path, **words)
    assert message in refused("import", path, "--tokenizer", "bytes", "--out", tmp_path / "run", *HOW, "--steps", 20)
    assert not (tmp_path / "run").exists()


def test_a_state_that_is_cut_is_refused(tmp_path, refused):
    path = written(tmp_path)
    state = tmp_path / "state_00000012_00000.bin"
    content = state.read_bytes()
    for size in (len(content) - 1, len(content) - 2520, 1024 + 12 * sum(map(len, flat(random_arrays(TINY)))) + 3, 1025, 100, 0):
        state.write_bytes(content[:size])
        said = refused("import", path, "--tokenizer", "bytes", "--out", tmp_path / "run", *HOW, "--steps", 20)
        assert "state_00000012_00000.bin" in said
    state.write_bytes(content)
    (tmp_path / "state_00000012_00001.bin").write_bytes(content)
    assert "expected 0 of 2" in refused("import", path, "--tokenizer", "bytes", "--out", tmp_path / "run")


@pytest.mark.parametrize("words, message", [
    (("--optim.name", "muon"), "optim.name is 'muon', and "), (("--steps", 11), "train.steps is 11, "),
    (("--minutes", 3), "ends after some number of steps: --steps N"), (("--model.layers", 3), "model.layers is 2 in "),
])  # fmt: skip
def test_a_run_that_could_not_have_come_there_is_refused(tmp_path, refused, words, message):
    words = ("import", written(tmp_path), "--tokenizer", "bytes", "--out", tmp_path / "run", *HOW, "--steps", 20, *words)
    assert message in refused(*words)


def test_other_data_than_llm_cs_is_noticed(tmp_path, shards, refused):
    """36 micro-batches were taken by 12 steps of 3; 12 by 12 steps of one."""
    for name, accumulate in (("right", 3), ("wrong", 1)):
        at = loader(36)
        path = written(tmp_path / name, w30=at.shard, w32=at.sample)
        words = ("--tokenizer", "bytes", "--out", tmp_path / name / "run", "--steps", 13)
        assert run("import", path, "shakespeare-char", *words, *KEYS, *HOW, "--train.gradient_accumulation_steps", accumulate) == 0
    resume = ("--resume", "--data", shards, "--device", "reference")
    assert run("train", "--out", tmp_path / "right" / "run", *resume) == 0
    said = refused("train", "--out", tmp_path / "wrong" / "run", *resume)
    assert said.startswith("llm.c's data stood at micro-batch ") and "choose llm.c's -b, -t, -d and shards" in said


def test_each_place_of_an_epoch_is_where_llm_c_stands(tmp_path, shards):
    """Between two shards and two epochs too, where llm.c opens the next one only when it needs it."""
    from barellm.config import DataConfig
    from barellm.data.llmc import LlmcOrder
    from barellm.data.sources import prepare

    order = LlmcOrder(prepare(DataConfig(source=str(shards), tokenizer="bytes")).train, batch=B, seq=T)
    at = Loader()
    for taken in range(40):
        order.check(taken, {"shard": at.shard, "sample": at.sample, "shards": list(at.shards)})
        at.next_batch()
        found = order.data_position(taken)
        assert (found.shards, found.shard, found.sample + 1) == (at.shards, at.shard, at.sample)
        assert found.samples == at.samples
        assert (found.drawn, found.key.tolist()) == (at.twister.next, at.twister.key)


def test_weights_alone_have_no_training(tmp_path, refused):
    checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY))
    said = refused("export", tmp_path / "run", "--format", "llmc-checkpoint", "--out", tmp_path / "log")
    assert "has no state of an optimizer: export it as llmc" in said
    assert not (tmp_path / "log").exists()
