"""Test doubles for code that calls an engine; they need neither vLLM nor a model."""

from __future__ import annotations

from cachecraft_rag.testing.answers import FakeAnswer, Reply
from cachecraft_rag.testing.fake_engine import FakeCall, FakeEngine, render_messages

__all__ = ["FakeAnswer", "FakeCall", "FakeEngine", "Reply", "render_messages"]
