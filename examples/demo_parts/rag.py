"""The pipelines: LlamaIndex query engines and a LangChain chain, all on one engine and one index."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode

from cachecraft_rag import langchain
from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, DenseRetriever
from demo_parts.data import Passage
from demo_parts.facts import Answer

TOP_K = 5
MAX_TOKENS = 24
STOP = ("\n",)
# Neither read from nor left in vLLM's own prefix cache or our store: every token is computed.
FULL_COMPUTE = {"reuse": "off", "store": False, "read_prefix_cache": False}

LLAMA_INDEX_PROMPT = PromptTemplate(
    "Answer the question with a few words from the passages.\n\n"
    "{context_str}\n\nQuestion: {query_str}\nShort answer:"
)
LANGCHAIN_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You read encyclopedia passages and answer with a few of their words."),
        ("human", "Passages:\n\n{context}\n\nNow answer briefly: {question}"),
    ]
)


def make_node(passage: Passage) -> TextNode:
    return TextNode(id_=passage.doc_id, text=passage.content)


def make_index(passages: Sequence[Passage]) -> DenseRetriever:
    """Embed the passages (all-MiniLM-L6-v2) and index them with FAISS."""
    return DenseRetriever([make_node(passage) for passage in passages], similarity_top_k=TOP_K)


class Pipeline:
    """A LlamaIndex query engine whose answers come with their reports.

    Args:
        options: options of every call to the engine, e.g. `FULL_COMPUTE`.
    """

    def __init__(self, engine: ChatEngine, index: BaseRetriever, **options: object) -> None:
        kwargs = {"stop": STOP, **options}
        self._llm = CacheCraftLLM(engine=engine, max_tokens=MAX_TOKENS, additional_kwargs=kwargs)
        self._query_engine = RetrieverQueryEngine.from_args(
            CacheCraftRetriever(index, llm=self._llm),
            llm=self._llm,
            text_qa_template=LLAMA_INDEX_PROMPT,
        )

    def ask(self, question: str) -> Answer:
        text = str(self._query_engine.query(question)).strip()
        report = self._llm.last_report
        assert report is not None  # there is one after every answer
        return Answer(text, report)


def make_chain(engine: ChatEngine, index: BaseRetriever) -> Runnable[str, AIMessage]:
    """The usual chain, retriever | prompt | model, over the same index."""
    llm = langchain.ChatCacheCraft(engine=engine, max_tokens=MAX_TOKENS, stop=list(STOP))
    retriever = langchain.CacheCraftRetriever(
        base_retriever=RunnableLambda(lambda query: _documents(index, query)), llm=llm
    )
    inputs = {"context": retriever | _join, "question": RunnablePassthrough()}
    return inputs | LANGCHAIN_PROMPT | llm


def answer_of(message: AIMessage) -> Answer:
    report = ReuseReport.from_dict(message.response_metadata["cachecraft"])
    return Answer(str(message.content).strip(), report)


def _documents(index: BaseRetriever, query: str) -> list[Document]:
    nodes = [scored.node for scored in index.retrieve(query)]
    return [
        Document(node.get_content(), metadata={"source": node.node_id, "version": node.hash})
        for node in nodes
    ]


def _join(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)
