"""The control groups that this process is in: what a container or a service may use. Limits of versions 1 and 2."""

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def files(name: str, controller: str = "") -> list[tuple[Path, str]]:
    """(path, text) of the readable files `name` of this process's control group and all its ancestors: an outer group's limit binds
    the inner ones. `controller`: of version 1, where each has its own tree; "" is version 2."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    root = MOUNT / controller
    folders = [root]  # where a container sees its own group as the root, its path in /proc is not there
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # "" is version 2: 0::/path
            group = root / path.strip("/")
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [(folder / name, text.strip()) for folder in dict.fromkeys(folders) for text in _texts(folder / name)]


def _texts(path: Path) -> list[str]:
    """What is in a file, nothing where it cannot be read."""
    try:
        return [path.read_text()]
    except OSError:
        return []


def cpu_limit() -> float | None:
    """Cores that the tightest CPU quota gives, None without one."""
    quotas = [text.split() for _, text in files("cpu.max")]
    for path, text in files("cpu.cfs_quota_us", "cpu"):  # -1 without a limit
        quotas += [[text, period.strip()] for period in _texts(path.with_name("cpu.cfs_period_us"))]
    return min((int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdigit()), default=None)


def memory_limits() -> list[tuple[int, Path]]:
    return [(int(text), path) for path, text in [*files("memory.max"), *files("memory.limit_in_bytes", "memory")] if text.isdigit()]
