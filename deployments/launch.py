"""``make serve``: `serve run deployments:app` for one machine, with what a newcomer needs around it.

    python -m deployments.launch [--host H] [--port P] [name=value ...]

Refuses a port that is taken (Ray's proxies share ports silently), says when the service is ready and how to ask it, and
leaves no process behind. Always starts a Ray of its own; on a cluster, use ``serve run`` or ``serve deploy``.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import shlex
import signal
import socket
import sys
import textwrap
import time
import urllib.request
from collections.abc import Sequence

from click import ClickException
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from deployments.build import app
from deployments.checks import served_model
from deployments.settings import RefusedSettings, Settings
from drafter.command_line import OneLineParser

READY_S = 30.0  # from Serve's word that the application runs to the first answer
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUESTION = "Why is the sky blue?"
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # a line per request would cost time as well


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM; returns the exit code."""
    options = command_line().parse_args(arguments)
    try:
        settings = Settings.model_validate(once_each(options.settings))
        check_port(options.host, options.port)
        application = app(settings)
    except ClickException as error:
        error.show()
        return error.exit_code
    return serve_until_interrupted(application, settings, options.host, options.port)


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m deployments.launch",
        description="Serves a model on this machine.",
        epilog=f"settings, with their defaults:\n{settings_in_words()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from outside (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="of the service (default: %(default)s)")
    parser.add_argument("settings", nargs="*", type=_pair, metavar="name=value", help="settings of the service, below")
    return parser


def settings_in_words() -> str:
    """Each with its default, as it is given, and its meaning."""
    margin, entries = " " * 6, []
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        meaning = textwrap.fill(str(field.description), 79, initial_indent=margin, subsequent_indent=margin)
        entries.append(f"  {name}={default}\n{meaning}")
    return "\n".join(entries)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be of the form name=value")
    return name, value


def once_each(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """
    Raises:
        RefusedSettings: a name comes twice; one of its values would be overlooked.
    """
    settings = dict(pairs)
    if len(settings) < len(pairs):
        twice = next(name for name in settings if [each for each, _ in pairs].count(name) > 1)
        raise RefusedSettings(f"setting {twice} is given more than once.")
    return settings


def check_port(host: str, port: int) -> None:
    """Whether this process could listen there.

    Raises:
        RefusedSettings: it could not.
    """
    if not host:  # sockets take this for every address that the machine has
        raise RefusedSettings("The host is empty, but must be an address; 0.0.0.0 stands for all of them.")
    if not 0 < port < 2**16:
        raise RefusedSettings(f"The port is {port}, but must be 1 to {2**16 - 1}.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that were closed a moment ago do not count, listeners do; and unlike Ray, this shares with none.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RefusedSettings(
                    f"Port {port} is taken; choose another one, PORT={port + 1} for example."
                ) from None
            raise RefusedSettings(f"Cannot listen on {host} port {port}: {error.strerror}.") from None


def check_gpus(settings: Settings, num_gpus: float) -> None:
    """Whether all replicas will find the GPUs that they reserve on this machine; Serve would wait for them forever.

    Raises:
        RefusedSettings: they will not.
    """
    reserved = max(1, settings.verifier_replicas) * settings.tensor_parallel * settings.verifier_num_gpus
    if settings.drafter_placement == "remote":
        reserved += settings.drafter_replicas * settings.drafter_num_gpus
    if reserved > num_gpus:
        names = "verifier_num_gpus and drafter_num_gpus reserve"
        raise RefusedSettings(f"{names} {reserved:g} GPUs, and this machine has {num_gpus:g}.")


def serve_until_interrupted(application: Application, settings: Settings, host: str, port: int) -> int:
    """Starts Ray and Serve, deploys, waits, and stops all of it again."""
    import ray
    from ray import serve

    say("Starting Ray and loading the model …")
    code = 0
    try:
        start_ray()
        for number in STOP_SIGNALS:  # after Ray has set handlers of its own
            signal.signal(number, signal.default_int_handler)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        check_gpus(settings, ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        serve.run(application, route_prefix="/", logging_config=QUIET)
        announce(settings, host, port)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        say("Stopping …")
    except (RefusedSettings, RuntimeError) as error:  # the latter is Serve's when a replica does not start
        say(str(error))
        code = 1
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # impatience would leave processes behind
        ray.shutdown()  # this Ray is ours alone: Serve and its replicas end with it
    return code


def start_ray() -> None:
    """A Ray of our own, in this process and others.

    Raises:
        RuntimeError: it did not start, as on a machine so busy that Ray's half minute for it is too short.
    """
    import ray

    try:
        # The dashboard's processes would take their share of the cores that the model is short of.
        ray.init("local", namespace="serve", include_dashboard=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray has no exception of its own for this
        raise RuntimeError(f"Ray did not start: {error}") from error


def announce(settings: Settings, host: str, port: int) -> None:
    """Waits for the first answer over HTTP, then prints how to get more."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    address = f"http://{shown}:{port}"
    wait_until_answered(address)
    name = served_model(settings).name
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": name, "messages": messages, "temperature": 0, "max_tokens": 64})
    headers = "-H 'Content-Type: application/json'"
    if settings.api_keys:
        headers += ' -H "Authorization: Bearer $API_KEY"'
    print(f"\nReady: {name} on {address}/v1 (Ctrl-C stops it). For example:\n")
    print(f"  curl {address}/v1/chat/completions {headers} -d {shlex.quote(body)}\n", flush=True)


def wait_until_answered(address: str) -> None:
    """Returns once the service at ``address`` says that it is well.

    Raises:
        RuntimeError: it did not in time.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot see this machine's loopback
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with direct.open(f"{address}/health", timeout=READY_S):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"The service was started but does not answer at {address}: {error}.") from error
            time.sleep(0.1)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
