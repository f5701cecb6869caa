"""Ranks in processes of their own: the same text, and nobody left behind however one of them ends."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
import torch

from drafter.base import DraftLimits
from tests.deployments.tiny import make_tiny_model
from verifier.collectives import ProcessRanks, open_store
from verifier.config import ModelConfig
from verifier.errors import BadSetting, RankLost
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.build import EngineSpec, build_engine
from workers.config import EngineConfig
from workers.engine import Engine
from workers.ranks.group import load_ranks
from workers.ranks.processes import RankProcesses
from workers.ranks.rank import RankJob
from workers.sequence import Progress, Request

ROOT = Path(__file__).parents[3]
REQUESTS = [
    Request(f"{index} {temperature:g}", prompt, SamplingParams(temperature=temperature, seed=index), 24)
    for index, prompt in enumerate([tuple(b"abcabcabcab"), tuple(b"To be, or not to be: that is the")])
    for temperature in (0.0, 1.0)
]
WITHOUT_END = Request("long", tuple(b"abcabc"), SamplingParams(temperature=0), 200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def build(tiny: str, size: int) -> Engine:
    limits = DraftLimits(4, 2, 6)
    spec = EngineSpec(tiny, limits=limits, page_size=4, max_rows=24, adaptive=False, tensor_parallel=size)
    return build_engine(spec)[0]


@pytest.fixture
def engine(tiny: str) -> Iterator[Engine]:
    """On three ranks; afterwards there are none."""
    engine = build(tiny, 3)
    assert len(rank_pids()) == 2
    engine.start()
    yield engine
    engine.stop()
    assert rank_pids() == []


def rank_pids() -> list[int]:
    """Of this process's ranks, in their order."""
    ranks = {child.name: child.pid or 0 for child in multiprocessing.active_children() if "rank" in child.name}
    return [ranks[name] for name in sorted(ranks)]


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[Progress]]:
    """Every request's progress up to its finish."""
    heard: dict[str, list[Progress]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request, lambda progress: heard[progress.request_id].append(progress))
    eventually(lambda: all(runs and runs[-1].finish for runs in heard.values()), 60)
    return heard


def texts(heard: dict[str, list[Progress]]) -> dict[str, list[int]]:
    return {name: [token for run in runs for token in run.tokens] for name, runs in heard.items()}


def eventually(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_three_processes_say_what_one_says_until_one_is_killed(tiny: str, engine: Engine) -> None:
    """Killed while nobody asks for anything, as happens at night: the engine must not wait for a request to notice."""
    alone = build(tiny, 1)
    expected = {result.request_id: list(result.output_ids) for result in alone.run(REQUESTS)}
    for pid in rank_pids():
        os.kill(pid, signal.SIGINT)  # Ctrl-C in a terminal reaches all processes, and is meant for rank 0
    assert texts(answers(engine, REQUESTS)) == expected
    assert engine.counters.speculation.accepted_tokens > 0

    os.kill(rank_pids()[1], signal.SIGKILL)
    eventually(lambda: engine.dead)
    assert "rank 2 was killed by signal 9" in str(engine.dead)
    eventually(lambda: not rank_pids())


@pytest.mark.slow
def test_a_frozen_process_ends_its_requests_in_time(engine: Engine) -> None:
    assert isinstance(engine.verifier, Verifier)
    engine.verifier.model.ranks.limit_s = 1.0
    frozen, heard = rank_pids()[0], list[Progress]()

    def listen(progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == 1:  # before the next step, on the thread that would take it
            os.kill(frozen, signal.SIGSTOP)

    engine.submit(WITHOUT_END, listen)
    eventually(lambda: heard)
    eventually(lambda: heard[-1].finish)
    assert heard[-1].finish == "error"
    assert "gone or silent" in str(heard[-1].error)
    eventually(lambda: engine.dead and not rank_pids())


ORPHANS = """
import multiprocessing, time
from workers.build import EngineSpec, build_engine
if __name__ == "__main__":
    engine, _ = build_engine(EngineSpec({model!r}, page_size=4, max_rows=24, tensor_parallel=3))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_end_with_a_rank_0_that_is_killed(tiny: str, tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.format(model=tiny))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    eventually(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    """A zombie is not; where nobody reaps them, orphans remain as such."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return not re.search(r"^State:\s+Z", status, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    store, port = open_store()
    job = RankJob(1, tmp_path, EngineConfig(num_pages=4, tensor_parallel=2), 1, port)
    followers = RankProcesses([job])
    ranks = ProcessRanks(store, 0, 2)
    with pytest.raises(RankLost):
        ranks.sum(torch.ones(1))
    assert followers.fault(20) == f"rank 1 failed: {tmp_path} is not a model's folder: it has no config.json."
    followers.stop(0)


def test_a_rank_that_never_comes_up_is_not_waited_for(tiny: str) -> None:
    """A machine short of memory kills processes that have hardly begun."""

    def kill_the_first() -> None:
        eventually(rank_pids)
        os.kill(rank_pids()[0], signal.SIGKILL)

    killer = Thread(target=kill_the_first)
    killer.start()
    with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
        build(tiny, 3)
    killer.join()
    assert rank_pids() == []


def test_on_gpus_every_rank_needs_its_own(tiny: str) -> None:
    """Without a bundle for each there must be as many to see; nothing is started in vain."""
    config = replace(EngineSpec(tiny, tensor_parallel=3).engine_config(ModelConfig.from_hf(Path(tiny))), device="cuda")
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.device_count", return_value=2),
        pytest.raises(BadSetting, match="tensor_parallel is 3, but must be at most 2, as each rank needs a GPU"),
    ):
        load_ranks(Path(tiny), config)


@pytest.mark.parametrize(("group", "gpus"), [(None, [1, 2]), (object(), [0, 0])])
def test_ranks_take_the_gpu_of_their_number_or_of_their_bundle(
    tiny: str, group: object, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RankJob] = []

    def start(jobs: Sequence[RankJob], *_: object) -> None:
        started.extend(jobs)
        raise RankLost("that is enough")

    monkeypatch.setattr("workers.ranks.group.reserved_group", lambda size: group)
    monkeypatch.setattr("workers.ranks.group.RankProcesses", start)
    monkeypatch.setattr("workers.ranks.group.RankActors", start)
    with pytest.raises(RankLost, match="that is enough"):
        load_ranks(Path(tiny), EngineConfig(num_pages=4, tensor_parallel=3))
    assert [job.gpu for job in started] == gpus
