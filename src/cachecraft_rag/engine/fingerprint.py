"""What a model is, by its files: the KV of other weights must not be found, wherever they lie.

A path is no identity: weights are exchanged in place, and one model lies in many folders. So the files are
hashed, at the speed of the disk and once: digests are remembered with the file's size and time of change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachecraft_rag.engine.remembered import load_facts, save_facts
from cachecraft_rag.models import cache_dir

SUFFIXES = frozenset(
    {".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt", ".jinja", ".py"}
)
"""Weights, configuration, tokenizer, and code that a model brings along."""
_READ_BYTES = 16 << 20


def model_fingerprint(name: str, revision: str | None) -> str:
    """Equal for equal files, in whatever folder.

    Args:
        name: a folder, or a name on the Hugging Face hub whose files are in the local cache. Of any other
            name the fingerprint is the name with its revision.
    """
    folder = _folder_of(name, revision)
    if folder is None:
        return f"{name}@{revision}"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file()]
    digests = _Digests(cache_dir() / "fingerprints.json")
    named = [[path.name, digests.of(path)] for path in files]
    digests.save()
    return _hash([json.dumps(named).encode()])


def _folder_of(name: str, revision: str | None) -> Path | None:
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    return None


class _Digests:
    """Digests of files by path, size and time of change, remembered in a file of the cache folder. Losing
    it costs time and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_changed = False
        try:
            known = load_facts(path)
        except (OSError, ValueError):
            known = {}
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    def of(self, path: Path) -> str:
        path = path.resolve()
        facts = path.stat()
        # The inode too: a file put in the place of another may keep its time of change.
        stamp = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
        known = self._known.get(str(path))
        if isinstance(known, list) and len(known) == 2 and known[0] == stamp:
            return str(known[1])
        digest = _hash(_pieces(path))
        self._known[str(path)] = [stamp, digest]
        self._is_changed = True
        return digest

    def save(self) -> None:
        if self._is_changed:
            save_facts(self._path, self._known)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece


def _hash(pieces: Iterable[bytes]) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
