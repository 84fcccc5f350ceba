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
# # Quality against speed
#
# How much of a moved chunk is recomputed is the one dial: 0 % is fastest, 100 % is full compute. This
# notebook asks the same questions at several budgets and puts answers and times side by side. The
# embedded model is tiny and its answers are weak at any budget; what counts here is how far they are
# from those of full compute.

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import HTML, display

from cachecraft_rag import CacheCraftEngine, Chunk, default_dtype, default_model

DATA = Path("../data")
passages = [json.loads(line) for line in (DATA / "passages.jsonl").read_text().splitlines()]
questions = [json.loads(line) for line in (DATA / "questions.jsonl").read_text().splitlines()][:8]
chunks = {p["doc_id"]: Chunk(p["text"], doc_id=p["doc_id"], version="1") for p in passages}
SYSTEM = "Answer the question with a few words from the passages."
NUM_PASSAGES = 8

engine = CacheCraftEngine(default_model(), max_model_len=4096, dtype=default_dtype())

# %% [markdown]
# ## The store is filled first
#
# `neighbours=True` computes each passage behind passages like it: such KV needs less repair later.

# %%
engine.warm(list(chunks.values()), system=SYSTEM, neighbours=True)

# %% [markdown]
# ## One question, several budgets
#
# The passage with the answer stands among seven others. Nothing comes from vLLM's own prefix cache,
# and nothing is stored, so that every line is measured under the same conditions.

# %%
BUDGETS = {"full compute": None, "0 %": 0.0, "5 %": 0.05, "15 %": 0.15, "30 %": 0.3, "100 %": 1.0}


def passages_for(number, question):
    """The passage that holds the answer, in the middle of others."""
    others = [chunk for doc_id, chunk in chunks.items() if doc_id != question["doc_id"]]
    start = number * (NUM_PASSAGES - 1) % (len(others) - NUM_PASSAGES)
    chosen = others[start : start + NUM_PASSAGES - 1]
    return [*chosen[:3], chunks[question["doc_id"]], *chosen[3:]]


def ask(number, question, budget):
    chosen = passages_for(number, question)
    content = "\n\n".join([*(chunk.text for chunk in chosen), "Question: " + question["question"]])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    options = {"reuse": "off"} if budget is None else {"recompute_ratio": budget}
    return engine.chat(
        messages, chunks=chosen, max_tokens=16, store=False, read_prefix_cache=False, **options
    )


for budget in BUDGETS.values():  # the first call of a kind is slower
    ask(0, questions[0], budget)

answers = {
    name: [ask(number, question, budget) for number, question in enumerate(questions)]
    for name, budget in BUDGETS.items()
}

# %%
rows = "".join(
    f"<tr><td>{name}</td><td>{out.report.ttft_s:.2f} s</td><td>{out.report.num_recomputed_tokens}</td>"
    f"<td style='text-align:left'>{out.text.strip()}</td></tr>"
    for name, out in ((name, column[0]) for name, column in answers.items())
)
head = "<tr><th>recomputed</th><th>first token</th><th>tokens recomputed</th><th>answer</th></tr>"
display(HTML(f"<p><b>{questions[0]['question']}</b></p><table>{head}{rows}</table>"))

# %% [markdown]
# ## All questions
#
# Left: the median time to the first token. Right: how many answers are those of full compute, word
# for word.

# %%
full = [out.text for out in answers["full compute"]]
ttft = {name: statistics.median(out.report.ttft_s for out in column) for name, column in answers.items()}
same = {
    name: sum(out.text == text for out, text in zip(column, full, strict=True))
    for name, column in answers.items()
}

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.bar(list(ttft), list(ttft.values()), color="#4477aa")
left.set_ylabel("seconds to the first token")
right.bar(list(same), list(same.values()), color="#ccbb44")
right.set_ylabel(f"same answer, of {len(questions)}")
for axes in (left, right):
    axes.tick_params(axis="x", labelrotation=30)
    axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()

# %% [markdown]
# At 100 % answers can differ in the last bit: the same tokens are computed in other steps, and in
# bfloat16 the order of additions shows. In float32 they are the same.
#
# ## Where the tokens go
#
# The report of one answer at 15 %: which chunk was moved, and how much of each was recomputed.

# %%
answers["15 %"][0].report

# %% [markdown]
# ## Choosing for your own data
#
# `engine.calibrate` does what this notebook did with your questions, and keeps the smallest budget
# that meets the target for this model, in this and later programs. So it is not run here: four
# questions are too few.
#
# ```python
# from cachecraft_rag.engine import CalibrationQuestion
#
# questions = [CalibrationQuestion("How many points?", (chunk, other_chunk)), ...]
# engine.calibrate(questions, target_agreement=0.9, system=SYSTEM)
# ```

# %%
engine.close()
