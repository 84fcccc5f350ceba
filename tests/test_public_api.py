"""The names that other code may rely on."""

from __future__ import annotations

import re

import pytest

import cachecraft_rag

PROMISED = {"CacheCraftConfig", "CacheCraftEngine", "Chunk", "ReuseReport", "default_dtype", "default_model"}


def test_promised_names_are_exported() -> None:
    """Every name that the documentation promises is exported, and nothing else but the version."""
    assert set(cachecraft_rag.__all__) == PROMISED | {"__version__"}


def test_exports_are_sorted() -> None:
    """`__all__` is in alphabetical order, so that a diff shows one line per change."""
    assert cachecraft_rag.__all__ == sorted(cachecraft_rag.__all__)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_exported_name_resolves_to_itself(name: str) -> None:
    """A lazily loaded name gives the object of that name, and the same one each time."""
    value = getattr(cachecraft_rag, name)
    assert value.__name__ == name
    assert getattr(cachecraft_rag, name) is value


@pytest.mark.parametrize("name", cachecraft_rag.__all__)
def test_dir_lists_exported_names(name: str) -> None:
    """`dir()` shows names before they are loaded, for completion in a shell."""
    assert name in dir(cachecraft_rag)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is reported as Python does, with the name in the message."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cachecraft_rag.no_such_name


def test_version_is_a_release_number() -> None:
    """The version starts like one, whether the package is installed or only on the path."""
    assert re.match(r"\d+(\.\d+)*(\+\w+)?", cachecraft_rag.__version__)
