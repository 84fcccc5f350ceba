"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no fault of the code: examples are not timed. Without a parent of its own the
# profile inherits all else from the one that is in force, such as Hypothesis's "ci".
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
