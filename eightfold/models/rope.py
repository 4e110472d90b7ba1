"""How a `config.json` describes its rotary embedding: in two spellings, with keys that depend on the type.

The old spelling has `rope_theta`, and `rope_scaling` with "type" or "rope_type"; transformers 5 writes one `rope_parameters`. A
file may have both where they agree. A parameter that its type does not have is refused: it was meant to do something.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from eightfold.layers.rotary import RopeConfig, RopeType
from eightfold.models.hf_config import ConfigReader

ROPE_KEYS: Mapping[RopeType, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        "dynamic": ("factor",),
    }
)
# What any type may have beside its own keys; "finetuned" is a remark of some yarn checkpoints.
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def read_rope(reader: ConfigReader, *, head_dim: int, max_positions: int, default_theta: float) -> RopeConfig:
    """The rotation of whole heads.

    Args:
        reader: the whole configuration.
        head_dim: width of a head.
        max_positions: the configuration's `max_position_embeddings`.
        default_theta: what the model type has where the configuration has no `rope_theta`.

    Raises:
        CheckpointError: a type that is not supported, a key that the type lacks or does not have, or statements that disagree.
    """
    rope = _rope_section(reader)
    type_key = "type" if "type" in rope.values else "rope_type"
    rope_type = cast("RopeType", rope.choice(type_key, ROPE_KEYS, "default"))
    known = (*COMMON_KEYS, *ROPE_KEYS[rope_type])
    for key in rope.values:
        if key not in known:
            rope.refuse(key, f"only keys of rope type {rope_type}: {', '.join(known)}")
    partial = _holder(reader, rope, "partial_rotary_factor")
    if partial.values.get("partial_rotary_factor", 1) not in (None, 1):
        # Of the libraries that serve these families some rotate a part and some, transformers too, whole heads, in silence.
        partial.refuse("partial_rotary_factor", "1, since these model types rotate whole heads")
    if head_dim % 2 or (head_dim == 2 and rope_type == "dynamic"):
        reader.refuse("head_dim", f"an even number that rope type {rope_type} can rotate", got=str(head_dim))
    parameters = {key: _parameter(reader, rope, key, max_positions) for key in ROPE_KEYS[rope_type]}
    if rope_type == "dynamic":
        parameters["original_max_position_embeddings"] = max_positions
    for more, less in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        if more in parameters and parameters[more] <= parameters[less]:
            rope.refuse(more, f"more than {less}, {parameters[less]:g}", got=f"{parameters[more]:g}")
    theta = _holder(reader, rope, "rope_theta").number("rope_theta", default_theta, minimum=2)
    return RopeConfig(type=rope_type, theta=theta, rotary_dim=head_dim, **parameters)


def context_length(rope: RopeConfig, max_positions: int) -> int:
    """The longest sequence that a checkpoint with this rotation is made for.

    - linear: `max_position_embeddings` times `factor`. Some files state the product there already, and no key tells them
      apart; a shorter length can be asked for.
    - yarn: `original_max_position_embeddings` times `factor`, or `max_position_embeddings` where that is more.
    - dynamic: `max_position_embeddings`, the original length, within which the scaling changes nothing, for the reason that
      `layers.rotary` gives.
    - default and llama3: `max_position_embeddings`, which has the factor of llama3 inside.
    """
    match rope.type:
        case "linear":
            return int(max_positions * rope.factor)
        case "yarn":
            return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
        case _:
            return max_positions


def _rope_section(reader: ConfigReader) -> ConfigReader:
    """The object that configures the rotation, by the name under which the file has it; both spellings merged into one."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            reader.refuse(f"rope_scaling.{key}", f"the same as rope_parameters.{key}, {new[key]!r}", got=repr(old[key]))
    rope = ConfigReader(new | old, "rope_parameters" if new else "rope_scaling")
    kinds = {rope.values[key] for key in ("type", "rope_type") if isinstance(rope.values.get(key), str)}
    if len(kinds) == 2:
        rope.refuse("type", f"the same as rope_type, {rope.values['rope_type']!r}")
    return rope


def _holder(reader: ConfigReader, rope: ConfigReader, key: str) -> ConfigReader:
    """Whichever object has a key that may lie inside or outside. In transformers the inner one counts; here two must agree."""
    inner, outer = rope.values.get(key), reader.values.get(key)
    if None not in (inner, outer) and inner != outer:
        reader.refuse(key, f"the same as {rope.name}.{key}, {inner}")
    return reader if inner is None and outer is not None else rope


def _parameter(reader: ConfigReader, rope: ConfigReader, key: str, max_positions: int) -> Any:
    match key:
        case "factor":
            return rope.number(key, minimum=1)
        case "original_max_position_embeddings":
            return _holder(reader, rope, key).integer(key, max_positions)
        case "low_freq_factor" | "high_freq_factor":
            return rope.number(key)
        case "beta_fast" | "beta_slow":
            return rope.number(key, {"beta_fast": 32.0, "beta_slow": 1.0}[key])
        case "truncate":
            return rope.flag(key, True)
        case _:
            return rope.number_or_none(key)
