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
# # Updating and deleting documents
#
# KV is found by the tokens of a text, so a changed text never meets the KV of its old version.
# Telling the engine about changes does two more things: KV of old versions is dropped at once,
# everywhere, and a retriever that lags behind gets it no more. This notebook does it from an index's
# own methods.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path

from cachecraft_rag import default_dtype, default_model

ENGINE_ARGS = {"max_model_len": 4096, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
MODEL = {"model": default_model(), "engine_args": ENGINE_ARGS, "max_tokens": 16}
passages = [json.loads(line) for line in Path("../data/passages.jsonl").read_text().splitlines()][:8]
QUESTION = "Who won the game?"


def show(report):
    """One line a chunk: its document, what was done with it, and why."""
    for chunk in report.chunks:
        print(f"{chunk.doc_id}  {chunk.decision:<9} {chunk.reason}")


# %% [markdown]
# ## LlamaIndex: `follow` an index
#
# `follow(index, llm=llm)` listens to the index's own methods: what is inserted, updated, refreshed or
# deleted there is changed in the store as well, that document only.

# %%
from llama_index.core import Document, VectorStoreIndex

from cachecraft_rag.llama_index import CacheCraftLLM, DefaultEmbedding, follow

llm = CacheCraftLLM(**MODEL)
documents = [Document(text=p["text"], doc_id=p["doc_id"]) for p in passages]
index = VectorStoreIndex.from_documents(documents, embed_model=DefaultEmbedding())
follow(index, llm=llm)
print("passages in the store:", llm.warm(index))


def ask():
    """With a new query engine: one made before a change would not find what was changed."""
    index.as_query_engine(llm=llm, similarity_top_k=4).query(QUESTION)
    show(llm.last_report)


ask()

# %% [markdown]
# One of the documents gets a new text. The next question computes that one, and reuses the others.

# %%
changed_id = llm.last_report.chunks[-1].doc_id
old = next(document for document in documents if document.doc_id == changed_id)
new = Document(text=old.text + " This was corrected in November 2026.", doc_id=changed_id)
index.update_ref_doc(new)
ask()

# %% [markdown]
# A deleted document is gone from the index and from the store.

# %%
deleted_id = llm.last_report.chunks[0].doc_id
index.delete_ref_doc(deleted_id, delete_from_docstore=True)
ask()
print("is it still stored?", bool(llm.engine.invalidate(deleted_id)))

# %% [markdown]
# ## LangChain: the indexing API
#
# `cachecraft_rag.langchain.index` is LangChain's `index` with one more argument: what its clean-up
# deletes from the vector store is dropped from the KV store too.

# %%
from langchain_core.documents import Document as LangChainDocument
from langchain_core.indexing import InMemoryRecordManager
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag import langchain as cachecraft

chat_model = cachecraft.ChatCacheCraft(**MODEL)
store = InMemoryVectorStore(cachecraft.DefaultEmbeddings())
records = InMemoryRecordManager("notebook")
records.create_schema()
retriever = cachecraft.CacheCraftRetriever(
    base_retriever=store.as_retriever(search_kwargs={"k": 4}), llm=chat_model
)
chain = cachecraft.create_cachecraft_rag_chain(retriever, chat_model)


def index_again(texts):
    """Make `texts` (document id → text) the content of the vector store."""
    documents = [LangChainDocument(text, metadata={"source": doc_id}) for doc_id, text in texts.items()]
    return cachecraft.index(
        documents,
        records,
        store,
        llm=chat_model,
        cleanup="full",
        source_id_key="source",
        key_encoder="blake2b",
    )


texts = {passage["doc_id"]: passage["text"] for passage in passages}
print(index_again(texts))
chain.invoke({"input": QUESTION})
show(chat_model.last_report)

# %% [markdown]
# One document is changed, one is left out. The clean-up deletes two from the vector store and adds
# one; the others keep their KV.

# %%
removed_id, *_, changed_id = [chunk.doc_id for chunk in chat_model.last_report.chunks]
texts[changed_id] += " This was corrected in November 2026."
del texts[removed_id]
print(index_again(texts))
chain.invoke({"input": QUESTION})
show(chat_model.last_report)

# %%
llm.engine.close()
