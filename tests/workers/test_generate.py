"""The command line, over a real engine with the fake verifier: its 22 ordinary tokens are printable characters."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from drafter.options import DraftOptions
from drafter.scripted import Oracle
from tests.fakes import FakeVerifier, plain_decoding
from tests.workers.tokenizers import byte_level
from verifier.sampling import SamplingParams
from workers.build import EngineSpec, Reporter
from workers.engine import Engine, EngineConfig
from workers.generate import main
from workers.template import ChatTemplate
from workers.text import Text

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}&"
GREEDY = SamplingParams(temperature=0)
STOP = 1
Run = Callable[..., tuple[int, str, str]]


def says(prompt: str, num_tokens: int, sampling: SamplingParams = GREEDY) -> str:
    """What the fake says by the definition, up to its stop token."""
    output = plain_decoding(tuple(byte_level().encode(prompt).ids), sampling, num_tokens)
    return str(byte_level().decode(output[: output.index(STOP)] if STOP in output else output))


class Build:
    """Stands in for `build_engine`, and keeps what it was asked for and what it made."""

    def __init__(self, template: str | None = TEMPLATE) -> None:
        self.text = Text(byte_level(), ChatTemplate(template, {}) if template else None)
        self.verifier = FakeVerifier(num_pages=64, page_size=4)
        self.specs: list[EngineSpec] = []
        self.engines: list[Engine] = []

    def __call__(self, spec: EngineSpec, report: Reporter) -> tuple[Engine, Text]:
        self.specs.append(spec)
        config = EngineConfig(num_pages=64, page_size=4, max_model_len=120, max_rows=32, limits=spec.limits)
        engine = Engine(self.verifier, Oracle(lambda ids: plain_decoding(tuple(ids), GREEDY, 8)), config)
        self.engines.append(engine)
        return engine, self.text


@pytest.fixture
def build() -> Iterator[Build]:
    build = Build()
    yield build
    for engine in build.engines:
        engine.check_integrity()
        assert engine.stats().pages_used == 0


@pytest.fixture
def run(build: Build, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command, with ``typed`` lines on a terminal or ``piped`` text; gives code, output and errors."""

    def run_command(*arguments: str, typed: Sequence[str] | None = None, piped: str = "") -> tuple[int, str, str]:
        lines = iter(typed or ())

        def read_line(prompt: str) -> str:
            line = next(lines, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        stdin = io.StringIO(piped)
        monkeypatch.setattr(stdin, "isatty", lambda: typed is not None)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr("builtins.input", read_line)
        try:
            code = main(arguments, build)
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


@pytest.mark.parametrize("source", ["argument", "file", "pipe"])
def test_a_prompt_is_answered(run: Run, tmp_path: Path, source: str) -> None:
    (tmp_path / "prompt.txt").write_text("#$%\n")
    arguments = {"argument": ["--prompt", "#$%"], "file": ["--prompt-file", str(tmp_path / "prompt.txt")], "pipe": []}
    code, out, err = run(*arguments[source], "--max-tokens", "12", piped="#$%\n")
    assert (code, out) == (0, says("#$%&", 12) + "\n")
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s, mean acceptance length [\d.]+, acceptance rate [\d.]+%\n", err)


def test_options_of_draft_networks(build: Build, run: Run) -> None:
    flags = ["--draft-threshold", "0.3", "--draft-decay", "0.9", "--draft-noise-ranking", "--draft-layer-ids", "2,15"]
    run("--prompt", "#", "--max-tokens", "2", *flags)
    assert build.specs[-1].draft_options == DraftOptions("dynamic", 0.3, 0.9, True, (2, 15))
    code, _, error = run("--prompt", "#", "--draft-growth", "wild")
    assert (code, error) == (2, "generate.py: error: --draft-growth is 'wild', but must be one of: dynamic, static.\n")


def test_an_impossible_thread_count_is_refused(build: Build, run: Run) -> None:
    """It went as far as torch, whose ValueError ended in a traceback."""
    code, _, error = run("--prompt", "#", "--threads", "99999999999")
    assert (code, build.specs) == (2, [])
    assert error.endswith("must be a whole number of 0 to 1024, not '99999999999'\n")
    assert error.count("\n") == 1


def test_text_comes_as_it_is_made(build: Build, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of tokens is written and flushed before the next step, not all of it at the end."""
    pieces: list[tuple[str, bool]] = []
    monkeypatch.setattr("builtins.print", lambda *a, flush=False, **k: pieces.append(("".join(a), flush)))
    run("--prompt", "#$%", "--max-draft", "2", "--max-tokens", "12")
    shown = [piece for piece, flush in pieces if flush and piece]
    assert len(shown) > 3
    assert "".join(shown[:-1]) == says("#$%&", 12)


def test_options_reach_the_engine(build: Build, run: Run) -> None:
    run(
        "--prompt", "#", "--model", "M", "--draft-model", "none", "--max-draft", "3", "--top-k", "4", "--max-nodes", "9"
    )
    limits = build.specs[-1].limits
    assert (build.specs[-1].model, build.specs[-1].draft_model, build.specs[-1].exact) == ("M", "none", True)
    assert (limits.max_draft, limits.draft_top_k, limits.max_nodes) == (3, 4, 9)
    run("--prompt", "#", "--no-exact", "--threads", "2", "--max-draft", "11")
    assert (build.specs[-1].exact, build.specs[-1].threads, build.specs[-1].limits.max_nodes) == (False, 2, 11)


def test_sampling_options_decide_the_text(run: Run) -> None:
    options = [
        "--temperature",
        "0.8",
        "--sampling-top-k",
        "9",
        "--top-p",
        "0.95",
        "--min-p",
        "0.01",
        "--max-tokens",
        "20",
    ]
    sampling = SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01, seed=5)
    assert run("--prompt", "#$%", "--seed", "5", *options)[1] == says("#$%&", 20, sampling) + "\n"
    unseeded = {run("--prompt", "#$%", *options)[1] for _ in range(4)}
    assert len(unseeded) > 1


def test_raw_prompts_are_continued(run: Run) -> None:
    assert run("--prompt", "#$%", "--raw", "--max-tokens", "9")[1] == says("#$%", 9) + "\n"


def test_compare(build: Build, run: Run) -> None:
    """Plain decoding gets the same request: it has to compute the prompt again, and says the same."""
    code, _, err = run("--prompt", "#$%'()*+,-", "--max-tokens", "16", "--compare")
    assert code == 0
    assert re.search(r", [\d.]+ times plain decoding \([\d.]+ tokens/s\), same text\n$", err)
    assert build.engines[-1].counters.cached_tokens == 0
    assert build.engines[-1].counters.speculation.drafted_tokens > 0


def test_without_a_template_a_prompt_is_continued_and_a_chat_refused(build: Build, run: Run) -> None:
    build.text = Text(byte_level())
    assert run("--prompt", "#$%", "--max-tokens", "9")[1] == says("#$%", 9) + "\n"
    code, _, err = run(typed=["#"])
    assert (code, err.count("\n")) == (2, 1)


def test_chat_remembers(run: Run) -> None:
    first = says("#$%&", 9)
    code, out, err = run("--max-tokens", "9", typed=["#$%", "", "'(", "^C", "/new", "#$%", "/exit", "never"])
    assert code == 0
    assert out.splitlines()[1:] == [first, says(f"#$%{first}'(&", 9), first]
    assert len(err.splitlines()) == 3
    assert run(typed=[])[0] == 0  # Ctrl-D


def test_a_question_that_is_too_long_is_forgotten(run: Run) -> None:
    code, out, err = run("--max-tokens", "9", typed=["#" * 200, "#$%"])
    assert code == 0
    assert out.splitlines()[1] == says("#$%&", 9)
    assert err.splitlines()[0].startswith("--prompt is '201 tokens', but must be")


@pytest.mark.parametrize("typed", [None, ["#$%", "/exit"]])
def test_ctrl_c_stops_the_answer(build: Build, run: Run, typed: list[str] | None) -> None:
    """Not the program, when it chats; and the pages are free at once (see the fixture)."""

    def interrupt_once(plan: object) -> None:
        if len(build.verifier.plans) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    build.verifier.on_forward = interrupt_once
    arguments = [] if typed else ["--prompt", "#$%"]
    code, out, err = run(*arguments, "--temperature", "1", "--seed", "1", "--max-tokens", "110", typed=typed)
    whole = says("#$%&", 110, SamplingParams(temperature=1, seed=1))
    assert code == (0 if typed else 130)
    assert whole.startswith(out.splitlines()[-1])
    assert "acceptance rate" in err
    assert build.engines[-1].counters.finished["abort"] == 1


def test_a_broken_engine_is_reported(build: Build, run: Run) -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("out of order")

    build.verifier.on_forward = fail
    code, _, err = run("--prompt", "#$%")
    assert code == 2
    assert "out of order" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", "#", "--temperature", "-1"], "--temperature"),
        (["--prompt", "#", "--temperature", "nan"], "--temperature"),
        (["--prompt", "#", "--sampling-top-k", "-5"], "--sampling-top-k"),
        (["--prompt", "#", "--top-p", "0"], "--top-p"),
        (["--prompt", "#", "--top-k", "0"], "--top-k"),
        (["--prompt", "#", "--max-draft", "many"], "--max-draft"),
        (["--prompt", "#", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "#", "--prompt-file", "x"], "--prompt-file"),
        (["--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--prompt", "  "], "--prompt"),
        ([], "--prompt"),
        (["--prompt", "#" * 200], "--prompt"),
        (["--temp", "1"], "--temp"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], named: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err


def test_bad_input_needs_no_model(tmp_path: Path) -> None:
    """From outside, as people see it: one line, no traceback, code 2, before torch is imported or a model fetched."""
    environment = {**os.environ, "DRAFTREE_CACHE": str(tmp_path)}
    for arguments in (["--draft-model", "nonsense", "--prompt", "x"], ["--model", "/nowhere", "--prompt", "x"]):
        command = [sys.executable, "-X", "importtime", "generate.py", *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
        assert (result.returncode, result.stdout, len(lines)) == (2, "", 1)
        assert arguments[1] in lines[0]
        assert not re.search(r"\| +torch$", result.stderr, re.MULTILINE)


def test_a_closed_standard_input_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python has no stdin then, and whether it is a terminal was asked of None."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main([], build) == 2
    assert capsys.readouterr().err.endswith("--prompt must be given, since standard input is closed.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_one_line() -> None:
    """It was a traceback, and another one at the interpreter's end."""
    script = (
        "import sys; from tests.workers.test_generate import Build; from workers.generate import main; "
        "sys.exit(main(['--prompt', '#', '--max-tokens', '4'], Build()))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120
        )
    assert (done.returncode, done.stderr) == (2, "generate.py: error: [Errno 28] No space left on device.\n")
