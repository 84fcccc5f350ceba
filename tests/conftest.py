"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is no fault of the code: examples are not timed. Without a parent of its own the
# profile inherits all else from the one that is in force, such as Hypothesis's "ci".
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def one_faiss_thread() -> Iterator[None]:
    """For tests with many small searches: on a busy machine faiss's threads wait for each other in each."""
    faiss = pytest.importorskip("faiss")
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(num_threads)
