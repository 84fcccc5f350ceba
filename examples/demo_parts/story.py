"""The demo from its first line to its exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llama_index.core.base.base_retriever import BaseRetriever
from rich.progress import Progress

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_dtype, default_model
from demo_parts import facts, rag, update
from demo_parts.data import Passage, Question, in_turns, load
from demo_parts.facts import Asked
from demo_parts.rag import Pipeline
from demo_parts.view import View, make_console

NUM_TOPICS = 5
NUM_LANGCHAIN_QUESTIONS = 3
MAX_MODEL_LEN = 4096
WARM_UP_TENANT = "warm-up"

INTRODUCTION = """\
Each question goes to a small model together with the 5 passages that a retriever found for it.
Most of the time to the first token (TTFT) is spent on computing the KV cache of these passages.
A prefix cache saves that only while a prompt begins like an earlier one; here passages come back
in another order, behind other ones. cachecraft-rag moves their KV to the new place and recomputes
a part of it to repair it.

The questions are about 5 topics, asked in turn: such is RAG traffic, popular passages come back.
The first 5 questions fill the store. Each prompt is also computed in full, without any cache, to
compare. The model has 135 M parameters, so its answers are weak: compare them with those of full
compute too, not only with the gold ones."""


def tell() -> int:
    """Run all of it; 0 if it showed what it should, else 1."""
    started_s = time.perf_counter()
    view = View(make_console())
    view.title("cachecraft-rag: chunk-level KV reuse for RAG")
    view.line(INTRODUCTION)
    view.line()
    passages, questions = load()
    with step(view, f"Index {len(passages)} passages: all-MiniLM-L6-v2, FAISS"):
        index = rag.make_index(passages)
    with make_engine() as engine:
        start(view, engine, passages)
        reuse, full = Pipeline(engine, index), Pipeline(engine, index, **rag.FULL_COMPUTE)
        asked = ask_all(view, reuse, full, in_turns(questions, NUM_TOPICS))
        ask_langchain(view, engine, index, [one.question for one in asked[-NUM_LANGCHAIN_QUESTIONS:]])
        faults = change_document(view, engine, reuse, passages, questions)
    return judge(view, asked, faults, time.perf_counter() - started_s)


def make_engine() -> CacheCraftEngine:
    return CacheCraftEngine(
        default_model(),
        config=CacheCraftConfig(preset="balanced"),
        dtype=default_dtype(),
        max_model_len=MAX_MODEL_LEN,
        use_tqdm_on_load=False,
    )


def start(view: View, engine: CacheCraftEngine, passages: Sequence[Passage]) -> None:
    with step(view, "Start vLLM with SmolLM2-135M-Instruct, preset balanced; it may print warnings"):
        engine.start()
    with step(view, "Warm up, so that the costs of a first request are not measured"):
        warm_up(engine, passages[: rag.TOP_K])


def warm_up(engine: CacheCraftEngine, passages: Sequence[Passage]) -> None:
    """Compute, store and move once, for a tenant of its own: nothing of it can be reused later."""
    texts = [passage.content for passage in passages]
    for ordered in (texts, texts[::-1]):
        engine.complete(
            "\n\n".join(ordered),
            chunks=[Chunk(text) for text in ordered],
            tenant=WARM_UP_TENANT,
            max_tokens=2,
        )
    engine.purge(WARM_UP_TENANT)


def ask_all(view: View, reuse: Pipeline, full: Pipeline, questions: Sequence[Question]) -> list[Asked]:
    view.title(f"1. {len(questions)} questions through a LlamaIndex query engine")
    view.legend()
    asked: list[Asked] = []
    with Progress(console=view.console, disable=not view.console.is_terminal, transient=True) as progress:
        for question in progress.track(questions, description="Asking"):
            asked.append(Asked(question, reuse.ask(question.text), full.ask(question.text)))
            view.asked(f"{len(asked)}/{len(questions)}", asked[-1])
    view.title("All questions")
    view.table(asked)
    return asked


def ask_langchain(
    view: View, engine: CacheCraftEngine, index: BaseRetriever, questions: Sequence[Question]
) -> None:
    view.title("2. The same index through a LangChain chain")
    view.line("Another framework, another prompt around the passages: the KV from part 1 is moved again.")
    chain = rag.make_chain(engine, index)
    for number, question in enumerate(questions, start=1):
        answer = rag.answer_of(chain.invoke(question.text))
        view.question(f"{number}/{len(questions)}", question)
        view.answered(answer)


def change_document(
    view: View,
    engine: CacheCraftEngine,
    pipeline: Pipeline,
    passages: Sequence[Passage],
    questions: Sequence[Question],
) -> list[str]:
    """The faults of the update, in words; empty if there are none."""
    view.title("3. A document changes")
    question = next(question for question in questions if question.text == update.QUESTION)
    return update.run(engine, pipeline, passages, question, view).faults()


def judge(view: View, asked: Sequence[Asked], faults: Sequence[str], elapsed_s: float) -> int:
    view.title("Totals")
    view.totals(asked)
    view.line(f"{'Time of the whole demo':<40} {elapsed_s:.0f} s")
    share = facts.count_tokens(one.reuse.report for one in facts.after_first(asked)).moved_share
    has_moved = share >= facts.MIN_MOVED_SHARE
    view.line()
    view.verdict(
        has_moved,
        f"after question {facts.NUM_FIRST}, {share:.1%} of passage tokens were reused behind other "
        f"predecessors (at least {facts.MIN_MOVED_SHARE:.0%})",
    )
    view.verdict(not faults, f"the changed document: {'; '.join(faults) or 'its old KV is gone'}")
    return 0 if has_moved and not faults else 1


@contextmanager
def step(view: View, text: str) -> Iterator[None]:
    """Say what is done now, and then how long it took."""
    view.line(f"{text} ...")
    started_s = time.perf_counter()
    yield
    view.line(f"  done in {time.perf_counter() - started_s:.1f} s", "dim")
