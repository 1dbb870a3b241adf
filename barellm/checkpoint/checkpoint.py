"""Checkpoints: a folder per step that is whole or is not there.

    DIR/checkpoints/step-000500/
        weights.safetensors  optimizer.safetensors    fp32, row-major, canonical
        gradients.safetensors                         the same, where the next step adds to those of the last
        meta.json            resolved configuration, step, sample position, tokenizer hash, ISA, versions
        tokenizer files
        manifest.json        sizes and xxh3-64 checksums of the others, written last

One that was imported holds weights alone: a run begins with it, none goes on from it. One of a run with frozen weights holds the
others alone, and meta.json names the base that has the frozen ones, by its path and its hash.

A save writes a temporary folder, syncs each file and the folder, renames it and syncs the parent. A kill at any point
leaves the new checkpoint or the ones before it."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from barellm.checkpoint import storage, tensorfile
from barellm.errors import UserError, shown
from barellm.jsontext import loads
from barellm.runtime.session import Session

FORMAT = 1
WEIGHTS, OPTIMIZER, META, MANIFEST = "weights.safetensors", "optimizer.safetensors", "meta.json", "manifest.json"
GRADIENTS = "gradients.safetensors"
KINDS: dict[str, tuple[type, ...]] = {  # of what meta.json holds, where it is there
    **dict.fromkeys(("step", "samples", "tokens"), (int,)),
    **dict.fromkeys(("config", "machine", "base"), (dict,)),
    **dict.fromkeys(("data", "llmc"), (dict, type(None))),
    **{"total_steps": (int, type(None)), "seconds": (int, float), "weights": (str,), "source": (str,)},
}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def steps(folder: Path) -> list[Path]:
    """Step folders, newest first, verified or not."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


class Source(tensorfile.RowReader, Protocol):
    """The source of a checkpoint: a session, or `checkpoint.weights.Weights`, which have no state of an optimizer."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...


def of_role(session: Source, role: str) -> dict[str, Any]:
    """The tensors of a role that a checkpoint holds: all but frozen parameters, which its base has (`meta.json`)."""
    return {name: t for name, t in session.tensors.items() if t.role == role and not t.frozen}


def checkpoint_bytes(session: Source) -> int:
    return sum(tensorfile.file_bytes(found) for role in ("parameter", "state") if (found := of_role(session, role)))


def save(
    folder: Path, session: Source, *, step: int, meta: Mapping[str, Any], tokenizer: Mapping[str, bytes], keep: int,
    gradients: bool = False, warn: Callable[[str], object] = lambda line: None,
) -> Path:  # fmt: skip
    """Write the checkpoint of `step` into `folder` (with `gradients` if the next step adds to them), then remove all but the newest
    `keep` up to it; those with "milestone" in their `meta` always stay and do not count. OSError: nothing has changed. `warn` gets
    a line for each thing that could not be removed. If `folder` is a symlink, nothing old is removed: it is not the run's."""
    target = step_folder(folder, step)
    if not folder.is_dir():
        storage.system.mkdir(folder)
        storage.sync_folder(folder.parent)
    may_remove = not folder.is_symlink()
    if may_remove:
        storage.remove_temporaries(folder, warn)
    if os.path.lexists(target) and problem(target):
        broken = storage.set_aside(target)
        if may_remove:
            storage.remove_checkpoint(broken, warn)
    if not target.exists():
        roles = {WEIGHTS: "parameter", OPTIMIZER: "state"} | ({GRADIENTS: "gradient"} if gradients else {})
        _write(target, session, roles, meta={"format": FORMAT, "step": step, **meta}, tokenizer=tokenizer)
    thin(folder, step=step, keep=keep, warn=warn)
    return target


def thin(folder: Path, *, step: int, keep: int, warn: Callable[[str], object] = lambda line: None) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, as `save` does."""
    # A later one, from which the run did not go on because it is damaged, must not count.
    up_to_this = [path for path in steps(folder) if step_of(path) <= step]
    rotating = [path for path in up_to_this if not _is_milestone(path)]
    for old in rotating[max(1, keep) :]:
        if folder.is_symlink():
            warn(f"warning: {folder} is a link: nothing is removed there, older checkpoints stay")
            break
        storage.remove_checkpoint(old, warn)


def _is_milestone(path: Path) -> bool:
    """Whether the run that wrote it keeps it for ever, whatever a later session of the run was asked for."""
    try:
        return read_json(path / META).get("milestone") is True
    except (OSError, UserError):  # it is damaged
        return False


def _write(
    target: Path, session: Source, roles: Mapping[str, str], *, meta: Mapping[str, Any], tokenizer: Mapping[str, bytes]
) -> None:
    """Write the files of a checkpoint into a temporary folder that becomes `target`; `roles`: file -> role of its tensors."""
    with storage.new_folder(target) as temporary:
        files = {}
        for name, role in roles.items():
            if tensors := of_role(session, role):
                files[name] = tensorfile.write(temporary / name, session, tensors)
        files[META] = storage.write_file(temporary / META, _json(meta))
        for name, data in tokenizer.items():
            files[name] = storage.write_file(temporary / name, data)
        storage.write_file(temporary / MANIFEST, _json({"format": FORMAT, "files": files}))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def problem(path: Path, *, optimizer: bool = True) -> str | None:
    """Why a step folder is not valid, in words; None if sizes and checksums match the manifest. `optimizer` False: of files that
    only training reads, only the sizes are checked."""
    from xxhash import xxh3_64

    try:
        manifest = loads((path / MANIFEST).read_bytes())
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            return f"its format is {shown(manifest['format'])}, this version reads {FORMAT}"
        for name, one in files.items():  # a name with a folder would be a file that is not the checkpoint's
            if not re.fullmatch(r"[\w.-]{1,99}", name) or not re.fullmatch(r"[0-9a-f]{16}", one["xxh3_64"]):
                raise ValueError(name)
        for name in {WEIGHTS, META, *files}:
            if name not in files:
                return f"{MANIFEST} does not list {name}"
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != files[name]["bytes"]:
                return f"{name} has {size} bytes, expected {shown(files[name]['bytes'])}"
            if name in (OPTIMIZER, GRADIENTS) and not optimizer:
                continue
            digest, piece = xxh3_64(), bytearray(tensorfile.NEAR)
            with file.open("rb", buffering=0) as data:
                while count := data.readinto(piece):
                    digest.update(memoryview(piece)[:count])
            if digest.hexdigest() != files[name]["xxh3_64"]:
                return f"the checksum of {name} is {digest.hexdigest()}, expected {files[name]['xxh3_64']}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def newest(folder: Path, *, optimizer: bool = True) -> tuple[Path | None, list[str]]:
    """(the newest step folder that verifies or None, what is wrong with the newer ones). `optimizer`: as in `problem`."""
    wrong = []
    for path in steps(folder):
        found = problem(path, optimizer=optimizer)
        if found is None:
            return path, wrong
        wrong.append(f"{path}: {found}")
    return None, wrong


def must_exist(path: Path, *, expected: str) -> None:
    """Raise a UserError for a folder that is not there. If somebody forgot the date in a run's name, it names the newest."""
    if not path.exists():
        dated = max(path.parent.glob(f"{path.name}-*"), default=None)
        raise UserError(f"{path} does not exist, " + (f"did you mean {dated}?" if dated else f"expected {expected}"))


def find(path: Path, *, optimizer: bool = True) -> tuple[Path, list[str]]:
    """(the step folder at `path`, or the newest valid one of a run; why newer ones were skipped). `optimizer`: see `problem`."""
    must_exist(path, expected="a run folder or a checkpoint folder")
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        if found := problem(path, optimizer=optimizer):
            raise UserError(f"{path}: {found}")
        return path, []
    for folder in (path / "checkpoints", path):
        if steps(folder):
            valid, skipped = newest(folder, optimizer=optimizer)
            if valid is None:
                raise UserError(f"no checkpoint in {folder} is whole: {'; '.join(skipped)}")
            return valid, skipped
    runs = [run for run in path.iterdir() if steps(run / "checkpoints")] if path.is_dir() else []
    if runs:
        newest_run = max(runs, key=lambda run: run.stat().st_mtime)
        raise UserError(f"{path} has no checkpoint, did you mean {newest_run}?")
    hint = "expected a folder with checkpoints/step-... (barellm import makes one of other programs' models)"
    raise UserError(f"{path} has no checkpoint, {hint}")


def holds_any(path: Path) -> bool:
    """Whether a path is a checkpoint, or has some, whole or not."""
    is_one = (path / MANIFEST).exists() or path.name.startswith("step-")
    return is_one or any(steps(folder) for folder in (path / "checkpoints", path))


def read_meta(path: Path) -> dict[str, Any]:
    """The content of a step folder's meta.json. It is a UserError if barellm did not write it."""
    meta = read_json(path / META)
    if missing := [key for key in ("step", "config") if key not in meta]:
        raise UserError(f"{path / META} has no {missing[0]!r}, expected what barellm writes there")
    for key, value in meta.items():
        if (key in KINDS and type(value) not in KINDS[key]) or (type(value) is int and value < 0):
            raise UserError(f"{path / META}: {key} is {shown(value)}, expected what barellm writes there")
    return meta


def need_numbers(path: Path) -> None:
    """Raise a UserError for a step folder whose matrices have few bits."""
    meta = read_meta(path)
    if few := meta.get("weights"):
        made_of = f"use {meta['source']}, of which it was made" if "source" in meta else "use the run that it was made of"
        raise UserError(f"{path} has weights of few bits ({few}), which only sample and eval read: {made_of}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Anything else is a UserError."""
    try:
        found = loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected a JSON object")
    return found


def load(path: Path, session: Session) -> None:
    """Stream weights, and what the optimizer goes on with, from a verified step folder into the session."""
    need_numbers(path)
    tensorfile.read(path / WEIGHTS, session, of_role(session, "parameter"))
    tensorfile.read(path / OPTIMIZER, session, of_role(session, "state"))
    if (path / GRADIENTS).exists():
        tensorfile.read(path / GRADIENTS, session, of_role(session, "gradient"))
