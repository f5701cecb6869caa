"""The model card: what a head was made of, by which commands, and how good it is. Everything in it is looked up."""

from __future__ import annotations

import platform
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from drafter.training.runs import RunFolder
from drafter.training.settings import TrainSettings
from drafter.training.shards import ShardFolder
from drafter.training.trained import Trained

LICENCE = "apache-2.0"
PACKAGES = ("torch", "safetensors", "tokenizers")


def write_card(folder: Path, head: Trained, data: ShardFolder | None, layout: str) -> None:
    """Writes ``README.md``.

    Args:
        data: the shards that it was trained on, if they are still there to be described.
    """
    parts = [
        _head(head, layout),
        _figures(head),
        _data(data, head) if data else "",
        _settings(head),
        _commands(head, layout),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def _head(head: Trained, layout: str) -> str:
    settings, target = head.settings, head.target.config
    millions = sum(tensor.numel() for tensor in head.weights.values()) / 1e6
    return f"""---
license: {LICENCE}
base_model: {target.name}
tags: [speculative-decoding, {settings.method}, draftree]
---

# {"Small draft model" if settings.method == "model" else f"{settings.method} draft head"} for {target.name}

{millions:.1f} million parameters, fp16, in the {layout} layout. It {_vocabulary(head)}
and reads {_states(head)}.
It changes the speed of what the target says, and not a token of it."""


def _vocabulary(head: Trained) -> str:
    frequent, all_ids = len(head.target_ids), head.target.config.vocab_size
    if head.settings.method in ("eagle", "model"):
        return (
            f"guesses all of the target's {all_ids} tokens, has learnt their chances from the {frequent} most frequent"
        )
    return f"guesses {frequent} of the target's {all_ids} tokens"


def _states(head: Trained) -> str:
    if head.settings.method == "model":
        return "text alone"
    if head.settings.method in ("eagle", "medusa"):
        return "the target's last hidden state, after the final norm"
    return f"the residual stream after layers {_listed(head.layer_ids)} of {head.target.config.num_layers}"


def _figures(head: Trained) -> str:
    figures = head.figures
    lines = [
        "## Figures",
        "",
        f"On conversations that were held out, after {figures['step']} steps ({figures['rows']} places trained on):",
        "",
        "| guess | accepted, where all before it were |",
        "| --- | --- |",
        *(f"| {index} | {value:.3f} |" for index, value in enumerate(figures["acceptance"], start=1)),
        "",
        f"That makes {figures['mean_length']:.2f} tokens a pass with chains of {len(figures['acceptance'])}; the loss "
        f"is {figures['loss']:.3f}. Guesses are the likeliest tokens, compared with what the target wrote at "
        "temperature 0 and above. First guesses by kind of conversation:",
        "",
        "| kind | accepted |",
        "| --- | --- |",
        *(f"| {kind} | {value:.3f} |" for kind, value in figures["first_by_kind"].items()),
    ]
    return "\n".join(lines)


def _data(data: ShardFolder, head: Trained) -> str:
    kinds = Counter(kind for shard in data.shards for kind in shard.kinds)
    seeds = sorted({shard.header.seed for shard in data.shards})
    lines = [
        "## Data",
        "",
        f"{data.num_conversations} conversations of {data.num_tokens} tokens that the target itself wrote (seeds "
        f"{_listed(seeds)}); it was trained on {_learnt(data, head)}, all but the share of the conversations that was "
        f"held out ({head.settings.held_out:g}). "
        + (
            "It began with the weights of an earlier run, whose data is not counted here."
            if head.settings.start_from
            else "Nothing else was used."
        ),
        "",
        "| kind | conversations |",
        "| --- | --- |",
        *(f"| {kind} | {count} |" for kind, count in sorted(kinds.items())),
    ]
    return "\n".join(lines)


def _learnt(data: ShardFolder, head: Trained) -> str:
    if head.settings.learn_from == "all":
        return f"questions and answers, {data.num_trained_tokens} tokens of which are answers"
    return f"the answers among them, {data.num_trained_tokens} tokens"


def _settings(head: Trained) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    lines = [
        "## Training",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in head.settings.to_dict().items()),
        "",
        f"Versions: {versions}, Python {platform.python_version()}. Target's fingerprint: "
        f"`{head.target.checkpoint.fingerprint}`.",
    ]
    return "\n".join(lines)


def _commands(head: Trained, layout: str) -> str:
    runs = [("run", head.settings)]
    while (earlier := _earlier(runs[0][1])) and earlier not in runs:  # names are relative, and one may mean itself
        runs.insert(0, earlier)
    trained = "\n".join(
        f"python -m drafter.training train --data data --run {name}{_options(settings)}" for name, settings in runs
    )
    return f"""## Commands

```
python -m drafter.training collect --out data
{trained}
python -m drafter.training export --run run --data data --out head --layout {layout}
```"""


def _earlier(settings: TrainSettings) -> tuple[str, TrainSettings] | None:
    """The run that one began with, if it did with any and its folder is still there."""
    run = RunFolder(Path(settings.start_from))
    if not settings.start_from or run.is_new:
        return None
    return settings.start_from, TrainSettings.of(run.settings())


def _options(settings: TrainSettings) -> str:
    defaults = TrainSettings()
    changed = {name: value for name, value in settings.to_dict().items() if value != getattr(defaults, name)}
    return "".join(f" --{name.replace('_', '-')} {value}" for name, value in changed.items())


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
