"""The logits processor: what it records, forces and forgets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.quality.forced import NUM_STEPS, TRACES, ForcedDecoding, Reference, Trace
from benchmarks.quality.measure import divergence
from vllm.v1.sample.logits_processor import MoveDirectionality


@pytest.fixture(autouse=True)
def traces() -> Iterator[dict[str, Trace]]:
    yield TRACES
    TRACES.clear()


def update(*, added: Any = (), removed: Any = (), moved: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(added=added, removed=removed, moved=moved)


def request(index: int, output: list[int], **extra_args: object) -> tuple[Any, ...]:
    return index, SimpleNamespace(extra_args=extra_args), None, output


def processor() -> ForcedDecoding:
    return ForcedDecoding(None, torch.device("cpu"), False)


def reference(*rows: list[float]) -> Reference:
    return Reference.of([torch.tensor(row).log() for row in rows])


def test_kl_is_that_of_the_definition() -> None:
    """KL(p || q) = sum p log(p / q); of (1/2, 1/2) and (1/4, 3/4) by hand."""
    kl = reference([0.5, 0.5]).kl(0, torch.tensor([0.25, 0.75]).log())
    assert kl == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item())


def test_kl_of_equal_rows_is_zero_also_with_impossible_tokens() -> None:
    """A token of probability zero on both sides adds nothing."""
    row = torch.tensor([0.0, 0.3, 0.7]).log()
    assert Reference.of([row]).kl(0, row) == 0.0


def test_without_a_reference_the_raw_rows_are_kept() -> None:
    """Rows are log-probabilities of the logits before a token was forced, for the first steps."""
    TRACES["k"] = trace = Trace()
    output: list[int] = []
    forcing = processor()
    forcing.update_state(update(added=(request(0, output, trace="k", forced=[1] * 20),)))
    for _ in range(NUM_STEPS + 2):
        logits = forcing.apply(torch.tensor([[2.0, 0.0, 0.0]]))
        output.append(int(logits[0].argmax()))
    assert output == [1] * (NUM_STEPS + 2)
    assert sorted(trace.rows) == list(range(NUM_STEPS))
    assert torch.allclose(trace.rows[3], torch.tensor([2.0, 0.0, 0.0]).log_softmax(-1))


def test_with_a_reference_only_its_steps_are_compared() -> None:
    """KL is taken at each step that the reference has; without forced tokens logits stay as they are."""
    TRACES["k"] = trace = Trace(reference([0.5, 0.5]))
    output: list[int] = []
    forcing = processor()
    forcing.update_state(update(added=(request(0, output, trace="k"),)))
    logits = torch.tensor([[1.0, 1.0]])
    assert torch.equal(forcing.apply(logits.clone()), logits)
    output.append(0)
    forcing.apply(logits.clone())
    assert trace.kl == {0: pytest.approx(0.0, abs=1e-7)}


def test_the_last_part_of_a_prompt_in_parts_counts() -> None:
    """vLLM also passes the logits of a prompt that is not complete; the same step comes again."""
    TRACES["k"] = trace = Trace()
    forcing = processor()
    forcing.update_state(update(added=(request(0, [], trace="k"),)))
    forcing.apply(torch.tensor([[9.0, 0.0]]))
    forcing.apply(torch.tensor([[0.0, 9.0]]))
    assert int(trace.rows[0].argmax()) == 1


def test_requests_keep_their_trace_as_the_batch_changes() -> None:
    """Removing, swapping, moving and reusing a place in the batch never mixes two requests up."""
    forcing = processor()
    for key in "abc":
        TRACES[key] = Trace()
    forcing.update_state(update(added=tuple(request(i, [], trace=k, forced=[i]) for i, k in enumerate("ab"))))
    forcing.update_state(update(moved=((0, 1, MoveDirectionality.SWAP),)))
    assert forcing.apply(torch.zeros(2, 3)).argmax(-1).tolist() == [1, 0]
    forcing.update_state(update(removed=(0,), moved=((1, 0, MoveDirectionality.UNIDIRECTIONAL),)))
    forcing.update_state(update(added=(request(1, [], trace="c", forced=[2]),)))
    assert forcing.apply(torch.zeros(2, 3)).argmax(-1).tolist() == [0, 2]
    forcing.update_state(update(added=(request(0, []),)))
    assert forcing.apply(torch.zeros(2, 3))[0].tolist() == [0.0, 0.0, 0.0]


def test_divergence_is_the_first_other_token() -> None:
    """Also where one answer merely ends earlier; equal answers have none."""
    assert divergence((1, 2, 3), (1, 2, 3)) is None
    assert divergence((1, 2, 3), (1, 4, 3)) == 1
    assert divergence((1, 2), (1, 2, 3)) == 2
