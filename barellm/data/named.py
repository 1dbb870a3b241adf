"""Data sets that have a name: where they are on the network, and how their files are downloaded and verified."""

import hashlib
import http.client
import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barellm.data.cache import cache_folder, new_file
from barellm.data.corpus import Corpus, Input, Piece
from barellm.data.reading import Block, Layout
from barellm.data.unpacking import required
from barellm.errors import UserError, nearest

ENDLESS = 1 << 62  # where a piece stops whose length nobody knows before it is here
TRIES = 5  # of a download; each goes on where the one before broke off
SAMPLES = ("10BT", "100BT", "350BT")
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True)
class HubSet:
    """Parquet files of a data set on the Hugging Face hub, selected by path prefixes (`train`, `val`). If `val` is empty, the first
    `val_tokens` tokens are for validation, as in llm.c."""

    repo: str
    train: str
    val: str = ""
    val_tokens: int = 0
    field: str = "text"


def hub_sets() -> dict[str, HubSet]:
    found = {"tinystories": HubSet("roneneldan/TinyStories", "data/train-", "data/validation-")}
    for name in ("fineweb", "fineweb-edu"):
        for size in SAMPLES:
            found[f"{name}:{size}"] = HubSet(f"HuggingFaceFW/{name}", f"sample/{size}/", val_tokens=100_000_000)
    return found


def is_named(source: str) -> bool:
    """Whether a source is the name of a set; UserError for a size that a set does not have."""
    known = ["tinyshakespeare", *hub_sets()]
    name = source.partition(":")[0]
    if source not in known and name in {one.partition(":")[0] for one in known} and not Path(source).exists():
        raise UserError(f"no set {source!r}{nearest(source, known)} (known: {', '.join(known)})")
    return source in known


def tinyshakespeare() -> Path:
    """Path of the text, downloaded into the cache unless it is there with the right SHA-256."""
    path = cache_folder("sets") / "tinyshakespeare.txt"
    if not path.is_file() or _sha256(path) != SHAKESPEARE_SHA256:
        try:
            with urllib.request.urlopen(SHAKESPEARE, timeout=60) as response:
                content = response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"cannot download {SHAKESPEARE}: {error!r}; put the file at {path}") from error
        if (found := hashlib.sha256(content).hexdigest()) != SHAKESPEARE_SHA256:
            raise UserError(f"{SHAKESPEARE} has sha256 {found[:16]} ({len(content)} bytes), expected {SHAKESPEARE_SHA256[:16]}")
        with new_file(path) as file:
            file.write(content)
    return path


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Remote:
    """A file on the hub."""

    path: str
    bytes: int
    sha256: str


def list_files(source: HubSet) -> tuple[str, list[Remote]]:
    """The data set's current revision and its files at it: validation files first, then training files, each group sorted."""
    api = required("huggingface_hub", source.repo).HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    folder = source.train.rpartition("/")[0]
    try:
        revision = api.repo_info(source.repo, repo_type="dataset").sha
        entries = list(api.list_repo_tree(source.repo, folder, repo_type="dataset", revision=revision))
    except Exception as error:  # the library has many, from several packages
        raise UserError(f"cannot list {source.repo} on the hub: {type(error).__name__}: {error}") from error
    stored = [f for f in entries if f.path.endswith(".parquet") and f.lfs]
    files = sorted((Remote(f.path, f.size, f.lfs.sha256) for f in stored), key=lambda f: f.path)
    groups = [[f for f in files if prefix and f.path.startswith(prefix)] for prefix in (source.val, source.train)]
    if not groups[1] or (source.val and not groups[0]):
        raise UserError(f"{source.repo} on the hub has no files {source.train}*: it was changed since barellm was written")
    return revision, groups[0] + groups[1]


class Fetcher:
    """Downloads files into a folder, one file ahead of the reader."""

    def __init__(self, source: HubSet, revision: str, files: list[Remote], folder: Path, report: Callable[[str], None]) -> None:
        self.source, self.revision, self.folder, self.report = source, revision, folder, report
        self.files = {folder / one.path: one for one in files}
        self._ahead: dict[Path, tuple[threading.Thread, list[BaseException]]] = {}
        self._given_up = threading.Event()

    def need(self, path: Path) -> None:
        """Block until a file is here, and start the download of the next one in the background. Raises what its download raised."""
        paths = list(self.files)
        for wanted in paths[paths.index(path) :][:2]:
            if wanted not in self._ahead and not wanted.is_file():
                failures: list[BaseException] = []
                thread = threading.Thread(target=self._fetch, args=(wanted, failures), daemon=True)
                self._ahead[wanted] = thread, failures
                thread.start()
        if path in self._ahead:
            thread, failures = self._ahead.pop(path)
            while thread.is_alive():
                thread.join(0.2)  # in turns, so that Ctrl-C is heard
            if failures:  # nobody needs the next file any more
                self._given_up.set()
                for other, _ in self._ahead.values():
                    other.join(1.0)
                raise failures[0]

    def _fetch(self, path: Path, failures: list[BaseException]) -> None:
        try:
            self._download(self.files[path])
        except BaseException as error:
            failures.append(error)

    def _download(self, wanted: Remote) -> None:
        """Download a file to its place once size and SHA-256 are right. Broken connections resume; a wrong hash is retried once."""
        hub = required("huggingface_hub", wanted.path)
        hub.utils.disable_progress_bars()  # we print our own
        incoming, digest = self.folder / "incoming", ""
        self.report(f"fetching {self.source.repo}: {wanted.path} ({wanted.bytes / 1e6:,.1f} MB)")
        for restart in (False, True):
            path = Path(self._tried(hub, wanted, incoming, restart))
            if path.stat().st_size == wanted.bytes and (digest := _sha256(path)) == wanted.sha256:
                target = self.folder / wanted.path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
                return
        found = f"{wanted.path} of {self.source.repo} came twice with sha256 {digest[:16]}"
        raise UserError(f"{found}, the hub lists {wanted.sha256[:16]}")

    def _tried(self, hub: Any, wanted: Remote, incoming: Path, again: bool) -> str:
        """Download with up to TRIES attempts and growing pauses; returns the local path. `again`: restart a partial file."""
        for attempt in range(TRIES):
            try:
                return hub.hf_hub_download(
                    self.source.repo, wanted.path, repo_type="dataset", revision=self.revision, local_dir=incoming,
                    endpoint=os.environ.get("HF_ENDPOINT"), force_download=again,
                )  # fmt: skip
            except Exception as error:  # the library has many, from several packages
                problem = error
                if self._given_up.wait(min(2**attempt, 8) * 0.1):
                    break
        found = f"{type(problem).__name__}: {problem}"
        raise UserError(f"cannot fetch {wanted.path} of {self.source.repo} in {TRIES} tries: {found}")


@dataclass(frozen=True)
class FetchedCorpus(Corpus):
    """A corpus whose files are downloaded when they are read and deleted when their tokens are written."""

    fetcher: Fetcher = field(kw_only=True)

    def blocks(self, piece: Piece, *, start: int = -1, begins: bool = True) -> Iterator[Block]:
        self.fetcher.need(piece.path)
        yield from super().blocks(piece, start=start, begins=begins)

    def forget(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            piece.path.unlink(missing_ok=True)


def fetched_corpus(name: str, folder: Path, report: Callable[[str], None]) -> tuple[FetchedCorpus, HubSet]:
    """The corpus of a named set, to be downloaded into `folder`, and the set. Its hash is of the hub's hashes: no download yet."""
    source = hub_sets()[name]
    revision, files = list_files(source)
    pieces = [Piece(folder / one.path, 0, ENDLESS) for one in files]
    val = sum(bool(source.val) and one.path.startswith(source.val) for one in files)
    digest = hashlib.sha256(repr([(one.path, one.sha256) for one in files]).encode()).hexdigest()
    inputs = tuple(Input(f"{source.repo}@{revision}/{one.path}", one.bytes, one.sha256, "sha256") for one in files)
    corpus = FetchedCorpus(
        name=f"{name} ({source.repo}, {len(files)} files, {sum(one.bytes for one in files) / 1e9:,.2f} GB)",
        train=tuple(pieces[val:]), val=tuple(pieces[:val]), hash=digest, inputs=inputs, bytes=0, layout=Layout(field=source.field),
        fetcher=Fetcher(source, revision, files, folder, report),
    )  # fmt: skip
    return corpus, source
