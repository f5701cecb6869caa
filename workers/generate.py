"""The command line: answers a prompt from an argument, a file or a pipe; with no prompt on a terminal, it chats.

    python generate.py --prompt "Why is the sky blue?" --max-draft 7 --top-k 4 --temperature 0.8 --compare

The text goes to standard output and everything else to standard error, so that it can be piped on.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from drafter.base import DraftLimits
from drafter.command_line import BAD_INPUT, INTERRUPTED, OneLineParser
from verifier.device import DeviceName
from verifier.errors import BadRequest, BadSetting, DraftreeError
from verifier.sampling import SamplingParams
from workers.answer import Session
from workers.build import EngineSpec, Reporter, build_engine
from workers.flags import MAX_THREADS, add_draft_options, add_tree_limits, at_least, draft_options, max_nodes
from workers.text import Text

if TYPE_CHECKING:
    from workers.engine import Engine

Build = Callable[[EngineSpec, Reporter], tuple["Engine", Text]]
Message = dict[str, str]

WARM_UP_TOKENS = 8
# How settings and fields are called here, where that differs. --top-k is the draft tree's.
FLAGS = {"top_k": "sampling-top-k", "draft_top_k": "top-k", "messages": "prompt"}


def main(arguments: Sequence[str] | None = None, build: Build = build_engine) -> int:
    """Runs the command and returns its exit code."""
    options = command_line().parse_args(arguments)
    try:
        return run(options, build)
    except DraftreeError as error:
        report(f"generate.py: error: {in_flags(error)}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at exit must not fail again
        if isinstance(error, BrokenPipeError):  # the reader of the text has enough
            return 0
        report(f"generate.py: error: {error}.")
        return BAD_INPUT


def run(options: argparse.Namespace, build: Build) -> int:
    sampling = sampling_params(options)
    prompt = read_prompt(options)
    engine, text = build(engine_spec(options), report)
    session = Session(engine, text, sampling, options.max_tokens)
    engine.start()
    try:
        return chat(session) if prompt is None else once(session, prompt, raw=options.raw, compare=options.compare)
    finally:
        engine.stop()


def once(session: Session, prompt: str, *, raw: bool, compare: bool) -> int:
    """Answers one prompt; to compare, plain decoding has its turn afterwards, with nothing cached either."""
    raw = raw or not session.text.has_chat_template
    ids = session.text.encode(prompt) if raw else session.text.chat_ids([{"role": "user", "content": prompt}])
    if compare:  # or the first of the two would pay for what an engine does only once
        Session(session.engine, session.text, session.sampling, WARM_UP_TOKENS).answer(ids, salt=b"warm-up")
    with ctrl_c(session.interrupt):
        answer = session.answer(ids, show, continues=raw)
    print(flush=True)
    if answer.interrupted:
        report(answer.figures())
        return INTERRUPTED
    plain = session.answer(ids, limits=DraftLimits(), salt=b"plain decoding") if compare else None
    report(answer.figures(plain))
    return 0


def chat(session: Session) -> int:
    """Turn by turn, until /exit or the end of input."""
    if not session.text.has_chat_template:
        raise BadSetting("prompt", None, "given: this model has no chat template, it can only continue a text")
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    print("Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D ends.")
    messages: list[Message] = []
    while True:
        try:
            line = input("\n> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            print()
            return 0
        if line == "/exit":
            return 0
        if line == "/new":
            messages = []
        elif line:
            messages = take_turn(session, [*messages, {"role": "user", "content": line}])


def take_turn(session: Session, messages: list[Message]) -> list[Message]:
    """The conversation with its answer, or without the question if that cannot be answered."""
    try:
        with ctrl_c(session.interrupt):
            answer = session.answer(session.text.chat_ids(messages), show)
    except BadRequest as error:
        report(f"{in_flags(error)} /new starts over.")
        return messages[:-1]
    print(flush=True)
    report(answer.figures())
    return [*messages, {"role": "assistant", "content": answer.text}]


@contextmanager
def ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C does this and nothing else; an exception could come in the middle of anything."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def show(piece: str) -> None:
    print(piece, end="", flush=True)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ── from arguments to settings ───────────────────────────────────────────────────────────────────────────────────────


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="generate.py",
        description="Answers a prompt; without one, chats. Draft trees make it faster and never change the text.",
        allow_abbrev=False,
    )
    add_engine_flags(parser)
    add_tree_limits(parser, branching="--top-k", least_depth=0)
    add_draft_options(parser)
    add_answer_flags(parser)
    return parser


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    spec = EngineSpec()
    add = parser.add_argument_group("model").add_argument
    add("--model", default=spec.model, metavar="M", help="folder, GGUF file or hub id (default: the embedded model)")
    add(
        "--draft-model",
        default=spec.draft_model,
        metavar="D",
        help="who guesses: none, ngram, eagle3 or the folder of a draft network, several joined by +; "
        "auto: ngram, and eagle3 where a head for the model comes along (default: %(default)s)",
    )
    add("--exact", action=argparse.BooleanOptionalAction, default=spec.exact, help="bitwise the same in any batch")
    add(
        "--tensor-parallel",
        type=at_least(1),
        default=spec.tensor_parallel,
        metavar="N",
        help="processes that share the model (default: %(default)s)",
    )
    add(
        "--device",
        choices=get_args(DeviceName),
        default=spec.device,
        help="what to compute on; auto: cuda if there is a GPU (default: %(default)s)",
    )
    add(
        "--threads",
        type=at_least(0, MAX_THREADS),
        default=spec.threads,
        metavar="N",
        help="(default: torch's own choice)",
    )
    add(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        default=spec.adaptive,
        help="guess only as far as it pays, within the limits of the draft tree",
    )


def add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn, and from which prompt."""
    sampling = SamplingParams()
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: always the likeliest token (default: 0)")
    add("--sampling-top-k", type=int, default=sampling.top_k, metavar="N", help="only the N likeliest (default: all)")
    add("--top-p", type=float, default=sampling.top_p, metavar="P", help="only the likeliest up to P (default: all)")
    add("--min-p", type=float, default=sampling.min_p, metavar="P", help="only P times the likeliest (default: all)")
    add("--seed", type=int, metavar="N", help="equal seeds give equal texts (default: another one each time)")
    add("--max-tokens", type=at_least(1), default=512, metavar="N", help="of an answer (default: %(default)s)")

    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="(default: standard input; on a terminal, a chat)")
    source.add_argument("--prompt-file", type=Path, metavar="F", help="a file that holds the prompt")
    group.add_argument("--raw", action="store_true", help="continue the prompt as a text, without the chat template")
    group.add_argument("--compare", action="store_true", help="decode plainly too, and say what guessing gained")


def engine_spec(options: argparse.Namespace) -> EngineSpec:
    return EngineSpec(
        options.model,
        options.draft_model,
        DraftLimits(options.max_draft, options.top_k, max_nodes(options)),
        draft_options(options),
        exact=options.exact,
        tensor_parallel=options.tensor_parallel,
        device=options.device,
        adaptive=options.adaptive,
        threads=options.threads,
    )


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    seed = secrets.randbits(63) if options.seed is None else options.seed
    return SamplingParams(options.temperature, options.sampling_top_k, options.top_p, options.min_p, seed)


def read_prompt(options: argparse.Namespace) -> str | None:
    """From wherever it was given; None to chat. The line break at a file's end is no part of it.

    Raises:
        BadSetting: it cannot be read, or there is nothing in it.
    """
    if options.prompt is None and options.prompt_file is None and sys.stdin is None:
        raise BadSetting("prompt", None, "given, since standard input is closed")
    if options.prompt is None and options.prompt_file is None and sys.stdin.isatty():
        if options.compare or options.raw:
            raise BadSetting("prompt", None, "given, to be compared or continued")
        return None
    prompt: str | None = options.prompt
    if prompt is None:
        try:
            prompt = options.prompt_file.read_text(encoding="utf-8") if options.prompt_file else sys.stdin.read()
        except (OSError, UnicodeDecodeError) as error:
            source = str(options.prompt_file or "standard input")
            raise BadSetting("prompt_file", source, f"readable UTF-8 text ({error})") from error
        prompt = prompt.rstrip("\n")
    if not prompt.strip():
        raise BadSetting("prompt", prompt, "a text that is not empty")
    return prompt


def in_flags(error: DraftreeError) -> str:
    """An error's sentence, with settings and fields called as they are called here."""
    match error:
        case BadSetting(name=name) | BadRequest(field=name):
            flag = FLAGS.get(name, name).replace("_", "-")
            is_what = "" if error.value is None else f" is {error.value!r}, but"
            return f"--{flag}{is_what} must be {error.allowed}."
        case _:
            return str(error)
