"""Answers that must keep a form."""

from __future__ import annotations

from cachecraft_rag.errors import EngineError


class AnswerFormError(EngineError, ValueError):
    """An answer has not the form that was asked for. A ValueError, because that is what LlamaIndex's
    synthesizers skip."""
