"""The training tool: ``python -m drafter.training STEP …``. Each step runs alone, and resumes when it is run again.

Collecting and evaluating need the engine, which the drafter may not import: steps are found by name.
"""

from __future__ import annotations

import sys
from importlib import import_module

from drafter.command_line import BAD_INPUT, INTERRUPTED
from verifier.errors import DraftreeError

STEPS = {
    "collect": ("workers.collecting.collect", "let the target write conversations, and keep its hidden states"),
    "train": ("drafter.training.train", "train a draft head on them"),
    "evaluate": ("workers.measuring.evaluate", "measure what a head's guesses are worth in the real engine"),
    "export": ("drafter.training.export", "write a trained head for Draftree, SafeAILab's code or vLLM"),
}
COMMAND = "python -m drafter.training"
USAGE = f"usage: {COMMAND} STEP …     (STEP --help tells its options)\n\n" + "\n".join(
    f"  {name:<9} {what}" for name, (_, what) in STEPS.items()
)


def main() -> int:
    """Runs the step that the command line names and returns its exit code."""
    step, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if step in ("-h", "--help"):
        print(USAGE)
        return 0
    if step not in STEPS:
        return _fail(COMMAND, f"STEP is {step!r}, but must be one of {', '.join(STEPS)}.")
    try:
        import_module(STEPS[step][0]).main(arguments)
    except DraftreeError as error:
        return _fail(f"{COMMAND} {step}", str(error))
    except OSError as error:  # of a folder that is a file, of a full disk
        return _fail(f"{COMMAND} {step}", f"{error}.")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _fail(command: str, sentence: str) -> int:
    print(f"{command}: error: {sentence}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
