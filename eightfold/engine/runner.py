"""From a batch of ids to tensors, through the model, and back to tokens."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eightfold.cache.pools import KVPool
from eightfold.config import EngineConfig, HardwareFacts, ModelFacts, ResolvedConfig, default_dtype, resolve
from eightfold.engine.sampler import sample, token_logprobs
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import AttentionMetadata
from eightfold.kernels.selection import Kernels
from eightfold.models.arch import DecoderArch
from eightfold.models.checkpoint import Checkpoint, GenerationConfig, read_generation_config
from eightfold.models.decoder import Decoder
from eightfold.models.loader import LoadReport, load, plan, read_model
from eightfold.quant.mxfp8 import ScaleRule
from eightfold.quant.policy import Policy
from eightfold.types import Batch, Chunk, Progress, StepResult, TokenLogprobs


class Runner:
    """Runs batches on one model with one pool.

    Attributes:
        model: a bound model.
        pool: its keys and values.
        config: everything that was decided.
        generation: the checkpoint's end tokens and sampling values.
        vocab_size: token ids lie below it.
        load_report: what became of each tensor.
        model_path: the checkpoint's folder.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        pool: KVPool,
        config: ResolvedConfig,
        generation: GenerationConfig,
        load_report: LoadReport,
        model_path: Path,
    ) -> None:
        self.model = model
        self.pool = pool
        self.config = config
        self.generation = generation
        self.vocab_size = model.arch.vocab_size
        self.load_report = load_report
        self.model_path = model_path
        self._device = pool.device

    @classmethod
    def load(cls, config: EngineConfig, *, report: Progress | None = None) -> Runner:
        """Find the checkpoint, decide the configuration, load and quantize, and make the caches.

        Raises:
            InputError: a value, a checkpoint or a backend that cannot be used; all but damaged weights are found before any
                weight is read.
        """
        path = resolve_model(config.model, revision=config.revision, report=report)
        arch, model = read_model(path)
        generation = read_generation_config(path)
        hardware = detect(config.device)
        device: Literal["cpu", "cuda"] = "cuda" if hardware.device.type == "cuda" else "cpu"
        dtype = config.dtype if config.dtype != "auto" else default_dtype(device)[0]
        kernels = Kernels(hardware, getattr(torch, dtype), config.fp8_gemm_backend, config.attention_backend)
        policy = Policy(config.quantization, config.quantization_ignored_layers, config.quantize_lm_head)
        checkpoint = Checkpoint(path)
        load_plan = plan(model, checkpoint, policy, kernels)
        facts = ModelFacts(arch.context_length, load_plan.weight_bytes, _kv_bytes_per_token(arch))
        resolved = resolve(config, facts, HardwareFacts(device, hardware.name, hardware.memory_bytes))
        load_report = load(model, checkpoint, load_plan, kernels, rule=ScaleRule(config.scale_rule), report=report)
        pool = KVPool(
            num_layers=arch.num_layers,
            num_blocks=resolved.max_total_tokens // resolved.page_size,
            block_size=resolved.page_size,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            dtype=kernels.activation_dtype,
            device=hardware.device,
        )
        return cls(model=model, pool=pool, config=resolved, generation=generation, load_report=load_report, model_path=path)

    @staticmethod
    def check(path: Path) -> None:
        """Raise CheckpointError where the configuration of a checkpoint folder cannot be served; no weight is read."""
        read_model(path)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute every chunk, write its keys and values, and choose a token for each chunk that reaches its sequence's end."""
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
        token_of, logprobs_of = self._sample(hidden_states, batch, starts)
        return StepResult(
            tuple(token_of.get(index) for index in range(len(batch.chunks))),
            tuple(logprobs_of.get(index) for index in range(len(batch.chunks))),
            prompt_logprobs,
        )

    def _metadata(self, batch: Batch) -> AttentionMetadata:
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
        self, hidden_states: Tensor, batch: Batch, starts: list[int]
    ) -> tuple[dict[int, int], dict[int, TokenLogprobs]]:
        """Tokens and their log probabilities by index of the chunk, for the chunks that sample."""
        sampling = [index for index, chunk in enumerate(batch.chunks) if chunk.samples]
        if not sampling:
            return {}, {}
        last = self._tensor([starts[index + 1] - 1 for index in sampling], torch.int64)
        logits = self.model.logits(hidden_states[last])  # [num_sampling, vocab_size]
        tokens = sample(logits, [batch.chunks[index].sequence for index in sampling], self.generation.eos_token_ids)
        logprobs: dict[int, TokenLogprobs] = {}
        for row, index in enumerate(sampling):
            num_top = batch.chunks[index].sequence.request.params.logprobs
            if num_top is not None:
                (logprobs[index],) = token_logprobs(logits[row : row + 1], tokens[row : row + 1], num_top)
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


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]


def _kv_bytes_per_token(arch: DecoderArch) -> dict[str, int]:
    """Bytes of keys and values that a token occupies over all layers, by the dtype of the cache."""
    elements = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    return {"float32": 4 * elements, "bfloat16": 2 * elements, "float16": 2 * elements}
