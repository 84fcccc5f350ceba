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
# # Quick start with LangChain
#
# A chat model that runs in this process, and a retriever that tells it what the passages are. Each
# passage is computed once, and reused wherever it comes back.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path

from langchain_core.documents import Document

from cachecraft_rag import default_dtype, default_model
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft, create_cachecraft_rag_chain

lines = Path("../data/passages.jsonl").read_text().splitlines()
documents = [
    Document(passage["text"], metadata={"source": passage["doc_id"], "title": passage["title"]})
    for passage in map(json.loads, lines)
]

# %% [markdown]
# ## The chain
#
# `CacheCraftRetriever(base_retriever=your_retriever, llm=llm)` wraps any retriever;
# `create_cachecraft_rag_chain` puts each document into the prompt as a block of its own.

# %%
ENGINE_ARGS = {"max_model_len": 4096, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
llm = ChatCacheCraft(model=default_model(), engine_args=ENGINE_ARGS, max_tokens=24)
llm.chat_engine.start()  # or with the first question
retriever = CacheCraftRetriever.from_documents(documents, llm=llm, k=4)
chain = create_cachecraft_rag_chain(retriever, llm)

# %%
result = chain.invoke({"input": "How many points did the Panthers defense surrender?"})
print(result["answer"])
llm.last_report

# %% [markdown]
# The next question finds some of the passages again, in another order and beside others:

# %%
print(chain.invoke({"input": "Who led the Panthers in sacks, and how many did he have?"})["answer"])
llm.last_report

# %% [markdown]
# ## Plain LCEL works as well
#
# Chunks are found in the finished prompt by their text, so a chain of your own needs no change.

# %%
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

context = retriever | (lambda found: "\n\n".join(document.page_content for document in found))
prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
lcel = {"context": context, "question": RunnablePassthrough()} | prompt | llm

answer = lcel.invoke("Who lost to the Broncos in the divisional round?")
print(answer.content)
print(answer.usage_metadata)

# %% [markdown]
# `cache_read` counts the tokens whose KV was taken over, `cache_creation` those stored for later.
#
# ## Streaming, async and batches

# %%
for piece in lcel.stream("How old was Peyton Manning when he played in Super Bowl 50?"):
    print(piece.content, end="")
print()
questions = ["Who was the Broncos' quarterback?", "Which teams played in Super Bowl 50?"]
for message in await lcel.abatch(questions):
    print(message.content, "|", message.response_metadata["cachecraft"]["reason"])

# %% [markdown]
# ## Structured output
#
# Decoding is bound to the schema, so even the smallest model answers in the right form (what it puts
# into it is another matter).

# %%
from pydantic import BaseModel


class Score(BaseModel):
    """A number of points and the team that made them."""

    team: str
    points: int


passage = retriever.invoke("How many points did the Panthers defense surrender?")[0]
scores = llm.bind(max_tokens=64).with_structured_output(Score)
scores.invoke(f"{passage.page_content}\n\nWhich team surrendered how many points?")

# %%
llm.close()
