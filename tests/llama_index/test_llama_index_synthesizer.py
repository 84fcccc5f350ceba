"""CacheCraftSynthesizer: whole passages in one prompt, told to the engine as chunks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from llama_index.core import PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.events import ChunkDecision, ReuseReport
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, CacheCraftSynthesizer
from cachecraft_rag.testing import FakeEngine

ANSWER = "Goethe wrote it"
QUESTION = "Who wrote Faust?"


def scored(nodes: list[TextNode], *scores: float | None) -> list[NodeWithScore]:
    given = scores or [0.5] * len(nodes)
    return [NodeWithScore(node=node, score=score) for node, score in zip(nodes, given, strict=True)]


async def ask(
    synthesizer: CacheCraftSynthesizer, nodes: list[NodeWithScore], is_async: bool, question: str = QUESTION
) -> tuple[str, Any]:
    """The answer, read to its end, and the response."""
    if is_async:
        response: Any = await synthesizer.asynthesize(question, nodes)
    else:
        response = synthesizer.synthesize(question, nodes)
    if hasattr(response, "response_gen"):
        if is_async:
            return "".join([piece async for piece in response.async_response_gen()]), response
        return "".join(response.response_gen), response
    return str(response), response


def told(engine: FakeEngine) -> list[str]:
    return [chunk.text for chunk in engine.last_call.chunks]


every_way = [
    pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"]),
    pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"]),
]


def in_every_way(test: Any) -> Any:
    for mark in every_way:
        test = mark(test)
    return test


@in_every_way
async def test_passages_stand_whole_and_are_told(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode], streaming: bool, is_async: bool
) -> None:
    """Each passage is in the prompt word for word, in order, and is passed to the engine as a chunk."""
    synthesizer = CacheCraftSynthesizer(llm, streaming=streaming)
    answer, response = await ask(synthesizer, scored(nodes), is_async)
    assert answer == ANSWER
    shown = [node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes]
    assert told(engine) == shown
    assert "\n\n".join(shown) in engine.last_call.prompt
    assert [chunk.doc_id for chunk in engine.last_call.chunks] == ["doc-faust", "doc-faust", "oslo"]
    assert response.metadata["faust-1"] == nodes[0].metadata
    account = response.metadata["cachecraft"]
    assert account["dropped"] == []
    report = ReuseReport.from_dict(account["report"])
    assert [chunk.decision for chunk in report.chunks] == [ChunkDecision.COMPUTED] * 3


def test_question_stands_last_so_that_prefixes_stay(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """Another question about the same passages reuses all of them exactly."""
    synthesizer = CacheCraftSynthesizer(llm)
    synthesizer.synthesize(QUESTION, scored(nodes))
    response = synthesizer.synthesize("What is in Norway?", scored(nodes))
    report = ReuseReport.from_dict(response.metadata["cachecraft"]["report"])
    assert [chunk.decision for chunk in report.chunks] == [ChunkDecision.EXACT] * 3


def test_prompt_is_that_of_compact(llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]) -> None:
    """Both modes write the same prompt while all fits, so that they share what is cached."""
    CompactAndRefine(llm=llm).synthesize(QUESTION, scored(nodes))
    compact = engine.last_call.prompt
    CacheCraftSynthesizer(llm).synthesize(QUESTION, scored(nodes))
    assert engine.last_call.prompt == compact


@in_every_way
async def test_nothing_retrieved_asks_nothing(
    llm: CacheCraftLLM, engine: FakeEngine, streaming: bool, is_async: bool
) -> None:
    """Without nodes, and with blank ones only, the answer is LlamaIndex's empty one."""
    synthesizer = CacheCraftSynthesizer(llm, streaming=streaming)
    for nodes in ([], scored([TextNode(text=" \n")])):
        answer, _ = await ask(synthesizer, nodes, is_async)
        assert answer == "Empty Response"
    assert not [call for call in engine.calls if "chat" in call.method]


def words(prefix: str, number: int) -> str:
    return " ".join(f"{prefix}{index}" for index in range(number))


@in_every_way
async def test_passages_with_the_lowest_scores_are_left_out(
    streaming: bool, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit the window is named, none is cut, and the others keep their order."""
    engine = FakeEngine(ANSWER, max_model_len=400)
    llm = CacheCraftLLM(engine=engine, max_tokens=16)
    texts = [words("low", 80), words("high", 80), words("middle", 80)]
    nodes = [TextNode(id_=text[:3], text=text) for text in texts]
    synthesizer = CacheCraftSynthesizer(llm, streaming=streaming)
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag"):
        answer, response = await ask(synthesizer, scored(nodes, 0.1, 0.9, 0.5), is_async)
    assert answer == ANSWER
    assert response.metadata["cachecraft"]["dropped"] == ["low"]
    assert told(engine) == texts[1:]
    assert "\n\n".join(texts[1:]) in engine.last_call.prompt
    assert "low0" not in engine.last_call.prompt
    assert [record.getMessage().endswith("left out: low") for record in caplog.records] == [True]


def test_passages_without_score_are_left_out_from_the_end() -> None:
    """Without scores the retriever's order counts."""
    engine = FakeEngine(ANSWER, max_model_len=400)
    nodes = [TextNode(id_=name, text=words(name, 80)) for name in ("a", "b", "c")]
    response = CacheCraftSynthesizer(CacheCraftLLM(engine=engine, max_tokens=16)).synthesize(
        QUESTION, scored(nodes, None, None, None)
    )
    assert response.metadata["cachecraft"]["dropped"] == ["c"]


def test_one_long_passage_does_not_push_out_the_others() -> None:
    """A passage that cannot fit is left out, whatever its score, and the others are answered from."""
    engine = FakeEngine(ANSWER, max_model_len=400)
    nodes = [TextNode(id_=name, text=words(name, size)) for name, size in (("long", 900), ("short", 80))]
    response = CacheCraftSynthesizer(CacheCraftLLM(engine=engine, max_tokens=16)).synthesize(
        QUESTION, scored(nodes, 0.9, 0.1)
    )
    assert response.metadata["cachecraft"]["dropped"] == ["long"]
    assert told(engine) == [nodes[1].text]


def test_no_passage_fits_is_an_error() -> None:
    """An answer from none of the passages would look like one from them."""
    llm = CacheCraftLLM(engine=FakeEngine(max_model_len=400), max_tokens=16)
    with pytest.raises(PromptTooLongError, match="none of 1 passages fits"):
        CacheCraftSynthesizer(llm).synthesize(QUESTION, scored([TextNode(text=words("x", 900))]))


@in_every_way
async def test_works_with_any_other_model(nodes: list[TextNode], streaming: bool, is_async: bool) -> None:
    """A model of another make gets the same prompt and no chunks."""
    synthesizer = CacheCraftSynthesizer(MockLLM(), streaming=streaming)
    answer, response = await ask(synthesizer, scored(nodes), is_async)
    assert "title: Faust\n\n  Faust is a tragedy by Goethe.\n\nMephisto" in answer
    assert response.metadata["cachecraft"] == {"dropped": []}


def test_default_model_is_llama_indexs(
    llm: CacheCraftLLM, nodes: list[TextNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model the one of LlamaIndex's settings answers."""
    monkeypatch.setattr(Settings, "_llm", llm)
    assert str(CacheCraftSynthesizer().synthesize(QUESTION, scored(nodes))) == ANSWER


def test_template_can_be_given_and_changed(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode]
) -> None:
    """The prompt is the caller's own, with further variables, and can be exchanged later."""
    first = PromptTemplate("In {language}: <{context_str}> {query_str}")
    synthesizer = CacheCraftSynthesizer(llm, text_qa_template=first)
    assert synthesizer.get_prompts()["text_qa_template"] == first
    synthesizer.synthesize(QUESTION, scored(nodes[2:]), language="Latin")
    assert engine.last_call.prompt == f"user: In Latin: <{nodes[2].text}> {QUESTION}"
    synthesizer.update_prompts({"text_qa_template": PromptTemplate("{context_str}|{query_str}")})
    synthesizer.synthesize(QUESTION, scored(nodes[2:]))
    assert engine.last_call.prompt == f"user: {nodes[2].text}|{QUESTION}"


def test_system_prompt_of_the_model_stands_first(engine: FakeEngine, nodes: list[TextNode]) -> None:
    """A system prompt set on the model is kept, as by LlamaIndex's own synthesizers."""
    llm = CacheCraftLLM(engine=engine, system_prompt="Be brief.")
    CacheCraftSynthesizer(llm).synthesize(QUESTION, scored(nodes))
    assert engine.last_call.prompt.startswith("system: Be brief.\n")


async def test_texts_alone_are_answered_from(llm: CacheCraftLLM, engine: FakeEngine) -> None:
    """`get_response` with texts and no nodes, the way of callers without a retriever."""
    synthesizer = CacheCraftSynthesizer(llm)
    assert synthesizer.get_response(QUESTION, [" one ", "", "two"]) == ANSWER
    assert await synthesizer.aget_response(QUESTION, ["one", "two"]) == ANSWER
    assert told(engine) == ["one", "two"]


def test_public_passages_stay_public(
    llm: CacheCraftLLM, engine: FakeEngine, nodes: list[TextNode], embed_model: BaseEmbedding
) -> None:
    """What a retriever hands out as public is passed on as public, and nothing else is."""
    base = VectorStoreIndex(nodes[:2], embed_model=embed_model).as_retriever()
    retriever = CacheCraftRetriever(base, llm=llm, is_shared=True)
    RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=CacheCraftSynthesizer(llm)).query(
        QUESTION
    )
    assert [chunk.is_shared for chunk in engine.last_call.chunks] == [True, True]
    CacheCraftSynthesizer(llm).synthesize(QUESTION, scored(nodes))
    assert [chunk.is_shared for chunk in engine.last_call.chunks] == [True, True, False]
