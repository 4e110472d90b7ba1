"""`LLM` over an engine whose answers the test writes down, and over a whole tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.llm import LLM
from eightfold.types import Grammar, SamplingParams, Sequence
from tests.bad_inputs import BAD_INPUTS, CONTEXT_LENGTH, BadInput, damaged
from tests.pretended import PretendedRunner, check_idle, counting, make_llm, saying
from tests.tiny_tokenizer import BOS_ID, EOS_ID, save_text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


def letters(count: int, start: int = 0) -> str:
    return "".join(chr(ord("a") + (start + index) % 26) for index in range(count))


# Kinds of prompts.


@pytest.mark.parametrize(
    ("prompts", "num_prompts"),
    [
        ("hello", 1),
        (["hello", "world"], 2),
        (("hello",), 1),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
        ([{"role": "user", "content": "hello"}], 1),
        ([[{"role": "user", "content": "hello"}], [{"role": "user", "content": "world"}]], 2),
        (["hello", [5, 6], [{"role": "user", "content": "hello"}]], 3),
    ],
)
def test_every_kind_of_prompt_gets_its_answer(prompts: Any, num_prompts: int) -> None:
    llm = make_llm(saying("hello world"))
    outputs = llm.generate(prompts)
    assert [output.text for output in outputs] == ["hello world"] * num_prompts
    check_idle(llm)


def test_prompts_arrive_as_the_model_sees_them() -> None:
    llm = make_llm(saying("x"))
    prompts: list[Any] = ["hello", [5, 6], [{"role": "user", "content": "hello"}]]
    text, ids, chat = llm.generate(prompts)
    assert text.prompt_token_ids == tuple(llm.tokenizer.encode("hello"))
    assert ids.prompt_token_ids == (5, 6)
    assert chat.prompt_token_ids.count(BOS_ID) == 1
    assert llm.chat([{"role": "user", "content": "hello"}]).prompt_token_ids == chat.prompt_token_ids


def test_answers_keep_the_order_of_the_prompts_and_run_as_one_batch() -> None:
    llm = make_llm(lambda sequence: sequence.request.prompt_token_ids[-1])
    runner = llm.engine.runner
    assert isinstance(runner, PretendedRunner)
    prompts = [[5, token] for token in (20, 30, 40)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=count) for count in (3, 1, 2)])
    assert [output.token_ids for output in outputs] == [(20,) * 3, (30,), (40,) * 2]
    assert [len(batch.chunks) for batch in runner.batches] == [3, 2, 1]


def test_an_output_tells_what_happened() -> None:
    llm = make_llm(saying("hi!"))
    (output,) = llm.generate("hello", SamplingParams(logprobs=0, prompt_logprobs=0))
    assert (output.text, output.finish_reason, output.token_ids[-1]) == ("hi!", "stop", EOS_ID)
    assert output.completions[0].stop_reason == EOS_ID
    assert [item.token_id for item in output.logprobs or ()] == list(output.token_ids)
    assert [item.token_id for item in output.prompt_logprobs or ()] == list(output.prompt_token_ids[1:])
    assert 0 <= output.timing.time_to_first_token <= output.timing.total
    assert output.timing.tokens_per_second is not None
    (plain,) = llm.generate("hello", SamplingParams(max_tokens=1))
    assert (plain.logprobs, plain.prompt_logprobs, plain.timing.tokens_per_second) == (None, None, None)
    assert plain.finish_reason == "length"


def test_the_prefix_cache_is_used_and_reported() -> None:
    llm = make_llm(saying("x"), page_size=4)
    prompt = list(range(10, 23))
    assert [llm.generate(prompt)[0].num_cached_tokens for _ in range(2)] == [0, 12]


# Several answers to one prompt.


@pytest.mark.parametrize("options", [{}, {"disable_prefix_cache": True}])
def test_n_answers_differ_and_can_be_repeated(options: Any) -> None:
    llm = make_llm(counting(), page_size=4, **options)
    params = SamplingParams(n=4, seed=3, max_tokens=5)
    prompt = list(range(10, 23))
    (first,), (again,) = (llm.generate(prompt, params) for _ in range(2))
    texts = [completion.text for completion in first.completions]
    assert texts[0] == letters(5, start=3)
    assert len(set(texts)) > 1
    assert texts == [completion.text for completion in again.completions]
    assert [completion.index for completion in first.completions] == [0, 1, 2, 3]
    check_idle(llm)


def test_n_answers_compute_their_prompt_once() -> None:
    llm = make_llm(counting(), page_size=4)
    runner = llm.engine.runner
    assert isinstance(runner, PretendedRunner)
    llm.generate(list(range(10, 23)), SamplingParams(n=3, max_tokens=2, seed=0))
    prefills = [chunk.length for batch in runner.batches for chunk in batch.chunks if chunk.length > 1 or chunk.start == 12]
    assert sorted(prefills) == [1, 1, 13]


def test_n_answers_stream_with_their_index() -> None:
    llm = make_llm(counting())
    texts = ["", ""]
    for event in llm.stream("a", SamplingParams(n=2, seed=0, max_tokens=4)):
        texts[event.index] += event.text
    assert texts[0] == letters(4)
    assert len(texts[1]) == 4


# Streams.


def test_a_stream_is_the_answer_in_pieces() -> None:
    llm = make_llm(saying("4 € or 日本"))
    events = list(llm.stream("hello"))
    assert "".join(event.text for event in events) == llm.generate("hello")[0].text == "4 € or 日本"
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop"]
    assert events[-1].finish_reason == "stop"
    check_idle(llm)


def test_a_stop_text_ends_the_work() -> None:
    llm = make_llm(counting())
    (output,) = llm.generate("a", SamplingParams(stop=("fg",), seed=0, max_tokens=50))
    assert (output.text, output.finish_reason, output.completions[0].stop_reason) == ("abcde", "stop", "fg")
    assert len(output.token_ids) == 7
    check_idle(llm)


def test_closing_a_stream_frees_what_it_holds() -> None:
    llm = make_llm(counting())
    stream = llm.stream("a", SamplingParams(n=3, seed=0, max_tokens=50))
    next(stream)
    stream.close()
    check_idle(llm)


def test_a_stream_that_is_never_read_queues_nothing() -> None:
    llm = make_llm(counting())
    llm.stream("a")
    check_idle(llm)


def test_open_streams_and_a_batch_take_turns() -> None:
    llm = make_llm(counting())
    params = SamplingParams(seed=0, max_tokens=10)
    one, two = llm.stream("a", params), llm.stream("b", params)
    texts = [next(one).text, next(two).text]
    assert llm.generate("c", params)[0].text == letters(10)
    texts[0] += "".join(event.text for event in one)
    texts[1] += "".join(event.text for event in two)
    assert texts == [letters(10)] * 2
    check_idle(llm)


# When things go wrong.


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_breaks_a_step_leaves_nothing_behind(error: type[BaseException]) -> None:
    llm = make_llm(counting())
    runner = llm.engine.runner
    assert isinstance(runner, PretendedRunner)
    choose = runner._choose

    def fail(sequence: Sequence) -> int:
        if sequence.num_output_tokens == 3:
            raise error
        return choose(sequence)

    runner._choose = fail
    with pytest.raises(error):
        llm.generate(["a", "b"], SamplingParams(seed=0, n=2))
    check_idle(llm)
    runner._choose = choose
    assert llm.generate("a", SamplingParams(seed=0, max_tokens=3))[0].text == letters(3)


def test_a_bad_prompt_among_good_ones_queues_none() -> None:
    llm = make_llm(saying("x"))
    prompts: list[Any] = ["good", [10**6]]
    with pytest.raises(InputError):
        llm.generate(prompts)
    check_idle(llm)


def test_a_prompt_that_the_cache_cannot_hold_takes_back_the_others() -> None:
    llm = make_llm(saying("x"), max_total_tokens=32, page_size=16)
    with pytest.raises(InputError, match="max-total-tokens"):
        llm.generate(["good", "a" * 40])
    check_idle(llm)


def test_others_are_served_while_one_is_refused() -> None:
    llm = make_llm(counting(), context_length=CONTEXT_LENGTH)
    stream = llm.stream("a", SamplingParams(seed=0, max_tokens=10))
    text = next(stream).text
    for item in BAD_INPUTS:
        if item.use is not None and item.damage is None:
            with pytest.raises(InputError):
                item.use(llm)
    assert text + "".join(event.text for event in stream) == letters(10)
    check_idle(llm)


# A whole model.


def test_a_checkpoint_answers_and_streams_alike(checkpoint: Path) -> None:
    llm = LLM(checkpoint, quantization="mxfp8", max_total_tokens=1024)
    outputs = llm.generate(["hello world", "hello"], GREEDY)
    assert all(1 <= len(output.token_ids) <= 12 for output in outputs)
    streamed = "".join(event.text for event in llm.stream("hello world", GREEDY))
    assert streamed == outputs[0].text
    assert llm.chat([{"role": "user", "content": "hello"}], GREEDY).token_ids
    check_idle(llm)


def test_loading_reports_progress(checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    LLM(str(checkpoint), max_total_tokens=1024, report=lambda *news: seen.append(news))
    phase, done, total = seen[-1]
    assert (phase, done) == ("load", total)


@pytest.mark.parametrize("bad", [item for item in BAD_INPUTS if item.in_api], ids=lambda item: item.name)
def test_bad_input_is_refused_by_name_before_any_work(bad: BadInput, checkpoint: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint, bad, tmp_path)
    options: dict[str, Any] = {"model": folder, "context_length": CONTEXT_LENGTH, "max_total_tokens": 1024, **bad.options}
    loaded = None if bad.use is None else LLM(**options)
    progress: list[str] = []
    with pytest.raises(InputError) as refusal:
        LLM(**options, report=lambda phase, *_: progress.append(phase)) if bad.use is None else bad.use(loaded)
    for word in bad.words:
        assert word in str(refusal.value)
    assert not progress  # no weight was read to find this out
    if loaded is not None:
        check_idle(loaded)
        assert loaded.generate("a", GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", r"config\.json: got damaged JSON"), ('{"model_type": "mamba"}', "model_type: got 'mamba'; expected one of: llama")],
)
def test_a_fault_of_the_configuration_is_not_taken_for_one_of_the_tokenizer(tmp_path: Path, config: str, message: str) -> None:
    save_text_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path)


def test_dummy_weights_of_a_configuration_alone_answer_token_ids(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    llm = LLM(tmp_path, quantization="mxfp8", load_format="dummy", max_total_tokens=1024)
    (output,) = llm.generate([5, 6, 7], GREEDY)
    assert (len(output.token_ids), output.text) == (12, "") or output.finish_reason == "stop"
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(InputError, match="for a model without a tokenizer"):
            llm.generate(prompt)
    with pytest.raises(InputError, match="for a model without a tokenizer"):
        llm.generate([5, 6], SamplingParams(grammar=Grammar.regex("a+")))
    check_idle(llm)
    assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == output.token_ids


def test_dummy_weights_beside_a_tokenizer_answer_in_text(checkpoint: Path) -> None:
    llm = LLM(checkpoint, load_format="dummy", max_total_tokens=1024)
    assert llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))[0].text
    llm.update_weights(checkpoint)
    real = LLM(checkpoint, max_total_tokens=1024)
    assert llm.generate("hello", GREEDY)[0].token_ids == real.generate("hello", GREEDY)[0].token_ids
