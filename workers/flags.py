"""Flags that several commands have, of draft trees and networks above all. Knows names, ranges and defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress

from drafter.options import GROWTHS, DraftOptions, parse_layer_ids
from verifier.sampling import MAX_TEMPERATURE
from workers.build import DEFAULT_LIMITS

MAX_THREADS = 1024


def at_least(low: int, high: float = math.inf) -> Callable[[str], int]:
    wanted = f"at least {low}" if high == math.inf else f"{low} to {high}"

    def whole_number(text: str) -> int:
        with suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"must be a whole number of {wanted}, not {text!r}")

    return whole_number


def number_up_to(high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        with suppress(ValueError):
            if 0 <= (value := float(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {high:g}, not {text!r}")

    return number


valid_temperature = number_up_to(MAX_TEMPERATURE)


def add_tree_limits(parser: argparse.ArgumentParser, *, branching: str, least_depth: int) -> None:
    """
    Args:
        branching: how the flag for ``draft_top_k`` is called here.
        least_depth: of ``--max-draft``; 0 is plain decoding.
    """
    add = parser.add_argument_group("draft tree").add_argument
    depth, width, nodes = DEFAULT_LIMITS.max_draft, DEFAULT_LIMITS.draft_top_k, DEFAULT_LIMITS.max_nodes
    plainly = "" if least_depth else "; 0: decode plainly"
    add(
        "--max-draft", type=at_least(least_depth), default=depth, metavar="N", help=f"depth{plainly} (default: {depth})"
    )
    add(branching, type=at_least(1), default=width, metavar="N", help=f"guesses kept at each node (default: {width})")
    add(
        "--max-nodes",
        type=at_least(least_depth),
        metavar="N",
        help=f"guesses altogether (default: the depth, at least {nodes})",
    )


def max_nodes(options: argparse.Namespace) -> int:
    """``--max-nodes``, or room for a chain of the depth that was asked for."""
    given: int | None = options.max_nodes
    return max(options.max_draft, DEFAULT_LIMITS.max_nodes) if given is None else given


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """The flags that `draft_options` reads."""
    add, drafting = parser.add_argument_group("draft network").add_argument, DraftOptions()
    add("--draft-growth", default=drafting.growth, metavar="G", help=f"{' or '.join(GROWTHS)} (default: %(default)s)")
    add("--draft-threshold", type=float, default=0.0, metavar="P", help="least probability of a guess (default: none)")
    add("--draft-decay", type=float, default=1.0, metavar="F", help="factor on ranks by level (default: 1, none)")
    add(
        "--draft-noise-ranking",
        action=argparse.BooleanOptionalAction,
        default=drafting.noise_ranking,
        help="above temperature 0, rank with the noise that draws",
    )
    add("--draft-layer-ids", default="", metavar="IDS", help="layers an EAGLE-3 head reads, as in 2,15,27")


def draft_options(options: argparse.Namespace) -> DraftOptions:
    return DraftOptions(
        options.draft_growth,
        options.draft_threshold,
        options.draft_decay,
        options.draft_noise_ranking,
        parse_layer_ids(options.draft_layer_ids),
    )
