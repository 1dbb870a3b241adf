"""Checkpoints: what is written is what is read, and nothing that goes wrong with the disk costs the one before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from barellm.checkpoint import checkpoint, storage, tensorfile
from barellm.checkpoint.folder import RunFolder
from barellm.errors import UserError
from tests.training.fake import FakeSession


def save(folder: Path, session: FakeSession, step: int, keep: int = 2) -> Path:
    tokenizer = {"tokenizer.json": b"{}"}
    return checkpoint.save(folder, session, step=step, meta={"config": {}}, tokenizer=tokenizer, keep=keep)


def same(a: FakeSession, b: FakeSession) -> bool:
    names = [n for n, t in a.tensors.items() if t.role in ("parameter", "state")]
    return all(a.arrays[n].tobytes() == b.arrays[n].tobytes() for n in names)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("piece", [1, 24, 1 << 20])
def test_load_gives_back_every_bit(folder, monkeypatch, piece):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    one, other = FakeSession(seed=1), FakeSession(seed=2)
    one.arrays["w"][1, 2] = np.float32("nan")
    one.arrays["skipped"][0] = -7
    path = save(folder, one, 12)
    assert path.name == "step-000012"
    checkpoint.load(path, other)
    assert same(one, other)


def test_the_files_are_safetensors_with_aligned_data(folder):
    session = FakeSession()
    path = save(folder, session, 1)
    weights = load_file(path / "weights.safetensors")
    state = load_file(path / "optimizer.safetensors")
    assert sorted(weights) == ["b", "w"]
    assert sorted(state) == ["b.m", "skipped", "w.m"]
    np.testing.assert_array_equal(weights["w"], session.arrays["w"])
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert tensorfile.read_header(path / name)[1] % 64 == 0


def test_the_predicted_size_is_the_size(folder):
    session = FakeSession()
    path = save(folder, session, 1)
    written = sum((path / name).stat().st_size for name in ("weights.safetensors", "optimizer.safetensors"))
    assert written == checkpoint.checkpoint_bytes(session)


def test_only_the_newest_are_kept(folder):
    session = FakeSession()
    for step in (1, 2, 10, 9, 30):
        save(folder, session, step, keep=2)
    assert [p.name for p in checkpoint.steps(folder)] == ["step-000030", "step-000010"]


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_just_written(folder):
    """A run that went on from step 10, because step 30 did not verify, saves step 20."""
    for step in (10, 30):
        save(folder, FakeSession(), step)
    damage_truncate(folder / "step-000030")
    path = save(folder, FakeSession(), 20, keep=1)
    assert checkpoint.newest(folder)[0] == path


def damage_truncate(path):
    file = path / "weights.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def damage_flip(path):
    file = path / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def damage_empty(path):
    (path / "weights.safetensors").write_bytes(b"")


def damage_missing(path):
    (path / "meta.json").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_bytes(b"{")


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


def damage_format(path):
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def damage_list(path):
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["files"]["weights.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage, words",
    [
        (damage_truncate, "weights.safetensors has"),
        (damage_flip, "the checksum of optimizer.safetensors is"),
        (damage_empty, "weights.safetensors has 0 bytes"),
        (damage_missing, "meta.json is missing"),
        (damage_manifest, "manifest.json is damaged"),
        (damage_no_manifest, "manifest.json is missing"),
        (damage_format, "its format is 99"),
        (damage_list, "manifest.json does not list weights.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(folder, damage, words):
    good = save(folder, FakeSession(), 1)
    damage(save(folder, FakeSession(), 2))
    path, wrong = checkpoint.find(folder.parent)
    assert path == good
    assert len(wrong) == 1 and words in wrong[0] and "step-000002" in wrong[0]
    with pytest.raises(UserError, match=words):
        checkpoint.find(folder / "step-000002")
    again = save(folder, FakeSession(), 2)  # the damaged one is replaced
    assert checkpoint.problem(again) is None


def test_a_run_without_a_whole_checkpoint_says_why(folder, tmp_path):
    damage_flip(save(folder, FakeSession(), 1))
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: .*checksum"):
        checkpoint.find(folder.parent)
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.find(folder / "nowhere")
    with pytest.raises(UserError, match="has no checkpoint"):
        (tmp_path / "empty").mkdir()
        checkpoint.find(tmp_path / "empty")


def test_another_model_is_refused_before_anything_is_read(folder):
    path = save(folder, FakeSession(), 1)
    other = FakeSession(seed=5, rows=6)
    before = other.arrays["b"].copy()
    with pytest.raises(UserError, match=r"w is F32 \(5, 3\), expected F32 \(6, 3\)"):
        checkpoint.load(path, other)
    np.testing.assert_array_equal(other.arrays["b"], before)
    del other.tensors["w"]
    with pytest.raises(UserError, match="has the tensor 'w', which this model lacks"):
        checkpoint.load(path, other)


# --- every call to the system fails or kills, one after the other ---

CALLS = ("open", "posix_fallocate", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")


class System:
    """`os`, but the call number `at` does `action` instead (or, with `after`, once it is done)."""

    def __init__(self, at: int, action, *, after: bool = False) -> None:
        self.at, self.action, self.after, self.count = at, action, after, 0

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args, **kwargs):
            self.count += 1
            if self.count - 1 != self.at:
                return real(*args, **kwargs)
            if self.after:
                real(*args, **kwargs)
            return self.action(name)

        return call


def kill(name):
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(function) -> int:
    """Runs `function` in a fork; the wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def number_of_calls(folder: Path, monkeypatch) -> int:
    """Calls of a save that replaces nothing, prunes one checkpoint and finds a stale temporary."""
    prepare_old(folder)
    counter = System(-1, None)
    monkeypatch.setattr(storage, "system", counter)
    save(folder, FakeSession(seed=3), 3)
    monkeypatch.setattr(storage, "system", os)
    return counter.count


def prepare_old(folder: Path) -> None:
    save(folder, FakeSession(seed=1), 1)
    save(folder, FakeSession(seed=2), 2)
    stale = folder / ".tmp-step-000009"
    stale.mkdir()
    (stale / "weights.safetensors").write_bytes(b"half")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.extended
def test_a_kill_at_any_call_leaves_the_new_checkpoint_or_the_old(tmp_path, monkeypatch, after):
    calls = number_of_calls(tmp_path / "count", monkeypatch)
    assert calls > 40
    new_seen = []
    for at in range(calls):
        folder = tmp_path / f"at-{at}"
        prepare_old(folder)
        storage.system = System(at, kill, after=after)
        status = in_child(lambda folder=folder: save(folder, FakeSession(seed=3), 3))
        storage.system = os
        assert os.WTERMSIG(status) == signal.SIGKILL, at
        path, wrong = checkpoint.newest(folder)
        assert path is not None and not wrong, (at, wrong)
        assert checkpoint.step_of(path) in (2, 3), at
        loaded = FakeSession(seed=9)
        checkpoint.load(path, loaded)
        assert same(loaded, FakeSession(seed=checkpoint.step_of(path))), at
        new_seen.append(checkpoint.step_of(path) == 3)
        save(folder, FakeSession(seed=3), 3)
        assert [p.name for p in sorted(folder.iterdir())] == ["step-000002", "step-000003"], at
    assert new_seen == sorted(new_seen)  # first never, from the rename on always
    assert any(new_seen) and not all(new_seen)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_at_any_call_leaves_the_old_checkpoints(tmp_path, monkeypatch, code):
    def fail(name):
        raise OSError(code, os.strerror(code))

    calls = number_of_calls(tmp_path / "count", monkeypatch)
    for at in range(calls):
        folder = tmp_path / f"at-{at}"
        prepare_old(folder)
        monkeypatch.setattr(storage, "system", System(at, fail))
        try:
            save(folder, FakeSession(seed=3), 3)
        except OSError as error:
            assert error.errno == code
        monkeypatch.setattr(storage, "system", os)
        path, wrong = checkpoint.newest(folder)
        assert path is not None and not wrong, at
        loaded = FakeSession(seed=9)
        checkpoint.load(path, loaded)
        assert same(loaded, FakeSession(seed=checkpoint.step_of(path))), at
        save(folder, FakeSession(seed=3), 3)
        assert checkpoint.newest(folder)[0] == folder / "step-000003"


def test_a_meta_json_of_somebody_else_is_named(folder):
    path = save(folder, FakeSession(), 1)
    (path / "meta.json").write_text('{"step": 1}')
    with pytest.raises(UserError, match=r"meta\.json has no 'config', expected what barellm writes there"):
        checkpoint.read_meta(path)


def test_short_writes_are_continued(folder, monkeypatch):
    class Short(System):
        def __getattr__(self, name):
            return (lambda fd, data: os.write(fd, data[:5])) if name == "write" else getattr(os, name)

    monkeypatch.setattr(storage, "system", Short(-1, None))
    assert checkpoint.problem(save(folder, FakeSession(), 1)) is None


SIZES = [1, 4095, 4096, 4097, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, (17 << 20) + 5]


@pytest.mark.parametrize("how", ["past the cache", "refused", "short"])
def test_a_large_file_is_what_was_written(tmp_path, monkeypatch, how):
    class Disk:
        def __getattr__(self, name):
            return self.write if name == "write" else getattr(os, name)

        def write(self, fd, data):
            if how == "refused" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return os.write(fd, data[:5] if how == "short" and len(data) % 7 == 1 else data)

    monkeypatch.setattr(storage, "DIRECT_FROM", 1)
    monkeypatch.setattr(storage, "system", Disk())
    content = np.random.default_rng(5).bytes(max(SIZES))
    for size in SIZES:
        path = tmp_path / str(size)
        file = storage.NewFile(path, size=size)
        cuts = [0, size // 3, size // 3, size // 2, size]
        for lo, hi in pairwise(cuts):
            file.write(content[lo:hi])
        entry = file.close()
        assert path.read_bytes() == content[:size]
        assert entry == {"bytes": size, "xxh3_64": xxhash.xxh3_64(content[:size]).hexdigest()}


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_anything_is_removed(folder, monkeypatch):
    """What a power cut may lose: writes without a sync of their file, names without a sync of their folder."""
    events: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    class Recorder:
        def __getattr__(self, name):
            def call(*args):
                result = getattr(os, name)(*args)
                if name == "open":
                    names[result] = Path(args[0]).name
                subject = names[args[0]] if isinstance(args[0], int) else Path(args[0]).name
                events.append((name, subject))
                return result

            return call

    for step in (1, 2):
        save(folder, FakeSession(seed=step), step, keep=1)
        if step == 1:
            monkeypatch.setattr(storage, "system", Recorder())
    rename = events.index(("rename", ".tmp-step-000002"))
    files = ["weights.safetensors", "optimizer.safetensors", "meta.json", "tokenizer.json", "manifest.json"]
    assert [subject for name, subject in events[:rename] if name == "open" and subject in files] == files
    for file in files:
        written = max(i for i, event in enumerate(events) if event == ("write", file))
        assert written < events.index(("fsync", file)) < rename
    assert events.index(("fsync", "manifest.json")) < events.index(("fsync", ".tmp-step-000002")) < rename
    parent = events.index(("fsync", "checkpoints"))
    removal = events.index(("rename", "step-000001"))
    assert rename < parent < removal < min(i for i, (name, _) in enumerate(events) if name == "unlink")


# --- links, and what cannot be removed ---


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder of somebody else, with a file and a folder in it."""
    (tmp_path / "own" / "drafts").mkdir(parents=True)
    for name in ("thesis.tex", "drafts/one.tex"):
        (tmp_path / "own" / name).write_text("text")
    return tmp_path / "own"


def untouched(own: Path) -> bool:
    return [p.name for p in sorted(own.rglob("*"))] == ["drafts", "one.tex", "thesis.tex"]


def test_a_save_removes_links_and_never_what_they_point_to(folder, own):
    """Whatever a link is called, and wherever it stands: in place of a temporary, of an old checkpoint, of the new one, and inside
    of a checkpoint."""
    save(folder, FakeSession(seed=1), 2)
    for name in (".tmp-x", ".tmp-step-000009", "step-000001", "step-000009"):
        (folder / name).symlink_to(own)
    (folder / ".tmp-step-000001").symlink_to(own / "gone")
    (folder / ".tmp-file").symlink_to(own / "thesis.tex")
    (folder / "step-000002" / "drafts").symlink_to(own)
    said: list[str] = []
    path = checkpoint.save(folder, FakeSession(), step=9, meta={"config": {}}, tokenizer={}, keep=1, warn=said.append)
    assert untouched(own) and not said
    assert [p.name for p in folder.iterdir()] == ["step-000009"] and checkpoint.problem(path) is None


def test_a_checkpoint_behind_a_link_is_read_and_replaced_as_a_link(folder, tmp_path):
    """As of one that was moved to a larger disk."""
    (tmp_path / "disk").mkdir()
    for step in (1, 2):
        save(folder, FakeSession(seed=step), step)
        (folder / f"step-00000{step}").rename(tmp_path / "disk" / str(step))
        (folder / f"step-00000{step}").symlink_to(tmp_path / "disk" / str(step))
    loaded = FakeSession(seed=9)
    checkpoint.load(checkpoint.find(folder.parent)[0], loaded)
    assert same(loaded, FakeSession(seed=2))
    assert save(folder, FakeSession(seed=5), 2).is_symlink(), "it is whole: nothing is written"
    (folder / "step-000003").symlink_to(tmp_path / "gone")
    assert not save(folder, FakeSession(seed=3), 3, keep=1).is_symlink()
    assert [p.name for p in folder.iterdir()] == ["step-000003"]
    assert all(checkpoint.problem(tmp_path / "disk" / name) is None for name in "12")


def test_where_the_folder_of_checkpoints_is_a_link_nothing_is_removed(folder, own):
    others = own / ".tmp-step-000003"
    others.mkdir()
    folder.symlink_to(own)
    said: list[str] = []
    for step in (1, 2, 3, 4):
        checkpoint.save(folder, FakeSession(), step=step, meta={"config": {}}, tokenizer={}, keep=1, warn=said.append)
    with RunFolder(folder.parent, resume=True):
        pass
    assert [p.name for p in checkpoint.steps(own)] == [f"step-00000{step}" for step in (4, 3, 2, 1)]
    assert others.is_dir() and (own / "thesis.tex").exists()
    assert set(said) == {f"warning: {folder} is a link: nothing is removed there, older checkpoints stay"}


def test_folders_inside_a_checkpoint_go_with_it(folder):
    nested = save(folder, FakeSession(), 1) / ".ipynb_checkpoints" / "a"
    nested.mkdir(parents=True)
    (nested / "b").write_text("")
    save(folder, FakeSession(), 2, keep=1)
    assert [p.name for p in folder.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("call", ["unlink", "rmdir", "rename"])
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES, errno.ENOTEMPTY])
def test_what_cannot_be_removed_costs_a_warning_and_not_the_new_checkpoint(folder, monkeypatch, call, code):
    """As files of NFS that somebody has open. Each save tries again, also to write a step whose temporary name is taken."""

    class Busy:
        def __getattr__(self, name):
            return self.fail if name == call else getattr(os, name)

        def fail(self, path, *to):
            if call == "rename" and path.name.startswith(".tmp-"):
                return os.rename(path, *to)  # of the new checkpoint
            raise OSError(code, os.strerror(code), str(path))

    prepare_old(folder)
    monkeypatch.setattr(storage, "system", Busy())
    said: list[str] = []
    for step in (3, 9):
        path = checkpoint.save(
            folder, FakeSession(seed=step), step=step, meta={"config": {}}, tokenizer={}, keep=1, warn=said.append
        )
        assert checkpoint.problem(path) is None
        assert any("step-000002 is not removed: " in line and os.strerror(code) in line for line in said)
    monkeypatch.setattr(storage, "system", os)
    save(folder, FakeSession(), 10, keep=1)
    assert [p.name for p in folder.iterdir()] == ["step-000010"]


def test_a_file_that_takes_the_place_of_a_link_leaves_what_it_points_to(tmp_path, own):
    for name in ("config.json", ".tmp-config.json"):
        (tmp_path / name).symlink_to(own / "thesis.tex")
    storage.replace_file(tmp_path / "config.json", b"{}")
    assert (tmp_path / "config.json").read_bytes() == b"{}" and (own / "thesis.tex").read_text() == "text"
    (tmp_path / ".tmp-probe").symlink_to(own / "gone")
    with RunFolder(tmp_path, resume=True):
        assert not (tmp_path / ".tmp-probe").is_symlink() and not (own / "gone").exists()
