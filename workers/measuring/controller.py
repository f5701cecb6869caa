"""What the cost model makes of load and acceptance that change, against settings that do not change.

    python -m workers.measuring.controller [--rounds 1] [--scripted] …

First on a clock on which every price is known, then on the real engine with drafters that are right or wrong on
purpose. A table and a picture of each, and one line of JSON. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.base import DraftLimits
from drafter.command_line import OneLineParser
from workers.build import DEFAULT_LIMITS, EngineSpec, locate_model
from workers.flags import at_least
from workers.generate import report
from workers.measuring.command import as_command
from workers.measuring.prompts import PROMPTS, read_prompts
from workers.text import Text

if TYPE_CHECKING:
    from drafter.base import InstantDraft
    from workers.measuring.stages import Length, Player, Result, Stage, SwitchedDraft

DEPTHS = (1, 2, 3, 5)  # of the settings that do not change
ACCEPTANCE = 0.8  # of a good drafter's guesses
ON_THE_CLOCK, ON_THE_ENGINE = 0.97, 0.93  # of the best fixed setting's tokens/s, at least
MAX_ROWS = 16 * (1 + DEFAULT_LIMITS.max_draft)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    return as_command("controller", lambda: run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, tuple[Callable[[], Sequence[Result]], float]] = {"clock": (play_on_the_clock, ON_THE_CLOCK)}
    if not options.scripted:
        runs["engine"] = (lambda: play_on_the_engine(options)), ON_THE_ENGINE
    return {name: _present(name, play(), least, options.out) for name, (play, least) in runs.items()}


def _present(name: str, results: Sequence[Result], least: float, folder: Path) -> dict[str, Any]:
    from workers.measuring.settings_picture import draw
    from workers.measuring.stages import show

    folder.mkdir(parents=True, exist_ok=True)
    draw(results, folder / f"{name}.png")
    print(f"\nOn the {name}:\n\n{show(results)}\n", flush=True)
    return {
        "least_ratio": round(min(result.ratio for result in results), 4),
        "required": least,
        "greatest_stretch": round(max(result.stretch for result in results), 3),
        "max_stretch": EngineSpec.max_stretch,
        "stages": [result.data for result in results],
    }


def play_on_the_clock(
    depths: Sequence[int] = DEPTHS, one: tuple[int, int] = (400, 400), many: tuple[int, int] = (200, 100)
) -> list[Result]:
    """A draft takes a millisecond for each guess, elsewhere; a pass 20, and half a millisecond for each row.

    Args:
        depths: of the settings that do not change, each in one lane and in two.
        one, many: tokens of each request before a stage counts, and those that count, by requests at a time.
    """
    from workers.measuring.stages import ADAPTIVE, PLAIN, Length, play_all

    players = {PLAIN: _clockwork_player(0, 1)}
    for lanes, word in ((1, "one lane"), (2, "two lanes")):
        players |= {f"depth {depth}, {word}": _clockwork_player(depth, lanes) for depth in depths}
    players[ADAPTIVE] = _clockwork_player(None, 2)
    return play_all(players, lambda stage: Length(*(one if stage.at_a_time == 1 else many)), 1, report)


def _pass_s(rows: int) -> float:
    return 0.020 + 0.0005 * rows


def _clockwork_player(depth: int | None, lanes: int) -> Player:
    """Of a fixed depth, or an adaptive one in at most so many lanes."""
    from verifier.sampling import SamplingParams
    from workers.config import EngineConfig
    from workers.engine import Engine
    from workers.measuring.clockwork import (
        VOCAB_SIZE,
        ClockworkDraft,
        ClockworkVerifier,
        ManualClock,
        token_at,
    )
    from workers.measuring.stages import Player
    from workers.profile import profile
    from workers.sequence import Request

    clock, max_draft = ManualClock(), DEFAULT_LIMITS.max_draft if depth is None else depth
    switch = _switch(lambda ids: [token_at(len(ids) + i) for i in range(max_draft)], VOCAB_SIZE)
    config = EngineConfig(
        num_pages=2000,
        max_model_len=1100,
        max_rows=MAX_ROWS,
        prefix_cache=False,
        limits=DraftLimits(max_draft, 1, max_draft),
        draft_deadline_s=60.0,
        adaptive=depth is None,
        max_lanes=lanes,
    )
    verifier = ClockworkVerifier(clock, _pass_s, MAX_ROWS)
    drafter = ClockworkDraft(switch, clock, lambda levels, batch: 0.001 * levels * batch)
    engine = Engine(verifier, drafter, config, clock)
    if config.adaptive:
        profile(verifier, engine.pages, engine.costs, clock)
    greedy = SamplingParams(temperature=0)

    def request(index: int) -> Request:  # of many lengths, since guesses are right or wrong by their position
        return Request(f"{index}", tuple(map(token_at, range(2 + 7 * (index % 16)))), greedy, 1000)

    return Player(engine, switch, request)


def _switch(continuation: Callable[[Sequence[int]], Sequence[int]], vocab_size: int) -> SwitchedDraft:
    from drafter.scripted import Anti, Mixed
    from workers.measuring.stages import GOOD, USELESS, SwitchedDraft

    drafters: dict[str, InstantDraft] = {
        GOOD: Mixed(continuation, ACCEPTANCE, vocab_size=vocab_size),
        USELESS: Anti(continuation, vocab_size=vocab_size),
    }
    return SwitchedDraft(drafters)


def play_on_the_engine(options: argparse.Namespace) -> list[Result]:
    """The default model, with guesses that cost nothing: what is weighed is what their rows cost."""
    from drafter.base import NoDraft
    from verifier.sampling import SamplingParams
    from workers.measuring.bench import Remembered
    from workers.measuring.contest import apart, ask, beside, engine_contestant, engine_of, load_verifier
    from workers.measuring.stages import ADAPTIVE, MANY, PLAIN, Player, play_all
    from workers.sequence import Request

    path = locate_model(options.model, report)
    asked = ask(Text.load(path), read_prompts(options.prompts, MANY))
    verifier = load_verifier(path, asked, options.max_tokens, [], MANY)
    plain = Remembered(engine_contestant(verifier, NoDraft(), DraftLimits(), options.max_tokens))
    report("Decoding plainly …")
    for prompt in asked:
        plain.answer(prompt.ids)

    def request(index: int) -> Request:
        return Request(f"{index}", asked[index % len(asked)].ids, SamplingParams(temperature=0), options.max_tokens)

    def player(depth: int | None = None) -> Player:
        max_draft = DEFAULT_LIMITS.max_draft if depth is None else depth
        switch = _switch(plain.continuation, verifier.config.vocab_size)
        limits = DraftLimits(max_draft, 1, max_draft)
        where = apart if depth is None else beside
        engine = engine_of(where(verifier), switch, limits, adaptive=depth is None, max_rows=MAX_ROWS)
        return Player(engine, switch, request)

    players = {PLAIN: player(0)} | {f"depth {depth}": player(depth) for depth in DEPTHS} | {ADAPTIVE: player()}
    return play_all(players, _length(options), options.rounds, report)


def _length(options: argparse.Namespace) -> Callable[[Stage], Length]:
    from workers.measuring.stages import Length

    def length(stage: Stage) -> Length:
        # Many requests at a time bring as many tokens in fewer steps.
        return Length(options.settling // min(stage.at_a_time, 2), options.counted // min(stage.at_a_time, 8))

    return length


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m workers.measuring.controller",
        description="Plays changing load and acceptance to the cost model and to fixed settings.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--scripted", action="store_true", help="on the clock only: seconds instead of minutes, and no model")
    add("--model", default="", metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add("--prompts", type=Path, default=PROMPTS, metavar="F", help="JSON lines with turns or prompt (default: our own)")
    add("--max-tokens", type=at_least(2), default=200, metavar="N", help="of an answer (default: %(default)s)")
    add(
        "--settling",
        type=at_least(0),
        default=200,
        metavar="N",
        help="tokens before a stage counts, of a request alone (%(default)s)",
    )
    add(
        "--counted",
        type=at_least(8),
        default=400,
        metavar="N",
        help="tokens that count, likewise; of many at a time fewer each (%(default)s)",
    )
    add("--rounds", type=at_least(1), default=1, metavar="N", help="of the script on the engine (default: 1)")
    add("--out", type=Path, default=Path("build/controller"), metavar="F", help="for the pictures (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
