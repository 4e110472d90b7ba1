"""Which tensor of a checkpoint fills which part of a model, by names, shapes and what the configuration says of their form.

Everything is known from headers: no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from eightfold.errors import CheckpointError
from eightfold.layers.embedding import OutputHead
from eightfold.layers.module import Module
from eightfold.layers.weight import Part, Weight
from eightfold.models.causal_lm import CausalLM
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.stored import Stored, describe, scale_reasons, what_is_wrong_with_shape
from eightfold.quant.policy import Role

# Tensors that old checkpoints hold and that follow from the configuration.
_DERIVED = {r"rotary_emb\.inv_freq$": "follows from config.json"}


def match_part(checkpoint: Checkpoint, weight: Weight, part: Part) -> Stored:
    """What fills `part`, whose shape and dtype fit.

    Raises:
        CheckpointError: there is no such tensor, or it has another shape, dtype or form.
    """
    info = checkpoint.tensors.get(part.name)
    if info is None:
        present = next((name for name in checkpoint.tensors if name.endswith(part.name.rpartition(".layers.")[2])), None)
        remedy = f"The checkpoint has {present}." if present and present != part.name else ""
        raise CheckpointError(
            f"tensor {part.name}", got="no such tensor in the checkpoint", expected="it, by config.json", remedy=remedy
        )
    stored = describe(checkpoint, info, fused=weight.name, quantizable=weight.role in (Role.LINEAR, Role.EXPERTS))
    if info.shape != part.shape and weight.cut(part, info.shape) is None:
        raise CheckpointError(
            f"tensor {info.stored_name}",
            got=f"shape {list(info.shape)}",
            expected=f"{list(part.shape)}, by config.json",
            remedy=what_is_wrong_with_shape(stored, part.shape),
        )
    return stored


def check_agreement(weight: Weight, parts: Sequence[Stored]) -> None:
    """Refuse a fused weight whose parts are quantized differently.

    Raises:
        CheckpointError: naming the two.
    """
    odd = next((part for part in parts if part.form != parts[0].form), None)
    if odd is not None:
        forms = [f"{part.info.stored_name} ({', '.join(map(str, part.form))})" for part in (parts[0], odd)]
        raise CheckpointError(
            weight.name, got=" beside ".join(forms), expected="all parts in one form, since they are one fused tensor here"
        )


def tied_names(model: Module) -> dict[str, str]:
    """Names of tensors that share the weight of another, by config.json, and the name of that other."""
    heads = [module for module in model.modules() if isinstance(module, OutputHead)]
    return {f"{head.linear.name}.weight": head.embedding.source.name for head in heads if head.embedding is not None}


def account_for_rest(checkpoint: Checkpoint, used: Collection[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Reasons for the tensors that have no place in the model.

    Args:
        checkpoint: the files.
        used: names of the tensors that have one, scales among them.
        tied: as `tied_names` has it.

    Raises:
        CheckpointError: tensors that have neither a place nor a reason.
    """
    unused = _DERIVED | dict(checkpoint.unused)
    skipped: dict[str, str] = {}
    unexpected: list[str] = []
    scales = scale_reasons(checkpoint)
    for name, info in checkpoint.tensors.items():
        reason = next((why for pattern, why in unused.items() if re.search(pattern, info.stored_name)), None)
        if name in used:
            continue
        reason = reason or scales.get(name)
        if name in tied:
            skipped[info.stored_name] = f"tied to {tied[name]}"
        elif reason is not None:
            skipped[info.stored_name] = reason
        else:
            unexpected.append(info.stored_name)
    if unexpected:
        listed = ", ".join(unexpected[:5]) + ("..." if len(unexpected) > 5 else "")
        raise CheckpointError(
            f"{len(unexpected)} {'tensor' if len(unexpected) == 1 else 'tensors'} without a place in the model",
            got=listed,
            expected="none, by config.json",
            remedy="Check model_type, and the numbers of layers and of experts.",
        )
    return skipped


def survey(model: CausalLM, checkpoint: Checkpoint) -> tuple[tuple[tuple[Role, Stored], ...], tuple[CheckpointError, ...]]:
    """Match a model and a checkpoint as `plan` does, and go on after a fault, where `plan` stops at the first.

    Returns:
        How each tensor of the model is stored, and what is wrong with the others. Tensors that have no place in the model are
        looked for where nothing else is wrong.
    """
    found: list[tuple[Role, Stored]] = []
    faults: list[CheckpointError] = []
    used: set[str] = set()
    for weight in model.weights():
        weight.choose_spelling(checkpoint.tensors.__contains__)
        parts: list[Stored] = []
        try:
            for part in weight.parts:
                parts.append(match_part(checkpoint, weight, part))
            check_agreement(weight, parts)
        except CheckpointError as fault:
            faults.append(fault)
        found += [(weight.role, stored) for stored in parts if stored.info.name not in used]
        used.update(stored.info.name for stored in parts)
    if not faults:
        used.update(scale.name for _, stored in found for scale in stored.scales)
        try:
            account_for_rest(checkpoint, used, tied_names(model))
        except CheckpointError as fault:
            faults.append(fault)
    return tuple(found), tuple(faults)
