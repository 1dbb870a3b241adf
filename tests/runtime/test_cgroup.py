"""Limits of the process's control group and of those around it."""

from pathlib import Path

import pytest

from barellm.cpu import threads
from barellm.runtime import cgroup


@pytest.fixture
def group(tmp_path, monkeypatch) -> Path:
    """This process in the group a/b."""
    (tmp_path / "mount/a/b").mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/a/b\n")
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    return tmp_path / "mount/a/b"


def test_without_limits(group):
    assert cgroup.cpu_limit() is None and cgroup.memory_limits() == []
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert cgroup.cpu_limit() is None and cgroup.memory_limits() == []


def test_the_tightest_group_counts(group, monkeypatch):
    for folder, quota in ((group, 300000), (group.parent, 150000), (group.parents[1], 200000)):
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    assert cgroup.cpu_limit() == 1.5
    monkeypatch.delenv("BARELLM_THREADS", raising=False)
    monkeypatch.setattr(threads, "allowed_cpus", lambda: list(range(8)))
    assert threads.thread_count() == 1
    (group.parent / "memory.max").write_text("4096\n")
    (group / "memory.max").write_text("8192\n")
    assert min(cgroup.memory_limits()) == (4096, group.parent / "memory.max")


def test_version_1_and_no_proc(group, monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "absent")
    (tmp_path / "mount/memory").mkdir()
    (tmp_path / "mount/memory/memory.limit_in_bytes").write_text("12345\n")
    assert cgroup.memory_limits() == [(12345, tmp_path / "mount/memory/memory.limit_in_bytes")]


@pytest.fixture
def version_1(tmp_path, monkeypatch) -> Path:
    """This process in a/b of memory's tree and in c of the processors' tree, as Docker has it with version 1."""
    for folder in ("memory/a/b", "cpu/c"):
        (tmp_path / "mount" / folder).mkdir(parents=True)
    (tmp_path / "own").write_text("9:memory:/a/b\n4:cpu,cpuacct:/c\n1:name=systemd:/a\n")
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    return tmp_path / "mount"


def test_the_processs_own_group_of_version_1_counts(version_1):
    for folder, limit in (("", 9223372036854771712), ("a", 8192), ("a/b", 4096)):
        (version_1 / "memory" / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert min(cgroup.memory_limits()) == (4096, version_1 / "memory/a/b/memory.limit_in_bytes")
    for folder, quota in (("", -1), ("c", 150000)):
        (version_1 / "cpu" / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (version_1 / "cpu" / folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup.cpu_limit() == 1.5


def test_a_container_of_version_1_whose_group_is_the_root_there(version_1):
    (version_1 / "own").write_text("9:memory:/docker/0123\n")
    (version_1 / "memory/memory.limit_in_bytes").write_text("4096\n")
    assert min(cgroup.memory_limits()) == (4096, version_1 / "memory/memory.limit_in_bytes")
    assert cgroup.cpu_limit() is None
