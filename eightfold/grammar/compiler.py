"""Grammars made into masks over a model's tokens, by llguidance."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from eightfold.errors import InputError
from eightfold.grammar.beginning import Beginning, Opening
from eightfold.grammar.schema import check_schema
from eightfold.text import Tokenizer
from eightfold.types import Constraint, Grammar

# Between the parts of a JSON text. Without a bound, a model that has lost its way writes spaces until its tokens are spent.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_MOST_COMPILED = 64
# Models put an empty line behind their reasoning, which may take two tokens and is not the grammar's.
_MOST_BREAKS = 2
_SILENT = 0
# What llguidance calls the ends that are no fault of its own, and those that are its limits.
_STOP = re.compile(r"^Stop: (\w+)$", re.MULTILINE)
_LIMITS = {
    "LexerTooComplex": "the limit of work on its regular expressions",
    "ParserTooComplex": "the limit of work on its rules",
    "MaxTokensTotal": "the limit of tokens",
    "MaxTokensParser": "the limit of tokens",
}


def check_grammar(grammar: Grammar) -> None:
    """Refuse a grammar that cannot be used with any model. A grammar in Lark is checked without the model's special tokens.

    Args:
        grammar: what an answer is to be.

    Raises:
        InputError: a schema keyword that is not supported, a text that does not compile, or llguidance is not installed. `what`
            is the grammar's name, or the path of the keyword.
    """
    library = _library()
    _check_valid(library, _source(library, grammar), None, grammar.name)


class GrammarCompiler:
    """Compiles grammars for one model. llguidance's view of the tokenizer is made with the first grammar; it takes a second.

    Args:
        tokenizer: the model's.
        vocab_size: width of its logits; ids that the tokenizer does not know are never allowed.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int] | frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._beginnings: dict[str, Beginning] = {}
        self._openings: dict[tuple[str, str], Opening] = {}

    def warm_up(self) -> None:
        """Do now what the first grammar would wait for.

        Raises:
            InputError: llguidance is not installed, or cannot read the tokenizer.
        """
        with self._lock:
            self._make_tokens()

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint for one sequence. Grammars that were seen lately are not compiled again.

        Raises:
            InputError: a schema keyword that is not supported, a text that does not compile or that no answer fits, a model
                without end tokens, or llguidance is not installed.
        """
        with self._lock:
            self._make_tokens()
            matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            matcher = self._matcher(grammar)  # may take seconds, in which other threads take those that are ready
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            beginning = self._beginning(grammar.begin_after) if grammar.begin_after else None
            opening = self._opening(grammar) if grammar.opened_by else None
            return _MatcherConstraint(matcher.deep_copy(), beginning, opening)

    def _make_tokens(self) -> None:
        if self._tokens is not None:
            return
        library = _library()
        if not self._eos_token_ids:
            raise InputError("grammar", got="a model without end tokens", expected="one whose answers can end")
        size = max(self._vocab_size, self._tokenizer.size)
        try:
            self._tokens = library.LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=self._eos_token_ids)
        except Exception as error:  # the library raises ValueError, and the bare Exception of its parser
            raise InputError("grammar", got=f"a tokenizer that llguidance cannot read ({error})", expected="another") from error

    def _matcher(self, grammar: Grammar) -> Any:
        library = _library()
        source = _source(library, grammar)
        _check_valid(library, source, self._tokens, grammar.name)
        matcher = library.LLMatcher(self._tokens, source, log_level=_SILENT)
        if matcher.is_error():
            raise _does_not_compile(grammar.name, matcher.get_error())
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise InputError(grammar.name, got=_failure(first.get_error()), expected="one that some answer fits")
        return matcher

    def _beginning(self, tag: str) -> Beginning:
        found = self._beginnings.get(tag)
        if found is None:
            found = self._beginnings[tag] = Beginning(tag, self._tokenizer, self._vocab_size, self._eos_token_ids)
            if len(self._beginnings) > _MOST_COMPILED:
                del self._beginnings[next(iter(self._beginnings))]
        return found

    def _opening(self, grammar: Grammar) -> Opening:
        key = (grammar.opened_by, grammar.begin_after)
        found = self._openings.get(key)
        if found is None:
            found = self._openings[key] = Opening(*key, self._tokenizer, self._vocab_size, self._eos_token_ids)
            if len(self._openings) > _MOST_COMPILED:
                del self._openings[next(iter(self._openings))]
        return found


class _MatcherConstraint:
    """One sequence's way through a grammar.

    It waits for the reasoning's end, where there is reasoning, and follows the grammar from there on. While it is open whether
    there will be any, it follows the grammar and the tag that opens the reasoning at once.

    Args:
        matcher: at the grammar's start.
        beginning: knows the text after which the grammar begins.
        opening: knows the text without which it begins at once.
    """

    def __init__(self, matcher: Any, beginning: Beginning | None, opening: Opening | None = None) -> None:
        self._matcher = matcher
        self._beginning = beginning
        self._opening = opening
        self._waits = beginning is not None and opening is None
        self._num_opened = 0  # bytes of the opening that have come
        self._fits = True  # whether what has come of the opening is the grammar's too
        self._breaks_left = _MOST_BREAKS if opening is not None else 0
        self._tail = b""
        self._num_taken = 0

    def mask(self, token_ids: Sequence[int]) -> bytes | None:
        """Which tokens may follow an answer; none of them where llguidance gave up."""
        for token_id in token_ids[self._num_taken :]:
            self._take(token_id)
        self._num_taken = len(token_ids)
        if self._waits and self._beginning is not None:
            return self._beginning.mask(self._tail)
        mask = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error() or not self._fits:
            mask = bytes(len(mask))
        elif self._breaks_left and self._beginning is not None:
            mask = self._beginning.with_breaks(mask)
        return mask if self._opening is None else self._opening.joined(mask, self._num_opened)

    @property
    def failure(self) -> str:
        """Why no token may follow; empty while llguidance goes on."""
        return _failure(self._matcher.get_error()) if self._matcher.is_error() else ""

    def _take(self, token_id: int) -> None:
        if self._waits and self._beginning is not None:
            self._tail, ended = self._beginning.advance(self._tail, token_id)
            self._waits, self._breaks_left = not ended, _MOST_BREAKS if ended else 0
            return
        is_break = self._breaks_left > 0 and self._beginning is not None and self._beginning.is_break(token_id)
        if is_break and self._matcher.validate_tokens([token_id]) == 0:
            self._breaks_left -= 1
            return
        self._breaks_left = 0
        if self._opening is not None and self._opens(token_id, self._opening):
            return
        self._matcher.consume_token(token_id)

    def _opens(self, token_id: int, opening: Opening) -> bool:
        """Take a token while it is open whether the answer thinks; False where the token is for the grammar to take."""
        num_opened = opening.advance(self._num_opened, token_id)
        if num_opened is None:
            self._opening = None
            return False
        if opening.is_whole(num_opened):
            self._opening, self._waits, self._fits = None, True, True
            self._matcher.reset()
            return True
        self._num_opened = num_opened
        self._fits = self._fits and self._matcher.validate_tokens([token_id]) == 1
        return not self._fits


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise InputError(
            "grammar",
            got="an installation without llguidance",
            expected="llguidance, which enforces grammars",
            remedy="pip install 'eightfold[server]' brings it.",
        ) from error


def _source(library: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    what = grammar.name
    if grammar.kind == "lark":
        return str(library.LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "regex":
        return str(library.LLMatcher.grammar_from_regex(grammar.text))
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InputError(what, got=f"broken JSON ({error})", expected="a JSON schema") from error
    check_schema(schema, what)
    if schema is False:
        raise InputError(what, got="false, under which nothing is valid", expected="a JSON schema")
    try:
        return str(
            library.LLMatcher.grammar_from_json_schema("{}" if schema is True else grammar.text, overrides=_JSON_OPTIONS)
        )
    except ValueError as error:
        raise _does_not_compile(what, str(error)) from error


def _check_valid(library: Any, source: str, tokens: Any, what: str) -> None:
    is_error, messages = library.LLMatcher.validate_grammar_with_warnings(source, tokens)
    if is_error:
        raise _does_not_compile(what, messages[0])


def _does_not_compile(what: str, message: str) -> InputError:
    first = " ".join(message.split())
    got = first if len(first) <= 200 else f"{first[:200]}..."
    return InputError(what, got=got, expected="one that can be enforced while an answer is generated")


def _failure(error: str) -> str:
    """In a sentence what llguidance says in many lines, some of which have the answer's text."""
    first, stop = error.split("\n", 1)[0].strip(), _STOP.search(error)
    if "doesn't satisfy the grammar" in first:
        return "a token that the grammar does not take"
    if stop is not None and stop[1] in _LIMITS:
        return f"a grammar that runs into {_LIMITS[stop[1]]} ({first})"
    if stop is None and first and "NoExtension" not in first:
        return f"a grammar that cannot go on ({first[:200]})"
    return "a grammar that comes to where no token leads on"
