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
# # Bring your own index and vector store
#
# The index stays what it is. cachecraft-rag needs to know the texts that were retrieved, and there
# are two ways: wrap the retriever, or wrap nothing and let the adapter listen to what the framework
# retrieves.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path

from cachecraft_rag import default_dtype, default_model

ENGINE_ARGS = {"max_model_len": 4096, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
MODEL = {"model": default_model(), "engine_args": ENGINE_ARGS, "max_tokens": 24}
passages = [json.loads(line) for line in Path("../data/passages.jsonl").read_text().splitlines()]

# %% [markdown]
# ## LlamaIndex: any index
#
# A `VectorStoreIndex` over any vector store; here the one in memory, with the embedded embedding
# model.

# %%
from llama_index.core import Document, VectorStoreIndex

from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever, DefaultEmbedding

llm = CacheCraftLLM(**MODEL)
index = VectorStoreIndex.from_documents(
    [Document(text=passage["text"], doc_id=passage["doc_id"]) for passage in passages],
    embed_model=DefaultEmbedding(),
)

# %% [markdown]
# **Wrapping nothing.** The index's own query engine; only the model is ours. The adapter hears from
# LlamaIndex which nodes go into the prompt.

# %%
query_engine = index.as_query_engine(llm=llm, similarity_top_k=4)
print(query_engine.query("What did Nikola Tesla study?"))
print(query_engine.query("Where did Nikola Tesla go to school?"))
print(f"reused {llm.last_report.reuse_ratio:.0%}: {llm.last_report.why}")

# %% [markdown]
# **Wrapping the retriever** says the same sooner: what is on disk or in Redis is read ahead while
# LlamaIndex is still building the prompt. It is also what to do where several models or tenants live
# in one process.

# %%
retriever = CacheCraftRetriever.from_index(index, llm=llm, similarity_top_k=4)
[(found.node.ref_doc_id, round(found.score, 2)) for found in retriever.retrieve("What is oxygen?")]

# %% [markdown]
# **Metadata** that the model is shown is part of the chunk. Show it what helps the answer, and hide
# what changes:

# %%
from llama_index.core.schema import MetadataMode, TextNode

node = TextNode(
    text="The bridge is open from six until ten.",
    metadata={"title": "Opening hours", "indexed_at": "2026-11-30T08:00:00"},
    excluded_llm_metadata_keys=["indexed_at"],
)
print(node.get_content(MetadataMode.LLM))

# %% [markdown]
# ## LangChain: any vector store
#
# The same model and engine: models with equal settings share one in a process. `InMemoryVectorStore`
# stands for any other store.

# %%
from langchain_core.documents import Document as LangChainDocument
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag import langchain as cachecraft_langchain

store = InMemoryVectorStore(cachecraft_langchain.DefaultEmbeddings())
store.add_documents(
    [LangChainDocument(passage["text"], id=passage["doc_id"]) for passage in passages],
)
chat_model = cachecraft_langchain.ChatCacheCraft(**MODEL)
retriever = cachecraft_langchain.CacheCraftRetriever(
    base_retriever=store.as_retriever(search_kwargs={"k": 4}), llm=chat_model
)
chain = cachecraft_langchain.create_cachecraft_rag_chain(retriever, chat_model)
print(chain.invoke({"input": "What did Nikola Tesla study?"})["answer"])
print("one engine:", chat_model.chat_engine is llm.engine)
print(f"reused {chat_model.last_report.reuse_ratio:.0%} of what LlamaIndex had cached")

# %%
llm.engine.close()
