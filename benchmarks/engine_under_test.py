"""One vLLM engine in a process of its own, for ``vllm_engine.py``.

The parent starts ``python engine_under_test.py SPEC DESCRIPTOR`` and reads one JSON object a line
from that descriptor: first what started, then the outcome of a generation for each line ``go`` that
it writes to this process's standard input. End of input ends the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("vllm", "flashinfer-python", "flashinfer", "torch", "triton", "transformers")


def write_model(folder: Path, *, hidden: int, layers: int, seed: int = 0) -> None:
    """Write a randomly initialised Llama as vLLM loads it: its configuration and bf16 weights.

    The head prefers, for each token, one other of a random permutation, by several standard
    deviations of the other logits. With a head that is all noise, the two best logits of every
    tenth step are closer than one rounding in bf16, and greedy decoding tells nothing. Nor does it
    where many layers drown the token in the residual stream: with 24 of them, bf16 and fp32 differ
    in 4% of the steps. So beyond four layers, each adds less, and all together as much as four.

    Parameters
    ----------
    folder : Path
        Made if need be.
    hidden : int
        Elements of a row; a multiple of 256, so that two ranks get whole heads of 128.
    layers : int
        Number of decoder layers.
    """
    import torch
    from safetensors.torch import save_file

    vocabulary, head = 32000, 128
    branch = min(1.0, (4 / layers) ** 0.5)
    inner = -(-hidden * 8 // 3 // 256) * 256
    heads = hidden // head
    key_value_heads = max(2, heads // 8 * 2) if heads % 8 == 0 else heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (drawn(*shape) * (scale * hidden**-0.5)).to(torch.bfloat16).cpu()

    def ones() -> Any:
        return torch.ones(hidden, dtype=torch.bfloat16)

    embedding = drawn(vocabulary, hidden)
    follows = torch.randperm(vocabulary, generator=generator, device=device)
    head_rows = drawn(vocabulary, hidden) * hidden**-0.5 + embedding[follows] * (32 / hidden)
    tensors = {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16).cpu(),
        "model.norm.weight": ones(),
        "lm_head.weight": head_rows.to(torch.bfloat16).cpu(),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": ones(),
            name + "post_attention_layernorm.weight": ones(),
            name + "self_attn.q_proj.weight": normal(hidden, hidden),
            name + "self_attn.k_proj.weight": normal(key_value_heads * head, hidden),
            name + "self_attn.v_proj.weight": normal(key_value_heads * head, hidden),
            name + "self_attn.o_proj.weight": normal(hidden, hidden, scale=branch),
            name + "mlp.gate_proj.weight": normal(inner, hidden),
            name + "mlp.up_proj.weight": normal(inner, hidden),
            name + "mlp.down_proj.weight": normal(hidden, inner, scale=branch),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def look_at_worker(worker: Any) -> dict[str, Any]:
    """Say what a worker's process uses; runs in the worker, pickled by value.

    ``libraries`` are the files of FlashInfer's that it has mapped: ours, and every module of
    kernels that FlashInfer compiled or found compiled.
    """
    import sys as worker_sys
    from pathlib import Path as WorkerPath

    module = worker_sys.modules.get(
        "vllm.distributed.device_communicators.flashinfer_all_reduce", None
    )
    facts: dict[str, Any] = {"rank": worker.rank, "workspace": None, "quant_workspace": None}
    for key in ("workspace", "quant_workspace"):
        found = getattr(module, f"_fi_ar_{key}", None)
        if found is not None:
            kind = type(found)
            facts[key] = {
                "backend": found.backend,
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "buffer_bytes": getattr(found, "buffer_size_bytes", None),
            }
    maps = WorkerPath("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    facts["libraries"] = sorted(
        WorkerPath(file).name for file in files if "flashinfer" in file or "jit_cache" in file
    )
    return facts


def prompts_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw the same prompts for every engine: token numbers, of differing length."""
    draw = random.Random(spec["seed"])
    return [
        {"prompt_token_ids": [draw.randrange(10, 32000) for _ in range(draw.randrange(16, 128))]}
        for _ in range(spec["prompts"])
    ]


def versions() -> dict[str, str | None]:
    """Return the versions of what is compared."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> int:
    """Serve one engine."""
    if len(sys.argv) != 3:
        print("started by vllm_engine.py: engine_under_test.py SPEC DESCRIPTOR", file=sys.stderr)
        return 2
    spec = json.loads(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as answers:

        def answer(**values: Any) -> None:
            answers.write(json.dumps(values) + "\n")

        began = time.monotonic()
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=spec["model"],
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="bfloat16",
            seed=0,
            tensor_parallel_size=spec["ranks"],
            attention_backend="TRITON_ATTN",
            max_model_len=1024,
            max_num_seqs=max(spec["captured"]),
            max_num_batched_tokens=spec["batched_tokens"],
            gpu_memory_utilization=0.25,
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=False,
            enable_flashinfer_autotune=False,
            compilation_config={
                "cudagraph_capture_sizes": spec["captured"],
                "pass_config": {"fuse_allreduce_rms": spec["fused"]},
            },
        )
        sampling = SamplingParams(
            temperature=0.0, max_tokens=spec["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = prompts_of(spec)
        started = time.monotonic() - began
        engine.generate(prompts[:2], sampling, use_tqdm=False)
        answer(
            start_s=round(started, 1),
            versions=versions(),
            workers=engine.collective_rpc(look_at_worker),
        )
        for line in sys.stdin:
            if line.strip() != "go":
                raise ValueError(f"expected 'go', got {line!r}")
            began = time.perf_counter()
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            answer(seconds=seconds, tokens=tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
