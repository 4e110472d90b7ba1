"""From logits to tokens.

Each row is a function of its own logits, parameters, seed and position alone: never of what else is in the batch, and the
same again when a preempted sequence is recomputed. A row that samples draws one uniform number from a counter-based generator
(splitmix64 over seed and position) and inverts the cumulative distribution with it.

The order is that of transformers: logit bias, bans and the grammar's mask, penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import MappingProxyType

import torch
from torch import Tensor

from eightfold.engine.constraints import Masks, allowed
from eightfold.types import SamplingParams, Sequence, TokenLogprobs

# Sorting the likeliest tokens is enough for most rows; the others sort the whole vocabulary.
_SORTED_PREFIX = 1024
_MASK64 = (1 << 64) - 1


def sample(
    logits: Tensor, sequences: SequenceOf[Sequence], eos_token_ids: frozenset[int], masks: Masks = MappingProxyType({})
) -> list[int | None]:
    """Choose the next token of each sequence; None where its grammar allows none.

    Args:
        logits: `[num_seqs, vocab_size]`, of any float dtype.
        sequences: the sequences that the rows belong to, their tokens so far included.
        eos_token_ids: the model's end tokens, which `min_tokens` holds back.
        masks: of the sequences that have a grammar; waited for here.
    """
    wide = logits.float()
    tokens: list[int | None] = []
    greedy = wide.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        plain = wide[row]
        mask = masks[sequence].result() if sequence in masks else None
        permitted = None if mask is None else allowed(mask, len(plain)).to(plain.device)
        if permitted is not None and not permitted.any():
            tokens.append(None)
            continue
        adjusted = _adjust(plain, sequence, eos_token_ids, permitted)
        if params.temperature == 0.0:
            tokens.append(greedy[row] if adjusted is plain else int(adjusted.argmax()))
        else:
            tokens.append(_draw(adjusted, params, uniform(sequence.request.seed, len(sequence.token_ids))))
    return tokens


def token_logprobs(logits: Tensor, token_ids: SequenceOf[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of the given tokens under the model's own distribution.

    Args:
        logits: `[n, vocab_size]`, as the model gave them.
        token_ids: one token for each row.
        num_top: how many of the likeliest tokens to list.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=1) + 1
    values, indices = logprobs.topk(num_top, dim=-1)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, rank, top_ids, top_values in zip(
            token_ids, chosen.squeeze(1).tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the two arguments alone: splitmix64's output function over their mix."""
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def _adjust(logits: Tensor, sequence: Sequence, eos_token_ids: frozenset[int], permitted: Tensor | None) -> Tensor:
    """Logits `[vocab_size]` after bias, penalties, bans and the grammar's mask; the same tensor where nothing applies."""
    params = sequence.request.params
    banned = sorted(eos_token_ids | set(params.stop_token_ids)) if sequence.num_output_tokens < params.min_tokens else []
    penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (banned or penalised or params.logit_bias or permitted is not None):
        return logits
    logits = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
    if permitted is None:
        logits[banned] = float("-inf")
    else:
        logits.masked_fill_(~_without(permitted, banned), float("-inf"))
    return _penalise(logits, sequence) if penalised else logits


def _without(permitted: Tensor, banned: list[int]) -> Tensor:
    """Tokens `[vocab_size]` that a grammar permits, without those that are banned unless nothing else is left."""
    rest = permitted.clone()
    rest[banned] = False
    return rest if rest.any() else permitted


def _penalise(logits: Tensor, sequence: Sequence) -> Tensor:
    """Apply the three penalties in place. Repetition looks at prompt and output, as in CTRL; the others at the output alone."""
    params = sequence.request.params
    if params.repetition_penalty is not None and params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if output:
        ids, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """Invert the cumulative distribution of logits `[vocab_size]` at `number`, after temperature and truncation."""
    top_k, top_p, min_p = params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0
    probabilities = (logits.double() / (params.temperature or 1.0)).softmax(dim=-1)
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        return _invert(probabilities, number)
    prefix = min(_SORTED_PREFIX, len(probabilities))
    values, indices = probabilities.topk(prefix)
    covers = 0 < top_k <= prefix or float(values.sum()) >= top_p or float(values[-1]) < min_p * float(values[0])
    if not covers:
        values, indices = probabilities.sort(descending=True, stable=True)
    if top_k > 0:
        values = values[:top_k]
    before = values.cumsum(dim=0) - values  # mass of the likelier tokens
    keep = (before < top_p * (values.sum() if top_k > 0 else 1.0)) & (values >= min_p * values[0])
    return int(indices[_invert(values[keep], number)])


def _invert(weights: Tensor, number: float) -> int:
    """The index at which the running sum of `weights` passes `number` times their total."""
    cumulative = weights.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * number, right=True))
    return min(index, len(weights) - 1)
