# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # An agent with a retrieval tool
#
# An agent decides when to search, and what it finds comes back as a tool's result. The passages in it
# are chunks like any other: the second time one is found, its KV is reused, even though it stands in
# a conversation now.
#
# The embedded model is far too small to decide for itself when to call a tool. So the first turn of
# each agent is told to (`tool_choice`), which binds decoding to a valid call, and the query is kept
# short, as a model this small does not know when to stop. With a larger model leave both out.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path
from typing import Annotated

from cachecraft_rag import default_dtype, default_model

ENGINE_ARGS = {"max_model_len": 4096, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
MODEL = {"model": default_model(), "engine_args": ENGINE_ARGS, "max_tokens": 64}
passages = [json.loads(line) for line in Path("../data/passages.jsonl").read_text().splitlines()]
QUESTIONS = [
    "How many points did the Panthers defense surrender?",
    "Who led the Panthers in sacks?",
]


def show(report):
    """What was reused, in a line, and what became of each passage."""
    print(f"reused {report.reuse_ratio:.0%} of {report.num_prompt_tokens} tokens: {report.why}")
    for chunk in report.chunks:
        print(f"   {chunk.doc_id}  {chunk.decision:<9} {chunk.reason}")


# %% [markdown]
# ## LangChain
#
# The tool hands out documents as its artifact, and their texts as its content. `CacheCraftMiddleware`
# tells the engine about them.

# %%
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from pydantic import Field

from cachecraft_rag.langchain import CacheCraftMiddleware, ChatCacheCraft, DenseRetriever

search_index = DenseRetriever.from_documents(
    [Document(passage["text"], metadata={"source": passage["doc_id"]}) for passage in passages], k=3
)


@tool(response_format="content_and_artifact")
def search(query: Annotated[str, Field(max_length=40)]):
    """Search an encyclopedia."""
    found = search_index.invoke(query)
    return "\n\n".join(document.page_content for document in found), found


@wrap_model_call
def search_first(request, handler):
    """The first turn of a question calls the tool, the next one answers."""
    has_searched = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if has_searched else "search"))


chat_model = ChatCacheCraft(**MODEL)
agent = create_agent(chat_model, [search], middleware=[CacheCraftMiddleware(), search_first])

for question in QUESTIONS:
    messages = agent.invoke({"messages": [("user", question)]})["messages"]
    print(question)
    print("  searched for:", messages[1].tool_calls[0]["args"])
    print("  answer:", messages[-1].content)
    show(chat_model.last_report)

# %% [markdown]
# ## LlamaIndex
#
# The same engine behind LlamaIndex's model. `predict_and_call` with `tool_required=True` is the
# forced first turn; `FunctionAgent` does both turns by itself with a model that can.

# %%
from llama_index.core.schema import TextNode
from llama_index.core.tools import RetrieverTool, ToolMetadata
from pydantic import BaseModel

from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever
from cachecraft_rag.llama_index import DenseRetriever as NodeRetriever

llm = CacheCraftLLM(**MODEL)
nodes = [TextNode(id_=passage["doc_id"], text=passage["text"]) for passage in passages]
retriever = CacheCraftRetriever(NodeRetriever(nodes, similarity_top_k=3), llm=llm)


class Query(BaseModel):
    input: str = Field(max_length=40)


about = ToolMetadata(name="search", description="Search an encyclopedia.", fn_schema=Query)
search_tool = RetrieverTool(retriever, metadata=about)

for question in QUESTIONS:
    called = llm.chat_with_tools([search_tool], user_msg=question, tool_required=True)
    [selection] = llm.get_tool_calls_from_response(called)
    result = search_tool(question)
    print(question)
    print("  searched for:", selection.tool_kwargs)
    print("  answer:", llm.complete(f"{result.content}\n\n{question}"))
    show(llm.last_report)

# %%
llm.engine.close()
