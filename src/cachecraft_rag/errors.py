"""The exception tree. Everything this package raises on purpose derives from `CacheCraftError`.

    CacheCraftError
    ├── ConfigurationError         (ValueError)    a setting breaks a rule
    ├── InvalidRequestError        (ValueError)    one call's arguments break a rule
    │   └── PromptTooLongError                     the prompt does not fit the model's window
    ├── MissingDependencyError     (ImportError)   an extra is not installed
    ├── UnsupportedVersionError    (RuntimeError)  vLLM is outside the supported range
    ├── EngineError                (RuntimeError)  the engine could not do what it was asked
    │   ├── EngineStartError                       it did not start
    │   ├── EngineClosedError                      it was closed
    │   ├── GenerationError                        vLLM failed the request, with reuse off as well
    │   └── AnswerFormError        (ValueError)    an answer has not the form that was asked for
    └── InternalError              (RuntimeError)  a broken invariant; never reaches a user
        ├── PlanError                              a plan does not cover its prompt exactly once
        └── StoreError                             the store's books do not add up
            ├── RecordDamagedError                 a stored record is not what it should be
            ├── TierError                          disk or Redis failed
            └── JournalError                       the journal of document changes failed

A fault in the cache is never the user's error: the connector turns every `InternalError` into a
full compute with a reason in the report.
"""

from __future__ import annotations


class CacheCraftError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(CacheCraftError, ValueError):
    """A setting breaks a rule; the message names the setting, its value and the rule."""


class InvalidRequestError(CacheCraftError, ValueError):
    """An argument of one call breaks a rule; raised before any work is done."""


class PromptTooLongError(InvalidRequestError):
    """The prompt and the requested output do not fit the model's context window."""


class MissingDependencyError(CacheCraftError, ImportError):
    """An optional dependency is missing; the message holds the command that installs it."""


class UnsupportedVersionError(CacheCraftError, RuntimeError):
    """The installed vLLM is outside the range this release was tested with."""


class EngineError(CacheCraftError, RuntimeError):
    """The engine could not do what it was asked."""


class EngineStartError(EngineError):
    """vLLM did not start; the cause is chained."""


class EngineClosedError(EngineError):
    """The engine was closed before or during the call."""


class GenerationError(EngineError):
    """vLLM failed the request, and failed it again with reuse off."""


class AnswerFormError(EngineError, ValueError):
    """An answer has not the form that was asked for, mostly because `max_tokens` cut it. A ValueError too,
    because that is what LlamaIndex's synthesizers skip."""


class InternalError(CacheCraftError, RuntimeError):
    """A broken invariant of this package. Caught by the connector, never shown to a user."""


class PlanError(InternalError):
    """A plan does not cover every prompt token exactly once."""


class StoreError(InternalError):
    """The store's books do not add up."""
