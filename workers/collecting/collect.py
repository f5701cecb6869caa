"""The first step of training: the target writes conversations, and its hidden states are kept in shards on disk.

    python -m drafter.training collect --out data --tokens 1000000

It invents users' turns from its own chat template and answers them, or answers prompts from a file. Run again with the
same folder it goes on with other conversations until there are as many tokens as were asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from drafter.command_line import OneLineParser
from drafter.training.recorder import Recorder, default_layer_ids
from drafter.training.shards import ShardHeader
from drafter.training.store import ShardStore
from verifier.config import ModelConfig
from verifier.errors import BadSetting
from verifier.weights import Checkpoint
from workers.build import EngineSpec, build_engine, locate_model
from workers.collecting.collector import Collector
from workers.collecting.conversations import PROMPT, USER, WRITTEN, dialogues, read_turns
from workers.collecting.recipes import RECIPES, Recipes
from workers.collecting.turns import TurnFormat
from workers.engine import Engine
from workers.flags import MAX_THREADS, at_least, number_up_to, valid_temperature
from workers.generate import ctrl_c, report
from workers.text import Text

LONGEST = 2048  # tokens of a conversation
CACHED_EACH = 640  # tokens of KV cache for each conversation under way; most are shorter
SECONDS_BETWEEN_LINES = 60.0  # of a log
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0, 1.0)


def main(argv: Sequence[str]) -> None:
    """
    Raises:
        DraftreeError: a setting, the model or what is in the folder is not what it should be; in one sentence.
        KeyboardInterrupt: it was interrupted, and what was finished is on disk.
    """
    options = command_line().parse_args(argv)
    recipes = Recipes.load(options.recipes)
    prompts = read_turns(options.prompts) if options.prompts else []
    path = locate_model(options.model, report)
    checkpoint = Checkpoint.open(path)
    turns = turn_format(Text.load(path), checkpoint.config, inventing=not prompts or options.prompts_share < 1)
    recorder = Recorder(checkpoint.config, options.layer_ids or default_layer_ids(checkpoint.config.num_layers))
    store = ShardStore(
        options.out,
        ShardHeader(
            model=checkpoint.config.name,
            fingerprint=checkpoint.fingerprint,
            layer_ids=recorder.layer_ids,
            kinds=(*recipes.kinds, USER, WRITTEN, PROMPT),
            seed=options.seed,
        ),
    )
    if store.num_tokens >= options.tokens:
        report(f"{options.out} holds {store.num_tokens} tokens already.")
        return
    answered = store.prompts(PROMPT)
    conversations = dialogues(
        turns,
        recipes,
        stream=f"{options.seed} {store.next_number}",
        temperatures=options.temperature,
        max_tokens=options.max_tokens,
        prompts=[each for each in prompts if turns.prompt(each[0]) not in answered],
        prompts_share=options.prompts_share if prompts else 0,
    )
    engine = build(options, checkpoint.config, recorder)
    stop_ids = frozenset((*checkpoint.config.eos_token_ids, *turns.marks))
    collector = Collector(engine, recorder, conversations, stop_ids=stop_ids, batch=options.batch)
    collect(collector, store, options.tokens)


def turn_format(text: Text, model: ModelConfig, *, inventing: bool) -> TurnFormat:
    """
    Raises:
        BadSetting: the model's chat template does not allow what is wanted.
    """
    turns = TurnFormat.of(text, model.name)
    if inventing and turns.user_mark is None:
        allowed = "one whose chat template ends a user's turn with a special token, for it to invent such turns"
        raise BadSetting("model", model.name, f"{allowed} (prompts are answered with prompts_share 1)")
    return turns


def build(options: argparse.Namespace, model: ModelConfig, recorder: Recorder) -> Engine:
    """An engine in which the recorder is the drafter."""
    longest = min(LONGEST, model.max_positions)
    page_size = EngineSpec.page_size
    spec = EngineSpec(
        options.model,
        "none",
        num_pages=-(-max(longest, options.batch * CACHED_EACH) // page_size),
        max_model_len=longest,
        max_running=options.batch,
        max_rows=2 * options.batch,  # half of them for prompts
        exact=False,
        adaptive=False,  # the recorder is to be asked whatever guessing would cost
        threads=options.threads,
    )
    plain, _ = build_engine(spec, report)
    return Engine(plain.verifier, recorder, plain.config)


def collect(collector: Collector, store: ShardStore, goal: int) -> None:
    """Until there are ``goal`` tokens or no more conversations; what is finished is on disk in any case.

    Raises:
        KeyboardInterrupt: after the step in which Ctrl-C was pressed.
    """
    interrupted = Event()
    try:
        with ctrl_c(interrupted.set), TokenProgress(store, goal) as progress:
            while store.num_tokens < goal and not interrupted.is_set() and collector.step():
                store.add(collector.take())
                progress.show()
    finally:
        store.add(collector.take())
        store.flush()
    by_kind = ", ".join(f"{kind} {tokens}" for kind, tokens in store.tokens.most_common())
    report(f"{store.folder} holds {store.num_tokens} tokens: {by_kind}. {collector.failures} conversations failed.")
    if interrupted.is_set():
        report("Interrupted; the same command goes on from here.")
        raise KeyboardInterrupt


class TokenProgress:
    """Tokens, tokens/s and shares of the kinds, in one line that stays; a line a minute where it cannot."""

    def __init__(self, store: ShardStore, goal: int) -> None:
        self.store, self.goal = store, goal
        self.console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=goal, completed=store.num_tokens)
        self.before, self.began = store.num_tokens, time.monotonic()
        self.told = self.began

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.progress.stop()

    def show(self) -> None:
        now, tokens = time.monotonic(), self.store.num_tokens
        rate = (tokens - self.before) / (now - self.began)
        kinds = " ".join(f"{kind} {count / tokens:.0%}" for kind, count in self.store.tokens.most_common() if count)
        line = f"{tokens} of {self.goal} tokens, {rate:.0f} tokens/s, {kinds}"
        self.progress.update(self.task, completed=tokens, description=line)
        if not self.console.is_terminal and now - self.told >= SECONDS_BETWEEN_LINES:
            self.told = now
            report(line)


# ── from arguments to settings ───────────────────────────────────────────────────────────────────────────────────────


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m drafter.training collect",
        description="Lets the target write conversations, and keeps its hidden states to train a draft head on.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where shards go; with some in it, it goes on")
    add(
        "--tokens",
        type=at_least(1),
        default=1_000_000,
        metavar="N",
        help="written by the target (default: %(default)s)",
    )
    add("--model", default="", metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add(
        "--layer-ids",
        type=at_least(0),
        nargs="+",
        metavar="N",
        help="keep the states after so many layers (default: 2, half of them, all but 3)",
    )
    add("--batch", type=at_least(1), default=64, metavar="N", help="conversations at a time (default: %(default)s)")
    add("--threads", type=at_least(0, MAX_THREADS), default=0, metavar="N", help="(default: torch's own choice)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="other seeds have other conversations (default: 0)")

    add = parser.add_argument_group("what is written").add_argument
    add("--recipes", type=Path, default=RECIPES, metavar="FILE", help="of invented conversations (default: built in)")
    add("--prompts", type=Path, metavar="FILE", help='JSON lines to answer, each {"turns": [...]} or {"prompt": "..."}')
    add(
        "--prompts-share",
        type=number_up_to(1),
        default=1.0,
        metavar="S",
        help="share of the conversations that come from the file (default: 1, nothing is invented)",
    )
    add(
        "--temperature",
        type=valid_temperature,
        nargs="+",
        default=TEMPERATURES,
        metavar="T",
        help="of answers, one of these each (default: half of them 0, the others 0.7 or 1)",
    )
    add("--max-tokens", type=at_least(1), default=192, metavar="N", help="of an answer (default: %(default)s)")
    return parser
