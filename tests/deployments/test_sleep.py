"""Verifiers that stop while nobody asks, on a real Serve."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployments.autoscaling import VERIFIER
from tests.deployments.test_serve import Server, eventually, healthy, serving

pytestmark = pytest.mark.slow


def num_verifiers(server: Server) -> int:
    return len(server.replicas(VERIFIER))


def test_verifiers_sleep_while_nobody_asks_and_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only looks does not wake them; the first question waits for one and is answered."""
    for source in ("REPLICA", "HANDLE"):
        monkeypatch.setenv(f"RAY_SERVE_{source}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    with serving(tmp_path, threads=1, verifier_replicas=0, downscale_delay_s=1) as server:
        eventually(lambda: num_verifiers(server) == 0, 60)
        for _ in range(3):
            assert healthy(server.url)
            assert httpx.get(f"{server.url}/v1/models").status_code == 200
            assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert num_verifiers(server) == 0
        with server.client() as client:
            answer = client.completions.create(
                model="tiny", prompt="abc", max_tokens=20, extra_body={"ignore_eos": True}
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20
        assert num_verifiers(server) == 1
        eventually(lambda: num_verifiers(server) == 0, 60)
        assert healthy(server.url)
