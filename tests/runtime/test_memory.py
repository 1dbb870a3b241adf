"""What cannot fit is refused before anything is mapped, with the arithmetic."""

import mmap

import pytest

from barellm.assembly.build import open_model, resolved
from barellm.config import overrides
from barellm.errors import UserError
from barellm.models import preset
from barellm.runtime import cgroup, memory


def test_a_session_beyond_the_limit_maps_nothing(monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1.5G")
    monkeypatch.setattr(mmap, "mmap", lambda *_: pytest.fail("mapped"))
    config = overrides.changed(
        preset("gpt2-124m"), {"train.micro_batch_size": 4, "train.seq": 64, "train.gradient_accumulation_steps": 1}
    )
    with pytest.raises(UserError) as error, open_model(resolved(config, "cpu"), device="cpu"):
        pass
    text = str(error.value)
    assert "batch 4 x seq 64 needs" in text and "parameters 474.8" in text and "gradients 474.8" in text
    assert "BARELLM_MEMORY_LIMIT is 1536.0 MiB" in text


@pytest.mark.parametrize("text, nbytes", [("8000000", 8000000), ("512M", 512 << 20), ("2.5G", 5 << 29), ("3KiB", 3072)])
def test_limit_is_read_with_units(text, nbytes, monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", text)
    assert memory.memory_limit() == (nbytes, "BARELLM_MEMORY_LIMIT")


def test_a_limit_that_is_no_size_is_refused(monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "much")
    with pytest.raises(UserError, match="'much'"):
        memory.memory_limit()


def test_the_control_groups_limit_counts_where_it_is_lower(monkeypatch, tmp_path):
    monkeypatch.delenv("BARELLM_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    nbytes, source = memory.memory_limit()
    assert nbytes == 1000000 and "memory.max" in source
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.memory_limit()[1] == "this machine's memory"
