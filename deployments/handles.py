"""Calls from one deployment to another. Importing this is light."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle


def direct(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """For many small calls. To be kept: a handle's options are not free.

    By value, tokens travel straight from replica to replica instead of through Ray's object store; and plain pickle is
    enough for them.
    """
    return handle.options(_by_reference=False, request_serialization="pickle", response_serialization="pickle")
