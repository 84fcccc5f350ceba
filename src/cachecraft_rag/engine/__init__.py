"""The embedded engine: vLLM started inside the user's program, and what it answers.

Importing this loads neither vLLM nor torch: both come with the first start.
"""

from __future__ import annotations

from cachecraft_rag.engine.api import ChatEngine, Completion, CompletionDelta, Message, SamplingOptions
from cachecraft_rag.engine.calibration import Calibration, CalibrationPoint, CalibrationQuestion
from cachecraft_rag.engine.engine import CacheCraftEngine
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.registry import shared_engine
from cachecraft_rag.engine.self_test import SelfTestResult
from cachecraft_rag.engine.tools import StructuredOutput, Tool, ToolCall

__all__ = [
    "CacheCraftEngine",
    "Calibration",
    "CalibrationPoint",
    "CalibrationQuestion",
    "CallOptions",
    "ChatEngine",
    "Completion",
    "CompletionDelta",
    "Message",
    "SamplingOptions",
    "SelfTestResult",
    "StructuredOutput",
    "Tool",
    "ToolCall",
    "shared_engine",
]
