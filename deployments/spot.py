"""Tells Ray that a spot machine is about to be taken away, so that Serve moves its replicas before that.

    python -m deployments.spot --cloud aws --head ADDRESS

Runs beside Ray on every worker of a fleet, asks the cloud's metadata service every two seconds, and drains the node at
the notice: replacements start elsewhere first, running requests have the time that is left. Knows two clouds. Does
nothing on machines that are not taken away.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from drafter.command_line import OneLineParser

EVERY_S = 2.0
ANSWER_S = 2.0  # that the metadata service has to answer; it is on the same machine
AWS, GCP = "http://169.254.169.254/latest", "http://metadata.google.internal/computeMetadata/v1"
AWS_TOKEN_S = 60  # that a token of the metadata service's is good for
GCP_NOTICE_S = 30.0  # from the notice to the end; GCP says no time
MARGIN_S = 5.0  # for Ray's own processes to end before the machine does

Fetch = Callable[[str, str, Mapping[str, str]], "str | None"]


def fetch(method: str, url: str, headers: Mapping[str, str]) -> str | None:
    """The answer's text; None when there is nothing under that address.

    Raises:
        OSError: no answer.
    """
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy can see a machine's own metadata
    try:
        with direct.open(request, timeout=ANSWER_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def aws_notice(now: float, fetch: Fetch = fetch, base: str = AWS) -> float | None:
    """Seconds until the machine is stopped or taken away; None while it is not to be."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_S)}
    token = fetch("PUT", f"{base}/api/token", lifetime) or ""
    answer = fetch("GET", f"{base}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    if answer is None:
        return None
    return datetime.fromisoformat(json.loads(answer)["time"]).timestamp() - now


def gcp_notice(now: float, fetch: Fetch = fetch, base: str = GCP) -> float | None:
    """As `aws_notice`."""
    answer = fetch("GET", f"{base}/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_NOTICE_S if answer == "TRUE" else None


NOTICES = {"aws": aws_notice, "gcp": gcp_notice}


def drain_command(head: str, node_id: str, left_s: float) -> list[str]:
    """Ray's command. It only marks the node: nobody but the cloud ends it when the time is up."""
    return [
        *("ray", "drain-node", "--address", head, "--node-id", node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "the cloud takes this spot machine away"),
        *("--deadline-remaining-seconds", str(max(0, int(left_s - MARGIN_S)))),
    ]


def own_node_id(head: str) -> str:
    """Of the Ray node on this machine. Ray's command would find it only from within a Ray process."""
    import ray

    ray.init(address=head, log_to_driver=False)
    try:
        return str(ray.get_runtime_context().get_node_id())
    finally:
        ray.shutdown()


def watch(notice: Callable[[float], float | None], drain: Callable[[float], None]) -> None:
    """Returns when the node is being drained. What fails is said and tried again."""
    silent = False
    while True:
        try:
            left_s = notice(time.time())
            silent = False
        except (OSError, ValueError, KeyError) as error:
            if not silent:
                say(f"no word from the metadata service: {error}")
            left_s, silent = None, True
        if left_s is not None:
            say(f"this machine is taken away in {left_s:.0f} s, draining it")
            try:
                drain(left_s)
                return
            except Exception as error:
                say(f"the node could not be drained: {error}")
        time.sleep(EVERY_S)


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m deployments.spot",
        description="Waits for the notice that this spot machine is taken away, then drains its node.",
    )
    parser.add_argument("--cloud", choices=sorted(NOTICES), required=True, help="whose machine it is")
    parser.add_argument("--head", required=True, help="address of Ray's head, as in 10.0.0.1:6379")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)

    def drain(left_s: float) -> None:
        subprocess.run(drain_command(options.head, own_node_id(options.head), left_s), check=True)

    watch(NOTICES[options.cloud], drain)
    return 0


def say(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
