"""The control groups that this process is in: what a container or a service may use. Limits of version 2, and version 1's of
memory."""

from __future__ import annotations

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def files(name: str) -> list[tuple[Path, str]]:
    """The files of that name that can be read, of the process's group and of each group around it, and their text. A limit
    of an outer group holds for the inner ones."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    folders = [MOUNT]
    for line in lines:
        if line.startswith("0::"):
            group = MOUNT / line[3:].strip("/")
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(MOUNT)]
    found = []
    for folder in dict.fromkeys(folders):
        try:
            found.append((folder / name, (folder / name).read_text().strip()))
        except OSError:
            continue
    return found


def cpu_limit() -> float | None:
    """Cores that the tightest CPU quota gives, None without one."""
    quotas = [text.split() for _, text in files("cpu.max")]
    return min((int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0] != "max"), default=None)


def memory_limits() -> list[tuple[int, Path]]:
    """Every limit in bytes, with the file that sets it."""
    texts = [*files("memory.max"), *files("memory/memory.limit_in_bytes")]
    return [(int(text), path) for path, text in texts if text.isdigit()]
