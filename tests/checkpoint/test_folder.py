"""The folder of a run: what a kill or a full disk left there does not stop the same command."""

import pytest

from barellm.checkpoint import storage
from barellm.checkpoint.folder import RunFolder
from barellm.errors import UserError


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("resume", [False, None])
@pytest.mark.parametrize(
    "left",
    [
        ["checkpoints/"],  # killed between making it and the first save
        ["checkpoints/.tmp-step-000000/model.safetensors"],  # killed within a save
        [".tmp-probe"],
        [".tmp-config.json"],
        ["checkpoints/.tmp-step-000000/", ".tmp-probe"],
    ],
)
def test_what_a_killed_process_left_is_removed_and_the_same_command_works(tmp_path, left, resume):
    out = tmp_path / "run"
    for name in left:
        if name.endswith("/"):
            (out / name).mkdir(parents=True)
        else:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(b"half")
    with RunFolder(out, resume=resume) as folder:
        assert set(names(folder.path)) <= {"checkpoints"}
        storage.write_file(folder.path / "config.json", b"{}")
    assert set(names(out)) <= {"checkpoints", "config.json"}


@pytest.mark.parametrize("resume", [False, None])
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "notes.txt", "checkpoints/step-000000/x", "checkpoints/x"])
def test_what_somebody_may_need_is_kept_and_named(tmp_path, name, resume):
    out = tmp_path / "run"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    (out / ".tmp-probe").write_text("half")
    before = names(out)
    named = "/".join(name.split("/")[:2])
    with pytest.raises(UserError, match=rf"is not empty \(it has {named}\): "), RunFolder(out, resume=resume):
        pass
    assert names(out) == before


def test_leftovers_of_a_process_that_still_writes_are_not_touched(tmp_path):
    with RunFolder(tmp_path / "run", resume=None) as folder:
        (folder.checkpoints / ".tmp-step-000000").mkdir(parents=True)
        with pytest.raises(UserError, match="another barellm process"), RunFolder(folder.path, resume=None):
            pass
        assert names(folder.path) == ["checkpoints", "checkpoints/.tmp-step-000000"]


def test_a_failed_command_leaves_no_folder_behind(tmp_path):
    with pytest.raises(OSError, match="full"), RunFolder(tmp_path / "a" / "run", resume=None) as folder:
        folder.checkpoints.mkdir()
        raise OSError("the disk is full")
    assert names(tmp_path) == []
