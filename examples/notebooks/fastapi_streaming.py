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
# # Streaming and async in a FastAPI app
#
# One engine for the whole app: started with it, closed with it, shared by all requests. Answers are
# streamed as they are generated, many at a time, and the app's event loop is never blocked: a health
# check is answered in between.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from cachecraft_rag import default_dtype, default_model
from cachecraft_rag.langchain import CacheCraftRetriever, ChatCacheCraft

lines = Path("../data/passages.jsonl").read_text().splitlines()
texts = [json.loads(line)["text"] for line in lines]

# %% [markdown]
# ## The app
#
# The model and the retriever are LangChain's; with LlamaIndex it looks the same. `astream` ends with
# a chunk that carries the token counts and the report, which the app sends as its last line.

# %%
ENGINE_ARGS = {"max_model_len": 2048, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
llm = ChatCacheCraft(model=default_model(), engine_args=ENGINE_ARGS, max_tokens=24)
retriever = CacheCraftRetriever.from_texts(texts, llm=llm)


@asynccontextmanager
async def lifespan(app):
    await asyncio.to_thread(llm.chat_engine.start)
    yield
    llm.close()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health():
    return {"ok": True}


@app.get("/answer")
async def answer(question: str):
    documents = await retriever.ainvoke(question)
    context = "\n\n".join(document.page_content for document in documents)

    async def lines():
        report = None
        async for chunk in llm.astream(f"{context}\n\nQuestion: {question}"):
            report = chunk.response_metadata.get("cachecraft", report)
            yield json.dumps({"text": chunk.content}) + "\n"
        yield json.dumps({"reused": report["num_reused_tokens"], "of": report["num_prompt_tokens"]}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


# %% [markdown]
# To serve it, put the app into a file and run `uvicorn app:app`, with **one worker**: each worker
# would start an engine of its own. Here it is called in place, without a server between.

# %%
server = app.router.lifespan_context(app)
await server.__aenter__()
client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=120)


async def ask(question):
    """Read one streamed answer; returns its text, and what was reused."""
    parts = []
    async with client.stream("GET", "/answer", params={"question": question}) as response:
        async for line in response.aiter_lines():
            parts.append(json.loads(line))
    return "".join(part.get("text", "") for part in parts), parts[-1]


# %%
text, counts = await ask("How many points did the Panthers defense surrender?")
print(text)
print(counts)

# %% [markdown]
# ## Several at a time, and a health check in between
#
# Four questions are answered at once. Meanwhile `/health` is asked every 20 milliseconds; what is
# printed is the slowest of its answers. If generating blocked the event loop, it would be as slow as
# a whole answer.

# %%
questions = [
    "How many points did the Panthers defense surrender?",
    "Who led the Panthers in sacks?",
    "Which team lost to the Broncos in the divisional round?",
    "How old was Peyton Manning when he played in the Super Bowl?",
]


async def watch(slowest, seconds_between=0.02):
    while True:
        started = time.perf_counter()
        await client.get("/health")
        slowest.append(time.perf_counter() - started)
        await asyncio.sleep(seconds_between)


slowest: list[float] = []
watcher = asyncio.create_task(watch(slowest))
started = time.perf_counter()
answers = await asyncio.gather(*map(ask, questions))
took_s = time.perf_counter() - started
watcher.cancel()

for question, (text, counts) in zip(questions, answers, strict=True):
    print(question, "→", " ".join(text.split()))
    print("   ", counts)
print(f"all four: {took_s:.1f} s; slowest of {len(slowest)} health checks: {max(slowest) * 1000:.0f} ms")

# %% [markdown]
# ## A reader who leaves
#
# When a client hangs up, FastAPI closes the stream, which aborts the request in the engine: nothing
# is generated for nobody.

# %%
async with client.stream("GET", "/answer", params={"question": questions[0]}) as response:
    async for line in response.aiter_lines():
        print("read one piece and left:", line)
        break

# %%
await client.aclose()
await server.__aexit__(None, None, None)
print("closed:", llm.chat_engine.is_closed)
