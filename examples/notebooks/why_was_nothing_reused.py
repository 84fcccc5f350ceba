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
# # Why was nothing reused?
#
# Every answer carries a report that says what was reused and, if nothing was, why. This notebook
# brings about the usual causes one by one, and shows what to do about each.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
import textwrap
from pathlib import Path

from cachecraft_rag import CacheCraftEngine, Chunk, default_dtype, default_model

passages = [json.loads(line) for line in Path("../data/passages.jsonl").read_text().splitlines()]
chunks = [Chunk(passage["text"], doc_id=passage["doc_id"], version="1") for passage in passages[:4]]
engine = CacheCraftEngine(default_model(), max_model_len=2048, dtype=default_dtype())
engine.start()  # or with the first question


def ask(texts, question="Who is named in the text?", **options):
    """Ask with the texts in front of the question; the report is what this notebook is about."""
    prompt = "\n\n".join([*texts, question])
    return engine.chat([{"role": "user", "content": prompt}], max_tokens=16, **options).report


# %% [markdown]
# ## The first time there is nothing to reuse
#
# The passages are computed, and their KV is stored for next time.

# %%
ask([chunk.text for chunk in chunks], chunks=chunks)

# %% [markdown]
# ## The second time there is
#
# The same passages in another order, behind another question. Most of their KV was moved and a small
# share computed again, because the neighbours are new.

# %%
ask([chunk.text for chunk in reversed(chunks)], "Which years are named?", chunks=chunks)

# %% [markdown]
# From here on, the same passages are asked about in ways that keep their KV from being found.
#
# ## The engine was not told what the chunks are
#
# KV is found by a chunk's text, and the engine looks for the texts that it knows. It knows those that
# were passed as `chunks=`, given to `prefetch` or `warm`, or found by a `CacheCraftRetriever`. A text
# that it never saw is a part of the prompt like any other. **What to do:** use the retriever or pass
# `chunks=`.

# %%
unknown = [passage["text"] for passage in passages[10:13]]
ask(unknown)

# %% [markdown]
# ## The prompt holds another text than the chunk
#
# Here a template breaks the passages into lines, so none of them stands in the prompt as it was
# passed. Putting LangChain's documents right into a template does the same: it prints Python objects,
# with quotes and line ends escaped. **What to do:** join the texts themselves.

# %%
wrapped = [textwrap.fill(chunk.text, 80) for chunk in chunks]
ask(wrapped, chunks=chunks)

# %% [markdown]
# ## The text changes with every request
#
# Metadata that the model is shown belongs to the chunk's text. A date of access, a score or a rank in
# it makes it another text each time. **What to do:** show the model only what it needs; in
# LlamaIndex, put the others into `excluded_llm_metadata_keys`.

# %%
ranked = [Chunk(f"rank: {rank}\n\n{chunk.text}") for rank, chunk in enumerate(reversed(chunks), 1)]
ask([chunk.text for chunk in ranked], chunks=ranked)

# %% [markdown]
# ## The chunks are too short
#
# Below `min_chunk_tokens` of the configuration, finding KV costs more than computing it.

# %%
short = [Chunk("Blue Deep."), Chunk("Red Hill.")]
ask([chunk.text for chunk in short], chunks=short)
ask([chunk.text for chunk in reversed(short)], chunks=short)

# %% [markdown]
# ## Another tenant asks
#
# Tenants share nothing, even if their texts are the same. **What to do:** nothing; or mark documents
# that everybody may see with `is_shared=True` and `warm` them.

# %%
ask([chunk.text for chunk in chunks], chunks=chunks, tenant="another")

# %% [markdown]
# ## The document has a newer version
#
# A retriever that lags behind still hands out the old text. It is computed in full and not stored.

# %%
newer = Chunk(chunks[0].text + " (Corrected in 2026.)", doc_id=chunks[0].doc_id, version="2")
print("records dropped:", engine.replace(newer.doc_id, "2", [newer]))
ask([chunk.text for chunk in chunks[:1]], chunks=chunks[:1])

# %% [markdown]
# ## The request asked for it
#
# `reuse="off"` computes everything; `reuse="exact"` takes only KV that changes nothing.

# %%
ask([chunk.text for chunk in chunks[1:]], "What is it about?", chunks=chunks, reuse="off")

# %%
ask([chunk.text for chunk in (chunks[3], chunks[1])], "What is it about?", chunks=chunks, reuse="exact")

# %% [markdown]
# ## The model does not allow it
#
# Models whose KV cannot be moved (multimodal ones, latent attention, layers that share KV) are
# answered in full, with the reason `unsupported_model` and a detail. At its first start with a model
# the engine also measures whether reuse is right on it. `engine.self_test()` measures again:

# %%
engine.self_test()

# %%
engine.close()
