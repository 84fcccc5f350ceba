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
# # 中文文档 (Chinese documents)
#
# 用法与英文完全相同：检索器告诉引擎它找到了哪些文本，引擎在提示词里找回这些文本并复用它们的 KV 缓存。
# 文本按原样逐字匹配，与语言无关。需要换的只有两样：
#
# - **模型。** 内置的 SmolLM2-135M 只懂英文，它在本页里的回答没有意义，只用来演示复用。
#   请改用懂中文的模型，例如`Qwen/Qwen3-0.6B`（Apache-2.0，可在 CPU 上运行）或更大的 Qwen3。
# - **嵌入模型。** 内置的 all-MiniLM-L6-v2 也只懂英文。请用例如 `BAAI/bge-small-zh-v1.5`；
#   本页用“共有的相邻两字”代替，这样不需要下载任何东西。
#
# *In English: everything works as with English text. Change the model, because the embedded one speaks
# English only and its answers on this page mean nothing, and the embedding model.*

# %%
# %env VLLM_LOGGING_LEVEL=ERROR

# %%
import json
from pathlib import Path

from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from cachecraft_rag import default_dtype, default_model
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftRetriever

MODEL = default_model()  # 换成 "Qwen/Qwen3-0.6B" 或本地模型文件夹

DATA = Path("../data")
passages = [json.loads(line) for line in (DATA / "passages_zh.jsonl").read_text().splitlines()]
questions = [json.loads(line) for line in (DATA / "questions_zh.jsonl").read_text().splitlines()]
print(passages[0]["text"][:80])

# %% [markdown]
# ## 检索
#
# 任何 LlamaIndex 检索器都可以。下面这个按共有的相邻两字打分。


# %%
class PairRetriever(BaseRetriever):
    """The passages that share most pairs of neighbouring characters with the question."""

    def __init__(self, nodes, top_k=3):
        self._nodes = [(node, self._pairs(node.text)) for node in nodes]
        self._top_k = top_k
        super().__init__()

    @staticmethod
    def _pairs(text):
        return {text[i : i + 2] for i in range(len(text) - 1)}

    def _retrieve(self, query_bundle):
        wanted = self._pairs(query_bundle.query_str)
        scored = [NodeWithScore(node=node, score=len(wanted & pairs)) for node, pairs in self._nodes]
        return sorted(scored, key=lambda found: -found.score)[: self._top_k]


nodes = [TextNode(id_=passage["doc_id"], text=passage["text"]) for passage in passages]
ENGINE_ARGS = {"max_model_len": 8192, "dtype": default_dtype()}  # float32 where the CPU lacks bfloat16
llm = CacheCraftLLM(MODEL, engine_args=ENGINE_ARGS, max_tokens=16)
retriever = CacheCraftRetriever(PairRetriever(nodes), llm=llm)
query_engine = RetrieverQueryEngine.from_args(retriever, llm=llm)

# %% [markdown]
# ## 第一个问题：全部计算并保存

# %%
asked = [question["question"] for question in questions if "氧" in question["question"]]
print(asked[0])
query_engine.query(asked[0])
llm.last_report

# %% [markdown]
# ## 同一主题的其他问题：段落次序不同，KV 照样复用

# %%
for question in asked[1:3]:
    query_engine.query(question)
    report = llm.last_report
    print(question)
    print(f"   复用 {report.reuse_ratio:.0%},首个词元 {report.ttft_s:.2f} 秒。{report.why}")

# %% [markdown]
# ## 标点、全角字符与空白
#
# 匹配的是检索器给出的原文，所以全角标点、繁简体或表情符号都不需要转换。
# 会妨碍匹配的是在检索之后又改写文本的步骤，例如全角转半角或删除空格：请把它们放在切分文档之前。

# %%
odd = TextNode(text="“一带一路”——2013年提出;参见《丝绸之路》(第3版)。😀" * 4, id_="odd")
engine_answer = RetrieverQueryEngine.from_args(
    CacheCraftRetriever(PairRetriever([odd, *nodes]), llm=llm), llm=llm
)
engine_answer.query("“一带一路”何时提出?")
engine_answer.query("《丝绸之路》是第几版?“一带一路”")
[(chunk.doc_id, str(chunk.decision)) for chunk in llm.last_report.chunks]

# %%
llm.close()
