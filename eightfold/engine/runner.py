"""From a batch of ids to tensors, through the model, and back to tokens."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from eightfold.cache.pools import CachePool
from eightfold.engine.constraints import Masks, MaskWorkers
from eightfold.engine.loading import LoadedModel
from eightfold.engine.sampler import sample, token_logprobs
from eightfold.kernels.operations import AttentionMetadata, BatchMetadata, StateMetadata
from eightfold.types import Batch, Chunk, StepResult, TokenLogprobs


class Runner:
    """Runs batches on one model with one pool.

    Attributes:
        loaded: the model, and what it came from.
        model: the model itself.
        pool: its keys and values, and its recurrent states.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        """Make the caches of a loaded model."""
        self.loaded = loaded
        self.model = loaded.model
        config, layout, kernels = loaded.config, loaded.model.arch.layout, loaded.kernels
        self.pool = CachePool(
            layout,
            num_blocks=config.max_total_tokens // config.page_size,
            block_size=config.page_size,
            num_slots=config.max_mamba_cache_size,
            dtype=kernels.activation_dtype,
            state_dtype=kernels.state_dtype,
            device=kernels.hardware.device,
        )
        self._device = self.pool.device
        self._has_state = layout.has_state
        self._mask_workers = MaskWorkers()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute every chunk, write its keys and values, and choose a token for each chunk that reaches its sequence's end."""
        masks = self._mask_workers.start(batch)
        self._restore_states(batch)
        token_ids = [token for chunk in batch.chunks for token in _tokens(chunk)]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.start + chunk.length)]
        hidden_states = self.model(
            self._tensor(token_ids, torch.int64),
            self._tensor(positions, torch.int64),
            self.pool.layers,
            self._metadata(batch),
        )
        starts = [0, *accumulate(chunk.length for chunk in batch.chunks)]
        prompt_logprobs = tuple(
            self._prompt_logprobs(hidden_states[start : start + chunk.length], chunk)
            for start, chunk in zip(starts, batch.chunks, strict=False)
        )
        token_of, logprobs_of = self._sample(hidden_states, batch, starts, masks)
        return StepResult(
            tuple(token_of.get(index) for index in range(len(batch.chunks))),
            tuple(logprobs_of.get(index) for index in range(len(batch.chunks))),
            prompt_logprobs,
        )

    def _restore_states(self, batch: Batch) -> None:
        """Copy kept states to the sequences that go on from them, before anything of this batch is computed or kept."""
        pairs = [(chunk.restore_from, _state_slot(chunk)) for chunk in batch.chunks if chunk.restore_from is not None]
        if pairs:
            self.pool.copy_states(*zip(*pairs, strict=True))

    def _metadata(self, batch: Batch) -> BatchMetadata:
        attention = self._attention_metadata(batch)
        return BatchMetadata(attention, self._state_metadata(batch, attention) if self._has_state else None)

    def _state_metadata(self, batch: Batch, attention: AttentionMetadata) -> StateMetadata:
        saves = [
            (index, save.position - chunk.start, save.slot) for index, chunk in enumerate(batch.chunks) for save in chunk.saves
        ]
        return StateMetadata(
            slots=self._tensor([_state_slot(chunk) for chunk in batch.chunks], torch.int64),
            is_new=self._tensor([chunk.start == 0 for chunk in batch.chunks], torch.bool),
            query_start=attention.query_start,
            save_sequences=self._tensor([index for index, _, _ in saves], torch.int64),
            save_lengths=self._tensor([length for _, length, _ in saves], torch.int64),
            save_slots=self._tensor([slot for _, _, slot in saves], torch.int64),
            max_query_len=attention.max_query_len,
        )

    def _attention_metadata(self, batch: Batch) -> AttentionMetadata:
        block_size = self.pool.block_size
        slots = [
            chunk.sequence.block_table[position // block_size] * block_size + position % block_size
            for chunk in batch.chunks
            for position in range(chunk.start, chunk.start + chunk.length)
        ]
        context_lens = [chunk.start + chunk.length for chunk in batch.chunks]
        num_blocks = [-(-length // block_size) for length in context_lens]
        tables = [
            chunk.sequence.block_table[:used] + [0] * (max(num_blocks) - used)
            for chunk, used in zip(batch.chunks, num_blocks, strict=True)
        ]
        return AttentionMetadata(
            slot_mapping=self._tensor(slots, torch.int64),
            block_tables=self._tensor(tables, torch.int32),
            query_start=self._tensor([0, *accumulate(chunk.length for chunk in batch.chunks)], torch.int32),
            context_lens=self._tensor(context_lens, torch.int32),
            max_query_len=max(chunk.length for chunk in batch.chunks),
            max_context_len=max(context_lens),
        )

    def _sample(
        self, hidden_states: Tensor, batch: Batch, starts: list[int], masks: Masks
    ) -> tuple[dict[int, int | None], dict[int, TokenLogprobs]]:
        """Tokens and their log probabilities by index of the chunk, for the chunks that sample."""
        sampling = [index for index, chunk in enumerate(batch.chunks) if chunk.samples]
        if not sampling:
            return {}, {}
        last = self._tensor([starts[index + 1] - 1 for index in sampling], torch.int64)
        logits = self.model.logits(hidden_states[last])  # [num_sampling, vocab_size]
        sequences = [batch.chunks[index].sequence for index in sampling]
        tokens = sample(logits, sequences, self.loaded.generation.eos_token_ids, masks)
        logprobs: dict[int, TokenLogprobs] = {}
        for row, (index, token) in enumerate(zip(sampling, tokens, strict=True)):
            num_top = batch.chunks[index].sequence.request.params.logprobs
            if num_top is not None and token is not None:
                (logprobs[index],) = token_logprobs(logits[row : row + 1], [token], num_top)
        return dict(zip(sampling, tokens, strict=True)), logprobs

    def _prompt_logprobs(self, hidden_states: Tensor, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of the prompt tokens that follow the positions of `chunk`, from hidden states `[length, H]`."""
        num_top = chunk.sequence.request.params.prompt_logprobs
        following = chunk.sequence.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
        if num_top is None or not following:
            return ()
        logits = self.model.logits(hidden_states[: len(following)])
        return tuple(token_logprobs(logits, following, num_top))

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _state_slot(chunk: Chunk) -> int:
    slot = chunk.sequence.state_slot
    if slot is None:
        raise RuntimeError(f"{chunk.sequence.request.request_id} is to be computed and has no state slot")
    return slot


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
