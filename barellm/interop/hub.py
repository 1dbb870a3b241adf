"""Models of Hugging Face's hub by name, through the package `huggingface_hub` (extra "data") with all that it knows: its cache,
revisions, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, connections that break, and a bar of progress."""

import os
import re
from pathlib import Path
from typing import Any

from barellm.data.unpacking import required
from barellm.errors import UserError

NAME = re.compile(r"hf:(?P<repo>[\w.-]+(/[\w.-]+)?)(?P<file>(/[\w.-]+)+\.gguf)?(@(?P<revision>[\w./-]+))?")
WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
NOT_WANTED = ("*/*.safetensors", "*/*.json", "consolidated*", "*.bin.index.json")  # the same weights once more, for other programs


def is_name(path: Path | str) -> bool:
    return str(path).startswith("hf:")


def fetched(name: str) -> Path:
    """Download (or update) hf:OWNER/NAME[/FILE.gguf][@REVISION] into the hub's cache; returns its path. UserError if that fails."""
    found = NAME.fullmatch(name)
    if found is None:
        raise UserError(f"{name} is no name on the hub, expected hf:OWNER/NAME, with /FILE.gguf for one file, and @REVISION")
    hub: Any = required("huggingface_hub", name)
    repo, file = found["repo"], (found["file"] or "").removeprefix("/")
    options = {"revision": found["revision"], "endpoint": os.environ.get("HF_ENDPOINT")}
    try:
        if file:
            return Path(hub.hf_hub_download(repo, file, **options))
        folder = Path(hub.snapshot_download(repo, allow_patterns=WANTED, ignore_patterns=NOT_WANTED, **options))
        others = [] if any(folder.glob("*.safetensors")) else hub.HfApi(endpoint=options["endpoint"]).list_repo_files(repo)
    except Exception as error:  # the library has many, from several packages
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(f"{name} does not come from the hub: {type(error).__name__}: {reason}") from error
    if files := sorted(one for one in others if one.endswith(".gguf")):
        raise UserError(f"{name} has no safetensors, expected one of its GGUF files: hf:{repo}/{files[0]} ({len(files)} in all)")
    return folder
