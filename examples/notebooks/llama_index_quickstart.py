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
# # Quick start with LlamaIndex
#
# Two lines of an ordinary pipeline change: the model and the retriever. The model runs in this
# process; each passage is computed once, and reused wherever it comes back.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path

from llama_index.core import Document
from llama_index.core.query_engine import RetrieverQueryEngine

from cachecraft_rag import default_dtype, default_model
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever

lines = Path("../data/passages.jsonl").read_text().splitlines()
documents = [Document(text=passage["text"], doc_id=passage["doc_id"]) for passage in map(json.loads, lines)]

# %% [markdown]
# ## The pipeline
#
# `from_documents` splits, embeds and indexes; `CacheCraftRetriever(your_retriever, llm=llm)` wraps
# one that you have. `default_model()` is a small embedded model that needs no download; any vLLM
# model name or folder will do.

# %%
ENGINE_ARGS = {"max_model_len": 4096, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
llm = CacheCraftLLM(default_model(), engine_args=ENGINE_ARGS, max_tokens=24)
llm.engine.start()  # or with the first question
retriever = CacheCraftRetriever.from_documents(documents, llm=llm, similarity_top_k=4)
query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm)

# %%
print(query_engine.query("How many points did the Panthers defense surrender?"))
llm.last_report

# %% [markdown]
# The passages were new, so everything was computed. The next question finds some of them again, in
# another order and beside other passages:

# %%
print(query_engine.query("Who led the Panthers in sacks, and how many did he have?"))
llm.last_report

# %% [markdown]
# ## Filling the store ahead
#
# `warm` computes all passages before the first question. With `neighbours=True` each is computed
# behind passages like it, as it will stand later, so that less of it needs repair.

# %%
llm.warm([scored.node for scored in retriever.retrieve("Who lost to the Broncos in the divisional round?")])
print(query_engine.query("Who lost to the Broncos in the divisional round?"))
print(f"reused {llm.last_report.reuse_ratio:.0%}, first token after {llm.last_report.ttft_s:.2f} s")

# %% [markdown]
# ## Streaming, async and chat
#
# All of LlamaIndex's ways of asking work, and each answer carries its own report.

# %%
streaming = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
for token in streaming.query("How old was Peyton Manning when he played in Super Bowl 50?").response_gen:
    print(token, end="")
print()
print(await query_engine.aquery("Who was the Broncos' quarterback?"))

# %%
from llama_index.core.chat_engine import ContextChatEngine

chat = ContextChatEngine.from_defaults(retriever=retriever, llm=llm)
print(chat.chat("Which teams played in Super Bowl 50?"))
print(chat.chat("And who won?"))
print(llm.last_report.why)

# %% [markdown]
# ## The best setup: the synthesizer
#
# LlamaIndex's own synthesizers join all passages to one text, which is searched for them again, and
# cut passages where the window is too small. `CacheCraftSynthesizer` keeps each whole, and says which
# it had to leave out.

# %%
from cachecraft_rag.llama_index import CacheCraftSynthesizer

best = RetrieverQueryEngine(retriever, response_synthesizer=CacheCraftSynthesizer(llm=llm))
response = best.query("How many points did the Panthers defense surrender?")
print(response)
print(f"reused {llm.last_report.reuse_ratio:.0%}")

# %%
llm.close()
