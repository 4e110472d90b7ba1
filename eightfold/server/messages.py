"""From a chat's body to the messages that a template takes, and from there to token ids.

A chat template is a program that comes with the checkpoint, and a request chooses its input. It runs in transformers' sandbox,
in a thread of its own, for a limited time.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from eightfold.errors import InputError
from eightfold.grammar.schema import check_shape
from eightfold.server.fields import refuse_unknown, shown
from eightfold.server.protocol import ChatBody
from eightfold.text import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEMPLATE_SECONDS = 5.0
"""How long a chat template may take."""

_OTHER_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")
_EFFORT = "reasoning_effort"
_TOOL_ROLES = ("tool", "function")
# Clients give a message of the assistant back as they got it, with fields of other servers in it, and name speakers whom a
# template does not tell the model of. So the keys of a message that nothing reads are passed over; those of its parts are not.
_DROPPED = ("refusal", "annotations", "audio", "function_call", "cache_control", "reasoning")
_PART_FIELDS = ("type", "text", "refusal", "annotations", "cache_control")
_CALL_FIELDS = ("id", "type", "function", "index")
_TOOL_FIELDS = ("type", "function", "cache_control")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")

T = TypeVar("T")


async def encode_chat(
    tokenizer: Tokenizer, body: ChatBody, *, with_tools: bool, seconds: float = TEMPLATE_SECONDS
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: has the chat template.
        body: what was asked.
        with_tools: whether the model is told of the tools.
        seconds: how long the template may take.

    Raises:
        InputError: messages that are malformed or that the template does not take, and a template that takes too long. `what`
            is the field's path.
    """
    messages = template_messages(tokenizer, body)
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        if not tokenizer.template_mentions(_EFFORT):
            raise InputError(_EFFORT, got=body.reasoning_effort, expected="nothing: the model's chat template does not read it")
        variables[_EFFORT] = body.reasoning_effort

    def work() -> list[int]:
        return tokenizer.encode_chat(
            messages,
            tools=body.tools if with_tools else (),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=variables,
        )

    try:
        return await in_limited_time(work, seconds)
    except TimeoutError as error:
        raise InputError(
            "messages",
            got=f"a chat template that ran for more than {seconds:g} s",
            expected="messages that it is done with sooner",
        ) from error
    except InputError as error:
        if error.what.startswith("chat message"):
            raise InputError("messages", got=error.got, expected=error.expected, remedy=error.remedy) from error
        raise


def template_messages(tokenizer: Tokenizer, body: ChatBody) -> list[dict[str, Any]]:
    """The messages as chat templates know them: texts for contents, and objects for the arguments of tool calls.

    Raises:
        InputError: no messages, an unknown role, a content that is no text. `what` is the field's path.
    """
    if not body.messages:
        raise InputError("messages", got="an empty list", expected="at least one message")
    if body.continue_final_message:
        if body.messages[-1].get("role") != "assistant":
            raise InputError("continue_final_message", got=True, expected="a last message of the assistant to go on from")
        if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
            raise InputError("continue_final_message", got=True, expected="false, or add_generation_prompt false beside it")
    return [_message(tokenizer, message, f"messages[{index}]") for index, message in enumerate(body.messages)]


def _message(tokenizer: Tokenizer, given: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = given.get("role")
    if role not in ROLES:
        raise InputError(f"{path}.role", got=shown(role), expected=f"one of {', '.join(ROLES)}")
    _check_message(tokenizer, role, given, path)
    message = {name: value for name, value in given.items() if value is not None and name not in _DROPPED}
    if given.get("reasoning") is not None:
        message.setdefault("reasoning_content", given["reasoning"])
    calls, content = message.get("tool_calls"), given.get("content")
    if content is None and role == "assistant":
        content = given.get("refusal")
    # Many templates pass over a role that they do not know without a word.
    if role == "developer" and not tokenizer.template_mentions("developer"):
        message["role"] = "system"
    message["content"] = _content(content, f"{path}.content", optional=role == "assistant" and bool(calls))
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return message


def _check_message(tokenizer: Tokenizer, role: str, given: Mapping[str, Any], path: str) -> None:
    """Refuse fields of the wrong type, and those that the model would not be told of."""
    for name, kinds, expected in _MESSAGE_TYPES:
        if (value := given.get(name)) is not None and not isinstance(value, kinds):
            raise InputError(f"{path}.{name}", got=shown(value), expected=expected)
    for name in ("audio", "function_call"):
        if given.get(name) is not None:
            raise InputError(f"{path}.{name}", got=shown(given[name]), expected="null: it is not supported")
    if (role in _TOOL_ROLES or given.get("tool_calls")) and tokenizer.has_chat_template and not _takes_tools(tokenizer):
        got = f'a message of the role "{role}"' if role in _TOOL_ROLES else f"{len(given['tool_calls'])} calls"
        what = f"{path}.role" if role in _TOOL_ROLES else f"{path}.tool_calls"
        raise InputError(what, got=got, expected="none: the model's chat template takes no tools")


_MESSAGE_TYPES: tuple[tuple[str, type, str], ...] = (
    ("name", str, "a text"),
    ("tool_calls", list, "a list of calls"),
    ("tool_call_id", str, "the id of a call"),
    ("refusal", str, "a text, or null"),
    ("annotations", list, "a list, or null"),
    ("reasoning_content", str, "a text, or null"),
    ("reasoning", str, "a text, or null"),
    ("cache_control", dict, "an object, or null"),
)


def _takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has a place for calls and their results."""
    return any(tokenizer.template_mentions(word) for word in ("tools", "tool_calls", "tool"))


def _content(content: object, path: str, *, optional: bool) -> str:
    """The text of a content: a text, or a list of parts of text, which become lines."""
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))
    raise InputError(path, got=shown(content), expected="a text, or a list of parts of text")


def _part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", "refusal"):
        refuse_unknown(part, _PART_FIELDS, path)
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise InputError(f"{path}.text", got=shown(text), expected="a text")
    if kind in _OTHER_MEDIA:
        raise InputError(f"{path}.type", got=kind, expected="text: images, audio, video and files are not supported")
    raise InputError(path, got=shown(part), expected='a part such as {"type": "text", "text": "..."}')


def _tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn. OpenAI has their arguments as a text of JSON, templates as an object."""
    if not isinstance(calls, list):
        raise InputError(path, got=shown(calls), expected="a list of calls")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(path, got=shown(call), expected='a call such as {"function": {"name": "...", "arguments": "{}"}}')
    refuse_unknown(call, _CALL_FIELDS, path)
    refuse_unknown(function, ("name", "arguments"), f"{path}.function")
    if call.get("type", "function") != "function":
        raise InputError(f"{path}.type", got=shown(call["type"]), expected='"function"')
    if not isinstance(call.get("id", ""), str):
        raise InputError(f"{path}.id", got=shown(call["id"]), expected="a text")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InputError(f"{path}.function.arguments", got=f"broken JSON ({error})", expected="a JSON object") from error
    if not isinstance(arguments, Mapping | None):
        raise InputError(f"{path}.function.arguments", got=shown(arguments), expected="a JSON object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


async def in_limited_time(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns, run in a thread of its own; where it takes too long, it is ended there.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result where there is no error

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # the thread's end is told to whoever waits, whatever it is
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(done, seconds)
    finally:
        if thread.is_alive() and thread.ident is not None and not (done.done() and not done.cancelled()):
            # A loop in a template is Python's bytecode, and the one way to end it from outside is to raise within it.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeoutError))


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools that are not of OpenAI's shape.

    Raises:
        InputError: naming the field.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        refuse_unknown(tool, _TOOL_FIELDS, path)
        if tool.get("type") != "function":
            raise InputError(f"{path}.type", got=shown(tool.get("type")), expected='"function"')
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InputError(f"{path}.function", got=shown(function), expected='an object with a "name"')
        refuse_unknown(function, _FUNCTION_FIELDS, f"{path}.function")
        for name, kind, expected in (("description", str, "a text"), ("strict", bool, "true or false")):
            if (value := function.get(name)) is not None and not isinstance(value, kind):
                raise InputError(f"{path}.function.{name}", got=shown(value), expected=expected)
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise InputError(f"{path}.function.parameters", got=shown(parameters), expected="a JSON schema")
        check_shape(parameters or {}, f"{path}.function.parameters")
        if function["name"] in names:
            raise InputError(f"{path}.function.name", got=repr(function["name"]), expected="a name of its own")
        names.add(function["name"])
