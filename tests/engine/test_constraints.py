from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eightfold import LLM, SamplingParams
from eightfold.engine.constraints import MaskWorkers, allowed
from eightfold.engine.sampler import sample
from eightfold.errors import InputError
from eightfold.types import Batch, Chunk, Constraint, Grammar, Request, Sequence
from tests.tiny_tokenizer import EOS_ID, save_text_checkpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["x", "yz"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA)
WORD = Grammar.json_schema({"enum": ["yes", "no"]})


class Fixed:
    """Permits the same tokens always, and remembers what it was asked."""

    failure: str = "a limit"

    def __init__(self, *token_ids: int, vocab_size: int = 10) -> None:
        bits = np.zeros(vocab_size, dtype=np.bool_)
        bits[list(token_ids)] = True
        self._mask = np.packbits(bits, bitorder="little").tobytes()
        self.asked: list[list[int]] = []

    def mask(self, token_ids: SequenceOf[int]) -> bytes | None:
        self.asked.append(list(token_ids))
        return self._mask


class Free:
    """Permits everything."""

    failure: str = ""

    def mask(self, token_ids: SequenceOf[int]) -> bytes | None:
        return None


def choose(constraint: Constraint | None, logits: list[float], output: SequenceOf[int] = (), **params: Any) -> int | None:
    values: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0} | params
    sequence = Sequence.start(Request("r", (1, 2), SamplingParams(**values), seed=3), constraint)
    sequence.token_ids += output
    masks = MaskWorkers().start(Batch((Chunk(sequence, 0, len(sequence.token_ids), samples=True),)))
    (token,) = sample(torch.tensor([logits]), [sequence], frozenset({0}), masks)
    return token


def test_only_what_is_permitted_is_chosen() -> None:
    logits = [9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert choose(None, logits) == 0
    assert choose(Free(), logits) == 0
    assert choose(Fixed(4, 7), logits) == 4
    assert choose(Fixed(4, 7), logits, logit_bias={7: 50.0, 1: 100.0}) == 7
    assert choose(Fixed(4, 7), logits, output=[4, 4, 4], frequency_penalty=2.0) == 7
    assert choose(Fixed(9), logits, logit_bias={9: -100.0}, temperature=1.0, top_k=1) == 9
    assert {choose(Fixed(3, 8), logits, output=[5] * length, temperature=50.0) for length in range(40)} == {3, 8}
    assert {
        choose(Fixed(3, 8), logits, output=[5] * n, temperature=9.0, top_k=5, top_p=0.9, min_p=0.01) for n in range(40)
    } <= {3, 8}


def test_where_nothing_is_permitted_nothing_is_chosen() -> None:
    assert choose(Fixed(), [1.0] * 10) is None


def test_an_end_token_that_is_held_back_comes_where_nothing_else_may() -> None:
    logits = [9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert choose(Fixed(0, 5), logits) == 0
    assert choose(Fixed(0, 5), logits, min_tokens=3) == 5
    assert choose(Fixed(0), logits, min_tokens=3) == 0
    assert choose(Fixed(0, 5), logits, min_tokens=3, stop_token_ids=(5,)) == 0


def test_masks_are_narrower_or_wider_than_the_vocabulary() -> None:
    assert allowed(b"\xff\x03", 12).tolist() == [True] * 10 + [False] * 2
    assert allowed(b"\xff\xff", 3).tolist() == [True] * 3


def test_only_chunks_that_sample_ask_for_masks_and_in_other_threads() -> None:
    threads: list[threading.Thread] = []

    class Watching(Free):
        def mask(self, token_ids: SequenceOf[int]) -> bytes | None:
            threads.append(threading.current_thread())
            return None

    sequences = [Sequence.start(Request(str(index), (1, 2, 3), SamplingParams(), 0), Watching()) for index in range(2)]
    plain = Sequence.start(Request("plain", (1,), SamplingParams(), 0))
    chunks = (
        Chunk(sequences[0], 0, 3, samples=True),
        Chunk(sequences[1], 0, 2, samples=False),
        Chunk(plain, 0, 1, samples=True),
    )
    masks = MaskWorkers().start(Batch(chunks))
    assert list(masks) == [sequences[0]]
    assert masks[sequences[0]].result() is None
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that has room for answers of any sense."""
    found = save_text_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return found


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", max_total_tokens=2048, page_size=8, **options)


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "size", "tags"}
    assert len(value["name"]) <= 6
    assert isinstance(value["size"], int)
    assert 0 <= value["size"] <= 999
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"x", "yz"}


def test_a_random_model_obeys_a_schema_every_time(folder: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 5.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 2.0, "frequency_penalty": -1.0},
        {"temperature": 1.0, "logit_bias": {EOS_ID: 100.0, 40: -100.0}},
        {"temperature": 0.7, "min_tokens": 30},
    ]
    params = [
        SamplingParams(max_tokens=1500, n=3, grammar=GRAMMAR, logprobs=2, seed=seed, **way) for seed, way in enumerate(ways)
    ]
    llm = load(folder, context_length=2040)
    outputs = llm.generate(["hello"] * len(params), params)
    for output in outputs:
        for completion in output.completions:
            assert completion.finish_reason == "stop"
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            check(completion.text)
    llm.engine.scheduler.check_integrity()


def test_a_constrained_answer_does_not_change_its_neighbours(folder: Path) -> None:
    llm = load(folder)
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = llm.generate("hello world", free).pop().token_ids
    constrained = SamplingParams(max_tokens=40, temperature=0.0, grammar=WORD)
    outputs = llm.generate(["hello world", "hello world"], [free, constrained])
    assert outputs[0].token_ids == alone
    assert json.loads(outputs[1].text) in ("yes", "no")
    assert outputs[1].finish_reason == "stop"


def test_a_grammar_that_is_not_done_ends_with_length(folder: Path) -> None:
    (output,) = load(folder).generate("x", SamplingParams(max_tokens=3, temperature=0.0, grammar=GRAMMAR))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3


def test_min_tokens_gives_way_to_a_grammar_that_is_done(folder: Path) -> None:
    (output,) = load(folder).generate("x", SamplingParams(max_tokens=64, min_tokens=60, temperature=0.0, grammar=WORD))
    assert output.finish_reason == "stop"
    assert json.loads(output.text) in ("yes", "no")
    assert len(output.token_ids) < 20


def test_preemption_changes_nothing(folder: Path) -> None:
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=5, grammar=GRAMMAR)
    prompts = [f"prompt {index}" for index in range(4)]
    roomy = load(folder, disable_prefix_cache=True)
    expected = [output.text for output in roomy.generate(prompts, params)]
    longest = max(len(output.token_ids) for output in roomy.generate(prompts, params))
    tight = LLM(folder, dtype="float32", page_size=8, max_total_tokens=8 * ((longest + 20) // 8 + 3), disable_prefix_cache=True)
    assert [output.text for output in tight.generate(prompts, params)] == expected
    assert tight.engine.scheduler.counters.preemptions > 0
    for text in expected:
        check(text)


def test_a_grammar_may_begin_later(folder: Path) -> None:
    grammar = Grammar.json_schema(SCHEMA, begin_after="e")
    (output,) = load(folder).generate("x", SamplingParams(max_tokens=1500, temperature=1.0, seed=1, grammar=grammar))
    thought, tag, answer = output.text.partition("e")
    assert tag
    assert thought
    assert output.finish_reason == "stop"
    check(answer)


def test_what_a_sequence_held_goes_with_it(folder: Path) -> None:
    class Watched(Free):
        pass

    class Compiler:
        def __init__(self) -> None:
            self.made: list[weakref.ref[Watched]] = []

        def compile(self, grammar: Grammar) -> Constraint:
            constraint = Watched()
            self.made.append(weakref.ref(constraint))
            return constraint

    engine = load(folder).engine
    engine.grammar_compiler = compiler = Compiler()
    for index in range(20):
        engine.add(engine.make_request(f"r{index}", [5, 6], SamplingParams(max_tokens=4, grammar=WORD)))
    engine.step()
    assert sum(item() is not None for item in compiler.made) == 20
    for index in range(10):
        engine.abort(f"r{index}")
    while engine.has_work:
        engine.step()
    gc.collect()
    assert [item() for item in compiler.made if item() is not None] == []


def test_a_grammar_that_breaks_down_ends_its_request_alone(folder: Path) -> None:
    class Compiler:
        def compile(self, grammar: Grammar) -> Constraint:
            return Fixed(vocab_size=300)

    engine = load(folder).engine
    engine.grammar_compiler = Compiler()
    engine.add(engine.make_request("broken", [5, 6], SamplingParams(grammar=WORD, logprobs=1)))
    engine.add(engine.make_request("other", [5, 6], SamplingParams(max_tokens=3, ignore_eos=True)))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    (broken,) = [event for event in events if event.request_id == "broken"]
    assert (broken.token_id, broken.finish_reason, broken.failure) == (None, "abort", "a limit")
    assert [event.finish_reason for event in events if event.request_id == "other"] == [None, None, "length"]


def test_without_a_compiler_a_grammar_is_refused(folder: Path) -> None:
    engine = load(folder).engine
    request = engine.make_request("r", [5, 6], SamplingParams(grammar=WORD))
    engine.grammar_compiler = None
    for refused in (lambda: engine.add(request), lambda: engine.make_request("r", [5], SamplingParams(grammar=WORD))):
        with pytest.raises(InputError, match="grammar: got a json_schema; expected none: this engine has no grammar compiler"):
            refused()
    assert not engine.has_work


def test_a_bad_grammar_is_refused_at_the_call(folder: Path) -> None:
    llm = load(folder)
    with pytest.raises(InputError, match=r"grammar\.properties\.a\.not: got a keyword that is not supported"):
        llm.generate("x", SamplingParams(grammar=Grammar.json_schema({"properties": {"a": {"not": {}}}})))
    assert not llm.engine.has_work


def test_smollm2_answers_in_json(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, max_total_tokens=1024)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, temperature=0.0, grammar=Grammar.json_schema(schema))
    output = llm.chat([{"role": "user", "content": "Which country is the city of Paris in? Answer in JSON."}], params)
    assert output.finish_reason == "stop"
    value = json.loads(output.text)
    assert value["city"] == "Paris"
    assert value["country"] == "France"
