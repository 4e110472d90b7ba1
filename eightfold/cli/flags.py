"""Command-line flags from the fields of configurations and `SamplingParams`: one field, one flag, the same name with dashes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import typer

from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.server.config import ServerConfig
from eightfold.types import SamplingParams

# EngineConfig has a seed too; on the command line that one serves for both. A grammar is more than a flag can hold.
_NOT_SAMPLING = ("seed", "grammar")
_SAMPLING_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({"max_tokens": ("--max-new-tokens",)})
_MODEL_HELP = "What to load: a folder, a hub id, or an alias such as smollm2."

Verbose: TypeAlias = Annotated[
    bool, typer.Option("--verbose", help="Print to stderr what was decided for every option, and why.")
]
"""The flag of the commands that load a model."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line said.

    Attributes:
        options: the fields of `EngineConfig` that it named, the model among them: keywords for `LLM`.
        params: how to sample.
        config: the same options as a checked configuration.
        server: what it said about the server.
        named: the fields of `EngineConfig` whose flags were given, as against a default of the command's own.
    """

    options: Mapping[str, Any]
    params: SamplingParams
    config: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    named: frozenset[str] = frozenset()


def takes_flags(
    *,
    engine: tuple[str, ...] | None = None,
    sampling: bool = True,
    server: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function, with MODEL and generated flags before its own parameters.

    The function is called with a `Given` and with its own parameters by name. Where it has a parameter `prompts`, words after
    MODEL go there; with `--model-path` all of them do.

    Args:
        engine: names of the fields of `EngineConfig` to offer; None is all.
        sampling: whether to offer the fields of `SamplingParams`.
        server: whether to offer the fields of `ServerConfig`.
        defaults: values that this command takes in place of a field's own default.
    """
    own_defaults = defaults or {}
    engine_fields = [item for item in fields(EngineConfig) if item.name != "model" and (engine is None or item.name in engine)]
    sampling_fields = [item for item in fields(SamplingParams) if sampling and item.name not in _NOT_SAMPLING]
    server_fields = [item for item in fields(ServerConfig) if server]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        def command(**values: Any) -> None:
            prompts = values.get("prompts")
            model = _model(values.pop("model"), values.pop("model_path"), prompts)
            named = frozenset(item.name for item in engine_fields if values[item.name] not in (None, []))
            options = {"model": model} | _take(engine_fields, values, own_defaults)
            params = SamplingParams(**_take(sampling_fields, values, own_defaults))
            said: dict[str, Any] = _take(server_fields, values, own_defaults)
            lists: dict[str, Any] = {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
            served = ServerConfig(**(said | lists))
            function(Given(options, params, EngineConfig(**options), served, named), **values)

        generated = [
            *(_parameter(item, EngineConfig, item.metadata["help"], own_defaults, "Engine") for item in engine_fields),
            *(_parameter(item, SamplingParams, _documented(item.name), own_defaults, "Sampling") for item in sampling_fields),
            *(_parameter(item, ServerConfig, item.metadata["help"], own_defaults, "Server") for item in server_fields),
        ]
        named = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
        command.__signature__ = inspect.Signature([*_model_parameters(), *named, *generated])  # type: ignore[attr-defined]
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        return command

    return decorate


def flag_names(item: Field[Any]) -> tuple[str, ...]:
    """The spellings of a field's flag, the field's own first."""
    aliases = item.metadata.get("aliases", _SAMPLING_ALIASES.get(item.name, ()))
    return (f"--{item.name.replace('_', '-')}", *aliases)


def _model_parameters() -> list[inspect.Parameter]:
    argument = typer.Argument(None, metavar="MODEL", help=_MODEL_HELP, show_default=False)
    (model_field,) = (item for item in fields(EngineConfig) if item.name == "model")
    option = typer.Option(None, *model_field.metadata["aliases"], help="The same as MODEL.", show_default=False)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter("model", kind, default=argument, annotation=str | None),
        inspect.Parameter("model_path", kind, default=option, annotation=str | None),
    ]


def _model(positional: str | None, option: str | None, prompts: list[str] | None) -> str:
    if option is None:
        if positional is None:
            raise InputError("MODEL", got="nothing", expected="a folder, a hub id, or an alias such as smollm2")
        return positional
    if positional is not None:
        if prompts is None:
            raise InputError("MODEL", got=f"{positional} and --model-path {option}", expected="one of the two")
        prompts.insert(0, positional)
    return option


def _parameter(item: Field[Any], owner: type, help_text: str, defaults: Mapping[str, Any], panel: str) -> inspect.Parameter:
    """The parameter from which typer makes the flag. Its default is None, "not given", so that the class decides."""
    hint = get_type_hints(owner)[item.name]
    names = flag_names(item)
    default = defaults.get(item.name, item.default if item.default is not MISSING else None)
    if hint is bool and default is True:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:])
    shown = "" if default in (None, False, (), "") else f" [default: {str(default).lower()}]"
    choices = item.metadata.get("choices", ())
    kind = _flag_type(hint)
    option = typer.Option(
        None,
        *names,
        help=help_text + shown,
        metavar="ID=BIAS" if get_origin(hint) is Mapping else "|".join(choices) or _METAVARS.get(kind),
        parser=_PARSERS.get(kind),
        show_default=False,
        rich_help_panel=panel,
    )
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _flag_type(hint: Any) -> Any:
    """The type that the command line parses: words that must be one of several are checked by the class itself."""
    if get_origin(hint) is Mapping:
        return list[str]
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return next((kind for kind in (bool, int, float) if hint is kind or kind in get_args(hint)), str)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"got {text}; expected a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"got {text}; expected a number") from None


# The parsers of typer do not name the value that they refuse.
_PARSERS: Mapping[object, Callable[[str], Any]] = MappingProxyType(
    {int: _whole_number, list[int]: _whole_number, float: _number}
)
_METAVARS: Mapping[object, str] = MappingProxyType({int: "INTEGER", list[int]: "INTEGER", float: "NUMBER"})


def _take(items: list[Field[Any]], values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the flags of these fields from `values`; those that were given or have a default of the command's own."""
    taken = {item.name: values.pop(item.name) for item in items}
    given = {name: value for name, value in taken.items() if value not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(pair) for pair in given["logit_bias"])
    if "quantization_ignored_layers" in given:
        # SGLang's lists are one word with commas.
        given["quantization_ignored_layers"] = tuple(
            name for text in given["quantization_ignored_layers"] for name in text.split(",") if name
        )
    named = {item.name for item in items}
    return {name: value for name, value in defaults.items() if name in named} | given


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InputError("--logit-bias", got=pair, expected="a token id and a number, such as 42=-100") from None


def _documented(name: str) -> str:
    """What the docstring of `SamplingParams` says of one attribute."""
    match = re.search(rf"^ *{name}: (.+)$", SamplingParams.__doc__ or "", re.MULTILINE)
    text = match.group(1).replace("`", "") if match else ""
    return text[:1].upper() + text[1:]
