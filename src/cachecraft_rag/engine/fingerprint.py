"""What a model is, by its files: the KV of other weights must not be found, wherever they lie.

A path is no identity: weights are exchanged in place, and one model lies in many folders. So the files are
hashed, at the speed of the disk and once: digests are remembered with the file's size and time of change.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cachecraft_rag.models import cache_dir

logger = logging.getLogger(__name__)

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
    with _RememberedDigests(cache_dir() / "fingerprints.json") as digests:
        return _hash([json.dumps([[path.name, digests.of(path)] for path in files]).encode()])


def _folder_of(name: str, revision: str | None) -> Path | None:
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    return None


class _RememberedDigests:
    """Digests of files by path, size and time of change, in a file of the cache folder. Losing it costs
    time and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        self._is_changed = False

    def __enter__(self) -> _RememberedDigests:
        with suppress(OSError, ValueError):
            known = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_changed:
            return
        scratch = self._path.with_suffix(f".{os.getpid()}-{id(self)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(self._known), encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            logger.warning("digests of model files are not remembered: %s", error)

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
