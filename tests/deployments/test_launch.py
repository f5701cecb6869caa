"""``make serve``: the port, the readiness line, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.bench import free_port
from deployments.launch import STOP_SIGNALS, check_gpus, check_port, command_line, main
from deployments.settings import RefusedSettings, Settings
from tests.deployments.tiny import make_tiny_model

PATIENCE_S = 120.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listener with the options of Ray's proxies, which share ports."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_a_taken_port_is_refused(listener: socket.socket) -> None:
    """Ray's proxy would have joined the listener, and half of the requests would have gone to another program."""
    port = listener.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(RefusedSettings, match=f"Port {port} is taken"):
            check_port(host, port)


def test_a_port_that_was_used_a_moment_ago_is_not_taken(listener: socket.socket) -> None:
    """A service that was stopped can be started again at once, although its connections linger in TIME_WAIT."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listener.accept()
        accepted.close()  # the side that closes first lingers
        client.recv(1)
    listener.close()
    check_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("127.0.0.1", 70000), ("192.0.2.77", 8000), ("", 8000)])
def test_an_impossible_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(RefusedSettings):
        check_port(host, port)


def test_gpus_that_are_not_there_are_not_waited_for() -> None:
    """Serve waits for a larger cluster, and says so every half minute for ever."""
    settings = Settings(verifier_replicas=2, tensor_parallel=3, verifier_num_gpus=1)
    check_gpus(settings, 6)
    with pytest.raises(RefusedSettings, match="reserve 6 GPUs, and this machine has 5"):
        check_gpus(settings, 5)
    remote = settings.model_copy(update={"drafter_placement": "remote", "drafter_num_gpus": 0.5})
    check_gpus(remote, 6.5)
    with pytest.raises(RefusedSettings, match=r"reserve 6\.5 GPUs"):
        check_gpus(remote, 6)


def test_settings_are_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line().parse_args(["model=a=b", "max_draft=4"]).settings == [("model", "a=b"), ("max_draft", "4")]
    with pytest.raises(SystemExit):
        command_line().parse_args(["max_draft"])
    assert "name=value" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_a_ray_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine Ray gives up after half a minute, and that was a traceback of its innards."""

    def give_up(*arguments: object, **options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("deployments.launch.app", lambda settings: None)
    monkeypatch.setattr("ray.init", give_up)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        assert main(["--port", str(free_port())]) == 1
    finally:
        for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
    assert capsys.readouterr().err.splitlines()[1:] == ["Ray did not start: The current node timed out during startup."]


def test_help_lists_all_settings() -> None:
    """It named a file of the source instead, which somebody who has installed a wheel would have to look for."""
    said = command_line().format_help()
    assert all(f"\n  {name}=" in said for name in Settings.model_fields)
    assert "  exact=true\n      Whether a row's result" in said


def test_a_setting_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The first value was overlooked without a word."""
    assert main(["max_draft=3", "model=a", "max_draft=3"]) == 1
    assert capsys.readouterr().err == "Error: setting max_draft is given more than once.\n"


def test_refusals_are_one_sentence(listener: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    """Before Ray starts and before a model is looked for."""
    assert main(["max_drafts=4"]) == 1
    assert "max_draft" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert main(["--port", str(listener.getsockname()[1]), "model=/nowhere"]) == 1
    assert "is taken" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def processes_with(mark: str) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(process)
        except OSError:  # it ended meanwhile
            continue
    return found


def wait_until_ready(log: Path) -> str:
    """The ``curl`` line that is printed when the service is ready."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.strip().startswith("curl "):
                return line.strip()
        time.sleep(0.2)
    raise AssertionError(f"not ready in time:\n{log.read_text()}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_from_start_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """The printed line works, a second service on the port is refused, and the signal leaves no process behind."""
    port = free_port()
    model, log, mark = make_tiny_model(tmp_path / "tiny"), tmp_path / "log", f"draftree-test-{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "deployments.launch", "--port", str(port), f"model={model}"]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "MARK": mark})
    try:
        curl = wait_until_ready(log)
        answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True, timeout=180)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        second = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert (second.returncode, second.stdout, second.stderr.count("\n")) == (1, "", 1)
    finally:
        server.send_signal(number)
        code = server.wait(timeout=180)
    assert code == 0
    deadline = time.monotonic() + 60
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
