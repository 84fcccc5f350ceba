"""Planted hard questions, and plain ones, on the default model with a limit on complexity.

python routing_cell.py      prints one JSON line: the reasons of both
"""

from __future__ import annotations

import json
from collections import Counter

from breaker_cell import NUM_CHUNKS, read

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model

MAX_COMPLEXITY = 0.8
HARD = (
    "Which of the two rivers that flow through the city where the inventor of the telescope was born is "
    "longer?",
    "Who was the spouse of the director of the film that won the award in the same year as the treaty "
    "was signed?",
    "Did the university that Martin Luther taught at open earlier or later than the one founded by "
    "Thomas Jefferson?",
    "How many of the battles named in the passages were fought after the year in which the Norman king "
    "William died?",
    "Which countries mentioned in the passages have never been members of the European Union, and which "
    "of them border Switzerland?",
    "What is the total population of the cities in which Genghis Khan's sons were born, and which of "
    "them is the largest?",
    "Are both the author of The Prince and the painter of The Last Supper from the same city, or were "
    "they born in different countries?",
    "Which of the teams that lost to the Denver Broncos in the 2015 season had scored more points than "
    "the Carolina Panthers in the same year?",
    "In which year was the founder of the company that built the steam engine used in the mill owned by "
    "Richard Arkwright born?",
    "What do the policies of Edward I towards Wales and those of Henry II towards Ireland have in "
    "common, and how do they differ?",
    "Who succeeded the queen whose father was imprisoned by the same emperor that the Huguenots fled from?",
    "Except for the ones written by Luther, which of the books that are listed were published before "
    "the Council of Trent but not translated into English?",
    "Which chemical element was discovered first, the one that Priestley called dephlogisticated air or "
    "the one that Cavendish isolated, and by how many years?",
    "Of the three largest parties in the parliament that met after the Victoria bushfires, which had "
    "fewer seats than the Greens in the state where Melbourne lies?",
    "How is the grandfather of the scientist who proposed the theory that the Warsaw Pact's physicists "
    "rejected related to the composer of the Polish anthem?",
    "What is the name of the river that flows through the capital of the country in which the "
    "university attended by Nikola Tesla is located?",
    "Which state in the US that borders Fresno County's neighbour to the east is smaller than the state "
    "where the first atomic bomb was tested?",
    "Compare the number of immune cells described in the first passage with the number of proteins "
    "named in the second: which is higher, and why?",
    "Who is older, the coach of the team that won Super Bowl 50 or the singer of the song performed at "
    "its half-time show?",
    "On the board of which organisation did the person sit who, according to one passage, opposed the "
    "reform that the other passage says was adopted in 1925?",
)
"""Several hops, comparison, aggregation, negation; all about things that the passages speak of."""


def reasons(engine: CacheCraftEngine, chunks: list[Chunk], questions: list[str]) -> dict[str, int]:
    """Decision and reason of each answer, counted."""
    context = "\n\n".join(chunk.text for chunk in chunks)
    found: Counter[str] = Counter()
    for question in questions:
        messages = [{"role": "user", "content": f"{context}\n\nQuestion: {question}"}]
        report = engine.chat(messages, chunks=chunks, max_tokens=1).report
        found[f"{report.decision} {report.reason}" if report.decision == "full" else "reuse"] += 1
    return dict(found)


def main() -> None:
    chunks = [Chunk(row["text"], doc_id=row["doc_id"]) for row in read("passages.jsonl")[:NUM_CHUNKS]]
    config = CacheCraftConfig(self_test=False, max_complexity=MAX_COMPLEXITY, host_store_bytes=256 << 20)
    with CacheCraftEngine(default_model(), config=config, in_process=True, max_model_len=4096) as engine:
        engine.warm(chunks)
        plain = [row["question"] for row in read("questions.jsonl")]
        result = {"hard": reasons(engine, chunks, list(HARD)), "plain": reasons(engine, chunks, plain)}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
