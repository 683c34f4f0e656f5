"""Starts JAX in several processes: on a cluster, a TPU pod, or one machine.

Each process then creates its own clients and calls the same functions:

    from jaxfed.deploy import processes

    processes.initialize()  # before anything else of JAX
    clients = jf.Clients.from_process_local(jf.Clients.from_samples(own_arrays))
    solution = jf.fit(algorithm, clients, rounds=100, key=key, backend=jf.backend.shard())
"""

import os
from typing import Any

import jax

from jaxfed import _names
from jaxfed._checks import check_count, check_text

# The environment variables that describe processes started by hand.
_NAMES = ("JAXFED_COORDINATOR", "JAXFED_PROCESSES", "JAXFED_PROCESS")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
    heartbeat: int = 30,
    shutdown: int = 30,
) -> None:
    """Join the processes of a run, before anything is computed.

    It calls `jax.distributed.initialize` with settings for runs: CPUs of several processes reduce
    with Gloo, a silent process counts as dead within half a minute (JAX's default is 100 seconds,
    and 300 for the shutdown), and a signal to end a process ends it.

    Omit the first three arguments under Slurm, Open MPI and on TPU pods, where JAX finds them, and
    in an indexed job of Kubernetes with the `kubernetes` package. Elsewhere they may come from the
    environment variables `JAXFED_COORDINATOR`, `JAXFED_PROCESSES` and `JAXFED_PROCESS`.

    Args:
        coordinator: address and port of the first process, such as `"10.0.0.1:5000"`.
        processes: number of processes.
        process: number of this process, from 0.
        timeout: how long to wait for the others at the start, in seconds.
        heartbeat: seconds of silence after which a process counts as dead, and all others end.
        shutdown: how long to wait for the others at the end, in seconds.

    Raises:
        ValueError: if an argument is invalid, only some of the first three are given, or none is
            and JAX finds no cluster.
        RuntimeError: if JAX has been used before, or the others cannot be reached.
    """
    given: list[Any] = [coordinator, processes, process]
    if given == [None] * 3:
        given = [os.environ.get(name) for name in _NAMES]
        given[1:] = [int(text) if text and text.isdecimal() else text for text in given[1:]]
    if any(each is not None for each in given):
        coordinator, processes, process = given
        check_text("coordinator", coordinator)
        check_count("processes", processes)
        check_count("process", process, least=0)
        assert coordinator is not None and processes is not None and process is not None
        if ":" not in coordinator or not coordinator.rsplit(":", 1)[1].isdecimal():
            raise ValueError(f"coordinator: wanted an address and a port, got {coordinator!r}")
        if process >= processes:
            raise ValueError(f"process: wanted one from 0 to {processes - 1}, got {process}")
    for name, seconds in (("timeout", timeout), ("heartbeat", heartbeat), ("shutdown", shutdown)):
        check_count(name, seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # This service would catch the signal to end, and leave it to the program to ask about it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=shutdown,
    )


__dir__ = _names.public_names(__name__)
