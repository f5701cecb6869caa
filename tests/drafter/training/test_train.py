"""Whole runs of the command, on a tiny target."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.training.corpus import Corpus
from drafter.training.report import Report
from drafter.training.runs import RunFolder
from drafter.training.shards import ShardFolder
from drafter.training.train import main
from drafter.training.trainer import Trainer
from tests.drafter.training.tiny import save_data, tiny_target
from tests.models import save_tiny_model
from verifier.errors import BadSetting, CheckpointError, DraftreeError, ModelNotFound

ROOT = Path(__file__).parents[3]
QUICK = (
    "--draft-vocab 150 --batch-rows 40 --micro-rows 20 --warm-up 2 --held-out 0.2 --evaluate-every 5 --lr 0.02 "
    "--muon-lr 0.02 --ttt-steps 2 --init random"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path: Path, model: Path) -> Path:
    return save_data(tmp_path / "data", model, *range(30))


def options(model: Path, data: Path, run: Path, more: str) -> list[str]:
    return ["--model", str(model), "--data", str(data), "--run", str(run), *QUICK.split(), *more.split()]


def log(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_a_head_learns_and_the_best_one_is_kept(model: Path, data: Path, tmp_path: Path) -> None:
    main(options(model, data, tmp_path / "run", "--steps 20"))
    lines = log(tmp_path / "run")
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["acceptance"][0] > 0.5
    assert set(lines[0]["first_by_kind"]) == {"chat", "code"}
    best = RunFolder(tmp_path / "run").load(best=True)
    assert best["figures"]["loss"] == min(line["loss"] for line in lines)
    assert len(best["target_ids"]) == 150
    assert best["layer_ids"] == [0, 1, 2]


def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch, and in spite of shards that came meanwhile."""
    main(options(model, data, tmp_path / "whole", "--steps 5"))
    step = Trainer._step

    def dying(self: Trainer, batch: Any) -> torch.Tensor:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    again = options(model, data, tmp_path / "killed", "--steps 5 --checkpoint-minutes 0")
    monkeypatch.setattr(Trainer, "_step", dying)
    with pytest.raises(KeyboardInterrupt):
        main(again)
    monkeypatch.undo()
    assert RunFolder(tmp_path / "killed").load()["progress"]["step"] == 3
    save_data(data, model, 77, name="b")
    main(again)
    assert log(tmp_path / "killed") == log(tmp_path / "whole")
    whole, killed = (RunFolder(tmp_path / name).load() for name in ("whole", "killed"))
    assert whole["progress"]["epoch"] == killed["progress"]["epoch"] == 0
    for name, tensor in whole["weights"].items():
        assert torch.equal(killed["weights"][name], tensor)


def test_shards_that_come_meanwhile_join_at_the_next_epoch(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held out stays as it was."""
    seen: list[tuple[int, int, int]] = []

    def epoch(self: Report, number: int, folder: ShardFolder, corpus: Corpus, num_batches: int) -> None:
        seen.append((len(folder.shards), len(corpus.trained), number))
        save_data(data, model, 100 + number, 200 + number, name=f"later{number}")

    monkeypatch.setattr(Report, "epoch", epoch)
    main(options(model, data, tmp_path / "run", "--steps 16"))
    shards, conversations, epochs = zip(*seen, strict=True)
    assert shards == tuple(range(1, len(seen) + 1))
    assert conversations[0] < conversations[1]
    assert epochs == tuple(range(len(seen)))
    assert RunFolder(tmp_path / "run").load()["progress"]["first_shards"] == ["a.safetensors"]


def test_it_ends_when_nothing_gets_better(model: Path, data: Path, tmp_path: Path) -> None:
    main(options(model, data, tmp_path / "run", "--steps 500 --evaluate-every 2 --patience 2 --lr 1 --muon-lr 1"))
    lines = log(tmp_path / "run")
    assert len(lines) < 20
    assert [line["stale"] for line in lines][-2:] == [1, 2]


def test_a_later_round_starts_from_the_best_head_with_a_vocabulary_of_its_own(
    model: Path, data: Path, tmp_path: Path
) -> None:
    main(options(model, data, tmp_path / "first", "--steps 20"))
    more = f"--steps 1 --evaluate-every 1 --lr 1e-9 --muon-lr 1e-9 --start-from {tmp_path / 'first'}"
    main(options(model, data, tmp_path / "second", f"--draft-vocab 130 {more}"))
    first, second = (RunFolder(tmp_path / name).load(best=True) for name in ("first", "second"))
    assert len(second["target_ids"]) == 130
    assert log(tmp_path / "second")[0]["loss"] < first["figures"]["loss"] + 0.5
    rows = [first["target_ids"].tolist().index(each) for each in second["target_ids"].tolist()]
    torch.testing.assert_close(second["weights"]["lm_head.weight"], first["weights"]["lm_head.weight"][rows])
    with pytest.raises(BadSetting, match=r"start_from is \[96, 72\], but must be a run whose midlayer.mlp.gate_proj"):
        main(options(model, data, tmp_path / "third", f"--intermediate-size 8 {more}"))


def test_what_cannot_work_is_said_in_one_sentence(model: Path, data: Path, tmp_path: Path) -> None:
    main(options(model, data, tmp_path / "run", "--steps 1"))
    with pytest.raises(BadSetting, match="seed is 5, but must be 0 to go on with this run"):
        main(options(model, data, tmp_path / "run", "--steps 1 --seed 5"))
    with pytest.raises(BadSetting, match="draft_vocab is 999, but must be from 1 to 160"):
        main(options(model, data, tmp_path / "new", "--draft-vocab 999"))
    with pytest.raises(BadSetting, match="optimizer is 'sgd', but must be one of muon, adamw"):
        main(options(model, data, tmp_path / "new", "--optimizer sgd"))
    with pytest.raises(BadSetting, match="method is 'hydra', but must be one of eagle3"):
        main(options(model, data, tmp_path / "new", "--method hydra"))
    with pytest.raises(ModelNotFound, match="holds no training data"):
        main(options(model, tmp_path, tmp_path / "new", ""))
    other = save_tiny_model(tmp_path / "other", "smollm2", seed=9)
    with pytest.raises(CheckpointError, match="written by another model"):
        main(options(other, data, tmp_path / "new", ""))
    if not torch.cuda.is_available():
        with pytest.raises(BadSetting, match="device is 'cuda', but must be cpu"):
            main(options(model, data, tmp_path / "new", "--device cuda"))


@pytest.mark.parametrize(("share", "sizes"), [("0", "30 .* and 0"), ("0.999", "0 .* and 30")])
def test_some_is_held_out_and_some_is_not(share: str, sizes: str, model: Path, data: Path, tmp_path: Path) -> None:
    """With nothing to train on, epochs went by for ever; with nothing held out no head was ever the best, and all that
    was trained could not be exported.
    """
    with pytest.raises(BadSetting, match=f"held_out is .* leaves some of both: there are {sizes}"):
        main(options(model, data, tmp_path / "run", f"--steps 1 --held-out {share}"))


@pytest.mark.parametrize("name", ["clip", "weight-decay", "checkpoint-minutes"])
def test_what_is_not_a_number_is_refused(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    """It is not below 0 either: clipping then did nothing, and no checkpoint was ever due."""
    with pytest.raises(BadSetting, match=f"{name.replace('-', '_')} is nan, but must be 0 or more"):
        main(options(model, data, tmp_path / "run", f"--steps 1 --{name} nan"))


def test_a_run_that_has_diverged_ends(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is not below the best loss, so the run went on to its last step with nothing to be saved."""
    monkeypatch.setattr("drafter.training.trainer.mean_loss", lambda *_: float("nan"))
    with pytest.raises(DraftreeError, match="The loss is nan after 5 steps: lower lr"):
        main(options(model, data, tmp_path / "run", "--steps 20"))


def test_shards_that_are_gone_are_missed(model: Path, data: Path, tmp_path: Path) -> None:
    """The run went on with other batches, and nothing was said."""
    save_data(data, model, *range(30, 40), name="b")
    main(options(model, data, tmp_path / "run", "--steps 1"))
    (data / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"does not hold b\.safetensors any more"):
        main(options(model, data, tmp_path / "run", "--steps 1"))


def test_a_run_goes_on_without_the_one_that_it_began_with(model: Path, data: Path, tmp_path: Path) -> None:
    """The earlier run was read again, for nothing, and had to be kept for as long."""
    main(options(model, data, tmp_path / "first", "--steps 5"))
    more = f"--steps 2 --start-from {tmp_path / 'first'}"
    main(options(model, data, tmp_path / "second", more))
    shutil.rmtree(tmp_path / "first")
    main(options(model, data, tmp_path / "second", more))


def test_a_run_learns_from_questions_if_wished(model: Path, data: Path, tmp_path: Path) -> None:
    """One step over the whole epoch each, so that the rows are all that there are."""
    rows = {}
    for which in ("answers", "all"):
        main(options(model, data, tmp_path / which, f"--steps 1 --batch-rows 1000000 --learn-from {which}"))
        rows[which] = RunFolder(tmp_path / which).load()["progress"]["rows"]
    assert rows["all"] > rows["answers"] > 0


@pytest.mark.slow
def test_two_processes_learn_what_one_does(model: Path, data: Path, tmp_path: Path) -> None:
    main(options(model, data, tmp_path / "one", "--steps 6"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command = [*torchrun, "drafter.training", "train", *options(model, data, tmp_path / "two", "--steps 6")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    one, two = (RunFolder(tmp_path / name).load() for name in ("one", "two"))
    assert one["progress"]["step"] == two["progress"]["step"] == 6
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=1e-2, atol=1e-3)
