"""The whole engine on tiny checkpoints: answers against transformers, and independence of everything around them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.types import SamplingParams, TokenEvent
from tests.models.checkpoints import VOCAB_SIZE, case, random_prompt, reference_logits, reference_model, save_checkpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 17, 40, 63)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("llama-gqa"), tmp_path_factory.mktemp("llama"))


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(folder), **{"max_total_tokens": 1024, **options}))


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[TokenEvent]]:
    """Events of each prompt, all queued at once."""
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(engine.make_request(str(index), prompt, own))
    events: list[list[TokenEvent]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            events[int(event.request_id)].append(event)
        engine.scheduler.check_integrity()
    return events


def tokens(events: Sequence[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def test_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    """The reference's logits decide: where its two best tokens are nearly tied, either is right."""
    engine, reference = load(folder), reference_model(folder)
    for prompt, events in zip(PROMPTS, run(engine, PROMPTS, [GREEDY] * len(PROMPTS)), strict=True):
        context = list(prompt)
        for event in events:
            assert event.token_id is not None
            logits = reference_logits(reference, context)[-1]
            assert float(logits.max() - logits[event.token_id]) < 1e-3
            context.append(event.token_id)


WITH_LOGPROBS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=[None, "mxfp8"])
def alone(folder: Path, request: pytest.FixtureRequest) -> tuple[Any, list[list[TokenEvent]]]:
    """A quantization, and the events of each prompt when it has the engine to itself."""
    engine = load(folder, quantization=request.param, disable_prefix_cache=True)
    return request.param, [run(engine, [prompt], [WITH_LOGPROBS])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 1},
        {"page_size": 1},
        {"page_size": 64},
        {"max_running_requests": 2},
        {"max_total_tokens": 96, "page_size": 4},
        {"disable_prefix_cache": True},
    ],
    ids=str,
)
def test_an_answer_does_not_depend_on_how_it_is_scheduled(
    folder: Path, options: dict[str, Any], alone: tuple[Any, list[list[TokenEvent]]]
) -> None:
    engine = load(folder, quantization=alone[0], **options)
    together = run(engine, PROMPTS, [WITH_LOGPROBS] * len(PROMPTS))
    for expected, found in zip(alone[1], together, strict=True):
        assert tokens(found) == tokens(expected)
        for left, right in zip(expected, found, strict=True):
            assert left.logprobs is not None
            assert right.logprobs is not None
            assert abs(left.logprobs.logprob - right.logprobs.logprob) < 1e-4
    if options.get("max_total_tokens") == 96:
        assert engine.scheduler.counters.preemptions > 0


def test_fault_19_a_fixed_batch_gives_the_same_tokens_again(folder: Path) -> None:
    first = run(load(folder), PROMPTS, [GREEDY] * len(PROMPTS))
    assert run(load(folder), PROMPTS, [GREEDY] * len(PROMPTS)) == first


def test_a_seed_fixes_a_sample_whatever_is_beside_it(folder: Path) -> None:
    own = SamplingParams(max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)
    alone = run(load(folder), PROMPTS[2:3], [own])[0]
    others = SamplingParams(max_tokens=9, temperature=2.0, ignore_eos=True)
    together = run(load(folder, max_total_tokens=96), PROMPTS, [others, others, own, others, others, others])
    assert tokens(together[2]) == tokens(alone)
    another = run(load(folder), PROMPTS[2:3], [SamplingParams(max_tokens=12, temperature=1.5, seed=8, ignore_eos=True)])[0]
    assert tokens(another) != tokens(alone)


def test_requests_without_a_seed_differ_and_the_engines_seed_fixes_them(folder: Path) -> None:
    free = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    first = run(load(folder, seed=1), [PROMPTS[1]] * 3, [free] * 3)
    assert len({tuple(tokens(events)) for events in first}) == 3
    assert run(load(folder, seed=1), [PROMPTS[1]] * 3, [free] * 3) == first
    assert run(load(folder, seed=2), [PROMPTS[1]] * 3, [free] * 3) != first


def test_a_shared_prefix_is_reused_and_changes_nothing(folder: Path) -> None:
    engine = load(folder, page_size=8)
    prompt = random_prompt(50)
    first, second = (run(engine, [prompt], [GREEDY])[0] for _ in range(2))
    assert tokens(first) == tokens(second)
    assert (first[-1].num_cached_tokens, second[-1].num_cached_tokens) == (0, 48)


def test_prompt_logprobs_are_those_of_transformers(folder: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    for options in ({}, {"chunked_prefill_size": 7}):
        (events,) = run(load(folder, **options), [PROMPTS[4]], [params])
        expected = reference_logits(reference_model(folder), PROMPTS[4]).log_softmax(-1)
        assert len(events[0].prompt_logprobs) == len(PROMPTS[4]) - 1
        for position, item in enumerate(events[0].prompt_logprobs):
            assert item.token_id == PROMPTS[4][position + 1]
            assert abs(item.logprob - float(expected[position, item.token_id])) < 1e-4
            top = expected[position].topk(3).values
            assert torch.allclose(torch.tensor([value for _, value in item.top]), top, atol=1e-4)


def test_the_context_ends_an_answer(folder: Path) -> None:
    engine = load(folder, context_length=20)
    (events,) = run(engine, [random_prompt(15)], [SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)])
    assert len(events) == 5
    assert events[-1].finish_reason == "length"


def test_abort_in_the_middle_leaves_the_others_alone(folder: Path) -> None:
    engine = load(folder)
    (expected,) = run(engine, [PROMPTS[3]], [GREEDY])
    for index in range(3):
        engine.add(engine.make_request(f"r{index}", PROMPTS[3 - index], GREEDY))
    seen = [event for _ in range(4) for event in engine.step() if event.request_id == "r0"]
    aborted = engine.abort("r1")
    assert aborted is not None
    assert aborted.finish_reason == "abort"
    assert engine.abort("r1") is None
    while engine.has_work:
        seen += [event for event in engine.step() if event.request_id == "r0"]
        engine.scheduler.check_integrity()
    assert tokens(seen) == tokens(expected)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt: got no tokens; expected at least one"),
        ([1] * 128, GREEDY, r"prompt: got 128 tokens; expected at most 127, which leaves one .* context_length 128"),
        ([1, VOCAB_SIZE], GREEDY, rf"prompt token id: got {VOCAB_SIZE}; expected a whole number from 0 to {VOCAB_SIZE - 1}"),
        ([1, -1], GREEDY, "prompt token id: got -1"),
        ([1, True], GREEDY, "prompt token id: got True"),
        ([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids: got 97"),
        ([1], SamplingParams(logit_bias={500: 1.0}), "logit_bias: got 500"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(folder: Path, prompt: list[int], params: Any, message: str) -> None:
    engine = load(folder)
    with pytest.raises(InputError, match=message):
        engine.make_request("bad", prompt, params)
    assert not engine.has_work
    assert len(run(engine, [PROMPTS[0]], [GREEDY])[0]) == 12


def test_sampling_defaults_come_from_the_checkpoint_unless_told_otherwise(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 5}')
    params = load(tmp_path).make_request("r", [1], SamplingParams(top_k=7)).params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 7, 1.0)
    params = load(tmp_path, sampling_defaults="openai").make_request("r", [1], SamplingParams()).params
    assert (params.temperature, params.top_k) == (1.0, 0)


def test_two_engines_of_different_models_run_in_one_process(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(case("qwen3"), tmp_path)
    alone = [run(load(path), PROMPTS[:2], [GREEDY] * 2) for path in (folder, tmp_path)]
    engines = [load(folder), load(tmp_path)]
    for engine in engines:
        for index in range(2):
            engine.add(engine.make_request(str(index), PROMPTS[index], GREEDY))
    found: list[list[list[TokenEvent]]] = [[[], []], [[], []]]
    while any(engine.has_work for engine in engines):
        for events, engine in zip(found, engines, strict=True):
            for event in engine.step() if engine.has_work else []:
                events[int(event.request_id)].append(event)
    assert found == alone


def test_the_step_is_three_verbs() -> None:
    source = inspect.getsource(Engine.step)
    assert len(source.splitlines()) < 30
    assert [verb in source for verb in (".schedule(", ".run(", ".postprocess(")] == [True] * 3
