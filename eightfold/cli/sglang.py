"""Flags that SGLang knows and this engine does not have. A command line that carries them over gets a sentence for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_REFUSALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "One device computes a model here; leave it out.",
        (
            "--tp-size", "--tensor-parallel-size", "--pp-size", "--dp-size", "--ep-size", "--expert-parallel-size", "--ep",
            "--nnodes", "--node-rank", "--dist-init-addr", "--moe-a2a-backend",
        ),
    ),
    (
        "Recurrent layers have one backend for each kind of hardware, and a rule of their own for which states are kept.",
        (
            "--mamba-backend", "--mamba-radix-cache-strategy", "--mamba-scheduler-strategy",
            "--mamba-max-states-per-path", "--enable-mamba-cache-stochastic-rounding", "--mamba-cache-philox-rounds",
            "--enable-int8-mamba-checkpoint", "--int8-mamba-ckpt-size", "--linear-attn-backend",
            "--linear-attn-prefill-backend", "--linear-attn-decode-backend", "--linear-attn-verify-backend",
            "--enable-linear-replayssm", "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len",
        ),
    ),
    (
        "Quantized weights have one format here: use --quantization mxfp8 with --fp8-gemm-backend.",
        ("--fp4-gemm-backend", "--modelopt-quant", "--quantization-param-path"),
    ),
    (
        "Unquantized products choose their backend themselves; leave it out.",
        ("--bf16-gemm-backend",),
    ),
    (
        "The KV cache has the data type of the activations: use --dtype.",
        ("--kv-cache-dtype",),
    ),
    (
        "One backend serves prefill and decode: use --attention-backend.",
        ("--prefill-attention-backend", "--decode-attention-backend"),
    ),
    (
        "The sampler has one implementation; leave it out.",
        ("--sampling-backend",),
    ),
    (
        "Structured output is not built yet; leave it out.",
        ("--grammar-backend",),
    ),
    (
        "Speculative decoding is not built yet; leave it out.",
        (
            "--speculative-algorithm", "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
            "--speculative-draft-model-path", "--speculative-draft-model-quantization", "--speculative-moe-runner-backend",
        ),
    ),
    (
        "The tokenizer is read from the model's own folder; put it there.",
        ("--tokenizer-path",),
    ),
    (
        "Code of a checkpoint is never run; `eightfold inspect` says whether the model type is supported.",
        ("--trust-remote-code",),
    ),
    (
        "Edit config.json in the model's folder instead.",
        ("--json-model-override-args", "--model-loader-extra-config"),
    ),
    (
        "Set HF_HOME for downloads, or EIGHTFOLD_CACHE for converted models.",
        ("--download-dir",),
    ),
    (
        "A step computes at most --chunked-prefill-size tokens, decodes and prompts mixed, in the order of arrival.",
        ("--max-prefill-tokens", "--enable-mixed-chunk", "--schedule-policy", "--disable-overlap-schedule"),
    ),
    (
        "The prefix cache evicts what was used least recently; --disable-prefix-cache turns it off.",
        ("--radix-eviction-policy",),
    ),
    (
        "Weights stay on the device; --quantization mxfp8 halves those of a bf16 model.",
        ("--cpu-offload-gb",),
    ),
    (
        "Greedy answers (--temperature 0) are the same for the same batch; nothing more is promised.",
        ("--enable-deterministic-inference",),
    ),
    (
        "CUDA graphs are not built yet, so there are none to set up or to disable; leave it out.",
        (
            "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill", "--cuda-graph-max-bs-decode",
            "--cuda-graph-bs-decode", "--disable-cuda-graph", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph",
        ),
    ),
    (
        "LoRA adapters are not built yet; merge the adapter into the weights and load the merged folder.",
        ("--enable-lora", "--lora-paths", "--max-loras-per-batch", "--lora-backend"),
    ),
    (
        "Metrics are always on, and usage always tells the cached tokens; leave it out.",
        ("--enable-metrics", "--enable-cache-report"),
    ),
    (
        "Traces are not built yet; /metrics has histograms of what requests wait for.",
        ("--enable-trace", "--otlp-traces-endpoint"),
    ),
    (
        "The server speaks plain HTTP; put a proxy before it that speaks TLS.",
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password"),
    ),
    (
        "Give the values as flags.",
        ("--config",),
    ),
    (
        "A prompt that is too long is refused with its length; shorten it, or raise --context-length where the model allows.",
        ("--allow-auto-truncate",),
    ),
)  # fmt: skip

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType({flag: sentence for sentence, flags in _REFUSALS for flag in flags})
"""Flag to the sentence that says what works instead."""
