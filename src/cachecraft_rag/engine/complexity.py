"""How hard is a question? An estimate from its wording.

`docs/router.md` says how the weights were found and how good the estimate is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from cachecraft_rag.engine.api import Message

_RELATION = r"that|which|who|whose|whom|where|when"
_MONTHS = (
    r"january|february|march|april|june|july|august|september|october|november|december"
    r"|jan|feb|apr|jun|jul|aug|sept?|oct|nov|dec"
)
_MIN_QUESTION_WORDS = 3
_MAX_CHARACTERS = 4_000
_CAPITALISED = r"[A-Z][\w'\u2019.-]*"

# Each hit of a pattern counts one. Chinese has no spaces and no capitals: its cues are characters.
_CUES: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "words": re.compile(
            r"[^\W\d_\u4e00-\u9fff]+(?:['\u2019-][^\W\d_\u4e00-\u9fff]+)*|[\u4e00-\u9fff]{1,2}"
        ),
        "wh_words": re.compile(
            r"\b(?:what|which|who|whom|whose|when|where|why|how)\b|什么|哪|谁|何|几|多少|怎|为啥",
            re.IGNORECASE,
        ),
        "hops": re.compile(
            rf"(?<=\w[ ,])(?:{_RELATION})\b|(?<=, )(?:{_RELATION})\b|\bof\b|\w['\u2019]s\b"
            r"|\b(?:\w{3,}ed|written|known|given|taken|born|held|made|built) (?:by|in|for|on|at|as|from)\b"
            r"|的",
            re.IGNORECASE,
        ),
        "comparisons": re.compile(
            r"\b(?:than|both|same|either|neither|or|versus|vs|compared?|differ\w*|between|common|more|less|fewer"
            r"|most|least|first|last|earlier|later|older|younger|bigger|larger|smaller|higher|lower|longer"
            r"|shorter|better|worse|earliest|latest|oldest|youngest|biggest|largest|smallest|highest|lowest"
            r"|longest|shortest|best|worst)\b|比|更|最|相同|一样|不同|区别|还是|都",
            re.IGNORECASE,
        ),
        "aggregations": re.compile(
            r"\b(?:how (?:many|much|often)|all|each|every|list|total|average|sum|count|number of|altogether"
            r"|combined|percent(?:age)?)\b|多少|几|所有|全部|总|一共|平均|列出|哪些",
            re.IGNORECASE,
        ),
        "negations": re.compile(
            r"\b(?:not|no|never|none|nor|without|except|cannot|fail(?:ed|s)?|other than)\b|n['\u2019]t\b"
            r"|不(?!同)|没|无|非|未|除了",
            re.IGNORECASE,
        ),
        "numbers": re.compile(rf"\d+(?:[.,:]\d+)*|\b(?:{_MONTHS})\b", re.IGNORECASE),
        # A capital behind another word: the first word of a sentence says nothing.
        "names": re.compile(
            rf"(?<=[\w,'\u2019\"(] ){_CAPITALISED}(?: (?:(?:of|the|de|and|for|in) )?{_CAPITALISED})*"
            r"|《[^》]+》|“[^”]+”"
        ),
    }
)

FEATURES = (*_CUES, "chunks", "prompt_tokens")
"""Names of all features, in the order in which the benchmark prints their weights."""

INTERCEPT = -9.245
WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "words": 2.722,
        "wh_words": 0.565,
        "hops": 1.215,
        "comparisons": 1.255,
        "aggregations": -1.594,
        "negations": 0.868,
        "numbers": -0.047,
        "names": 2.048,
    }
)
"""As `python -m benchmarks.quality_complexity --label hops` printed them; a feature without a weight
does not count. What they tell is whether a question needs several passages."""


def features(question: str, num_chunks: int, num_prompt_tokens: int) -> dict[str, float]:
    """What the estimate is made from: ln(1 + count) for each of `FEATURES`.

    Args:
        question: its text alone; English and Chinese cues are known. The last `_MAX_CHARACTERS` count.
    """
    text = question[-_MAX_CHARACTERS:]
    counts = {name: len(pattern.findall(text)) for name, pattern in _CUES.items()}
    counts |= {"chunks": num_chunks, "prompt_tokens": num_prompt_tokens}
    return {name: math.log1p(count) for name, count in counts.items()}


def predict(values: Mapping[str, float]) -> float:
    """The estimate in [0, 1]: logistic in `values`, which has all of `FEATURES`."""
    score = INTERCEPT + sum(weight * values[name] for name, weight in WEIGHTS.items())
    return 1.0 / (1.0 + math.exp(-score))


def question_of(prompt: str | Sequence[Message], chunk_texts: Iterable[str]) -> str:
    """The question in a prompt: of chat messages the last of the user's, without its chunks.

    It is the text behind the last chunk; where that has neither a question mark nor three words
    ("Answer:"), the text before the first one. What stands between chunks is template.
    """
    text = prompt if isinstance(prompt, str) else _last_user_text(prompt)
    spans = [(start, start + len(chunk)) for chunk in chunk_texts if (start := text.rfind(chunk)) >= 0]
    if not spans:
        return text.strip()
    behind = text[max(end for _, end in spans) :].strip()
    if re.search(r"[?\uff1f]", behind) or len(_CUES["words"].findall(behind)) >= _MIN_QUESTION_WORDS:
        return behind
    return text[: min(start for start, _ in spans)].strip()


def _last_user_text(messages: Sequence[Message]) -> str:
    users = [message["content"] for message in messages if message["role"] == "user"]
    content = users[-1] if users else ""
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)
