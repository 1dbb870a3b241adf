"""The staging directory OUT.part, in which shards are written until they are complete; the same command resumes from it."""

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from barellm.data.cache import writing
from barellm.data.unpacking import CHUNK
from barellm.data.writing import STATE, Job, read_manifest, write_split
from barellm.errors import UserError


class StagingDir:
    """While entered, this process alone prepares `out`. A folder OUT.part in which nothing was noted is removed at the end."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.part")
        self._lock = -1

    def __enter__(self) -> "StagingDir":
        """Find or make the working folder beside the output, and lock it. UserError: another process has it, or `out` is a file."""
        import fcntl

        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out} is there and not an empty folder: choose another or remove it")
        if self.folder.is_symlink():
            raise UserError(f"{self.folder} is a link, expected the folder of an unfinished prepare: remove the link")
        while True:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise UserError(f"another barellm process is preparing {self.out}") from None
            if self._is_ours():
                break
            os.close(self._lock)  # of a folder that another process has removed meanwhile: a lock on it keeps nobody out
        for path in self.folder.rglob(".*.tmp"):  # of a process that was killed: nobody else writes here
            with contextlib.suppress(OSError):  # it costs no more than its room
                path.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._is_ours() and not self.begun:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _is_ours(self) -> bool:
        """Whether the folder that is locked is the one that its path names."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.folder))
        except FileNotFoundError:
            return False

    @property
    def begun(self) -> bool:
        return (self.folder / STATE).exists()

    def spool(self, stream: BinaryIO, *, name: str) -> Path:
        """All of standard input, in a file: its length decides what is for validation."""
        path = self.folder / name
        with writing(path), open(path, "wb") as file:
            while chunk := stream.read(CHUNK):
                file.write(chunk)
        if path.stat().st_size == 0:
            raise UserError("standard input is empty, expected text")
        return path

    def finished(self, job: Job) -> dict[str, Any] | None:
        """The manifest of an `out` that this job has made already. UserError if `out` holds anything else."""
        if not self.out.is_dir() or not any(self.out.iterdir()):
            return None
        try:
            manifest = read_manifest(self.out)
        except UserError:
            manifest = {}
        if manifest.get("made_from") != job.identity:
            raise UserError(f"{self.out} is there and not an empty folder: choose another or remove it")
        (self.folder / STATE).unlink(missing_ok=True)
        return manifest

    def fill(self, job: Job, **more: Any) -> dict[str, Any]:
        """Does the job, or what is left of it; `out` appears when all of it is on disk."""
        made = self.folder / "shards"
        manifest = write_split(made, job, state=self.folder / STATE, **more)
        for part, count in manifest["tokens"].items():
            if count == 0:
                (self.folder / STATE).unlink()
                raise UserError(f"{job.corpus.name} has no text for the part {part!r}: {_advice(part, job, manifest)}")
        with writing(self.out):
            os.rename(made, self.out)
            (self.folder / STATE).unlink()
        return manifest


def _advice(part: str, job: Job, manifest: dict[str, Any]) -> str:
    if job.val_tokens:
        return f"it has {sum(manifest['tokens'].values())} tokens, of which --val-tokens takes the first {job.val_tokens}"
    return (
        f"it has {manifest['documents']} documents, and none begins in the last share --val-fraction of its characters"
        if part == "val"
        else "--val-fraction takes all of it"
    )
