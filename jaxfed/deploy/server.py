"""The server of a run, which resumes if interrupted and writes what was learned."""

import logging
import secrets
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from jaxfed._checks import check_count, check_number, checked_dtype, refuse, shown
from jaxfed._versions import versions
from jaxfed.core.clients.energies import warn_of_large
from jaxfed.core.clients.guarantee import Guarantee, checked_guarantee
from jaxfed.core.clients.names import Names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round.problem import Costs, State
from jaxfed.core.run import host_loop
from jaxfed.core.run.host_loop import HostLoop, Requests, Saver
from jaxfed.core.run.loop import Options
from jaxfed.core.run.runner import Stepwise
from jaxfed.core.run.solution import DivergenceError, Solution, name_of
from jaxfed.core.run.status import Status
from jaxfed.core.store.identity import (
    CheckpointError,
    Identity,
    check_same,
    digest_of,
    text_and_digest,
)
from jaxfed.core.store.saved import Saved, write
from jaxfed.deploy.data import common, features_with, shapes_from
from jaxfed.deploy.exchange import Exchange, RefusedError
from jaxfed.deploy.federation import Federation, RegisteredClient, Settings
from jaxfed.deploy.remote import Remote
from jaxfed.deploy.run import WEIGHTS, Run, check_file_name, description, numbers_of_versions
from jaxfed.deploy.snapshot import Snapshot
from jaxfed.deploy.store import states
from jaxfed.deploy.transcript import is_masked

LOG = logging.getLogger("jaxfed.deploy")


class RunServer:
    """One run's server."""

    def __init__(self, settings: Settings, exchange: Exchange):
        """Begin a run, or continue where an interrupted server has saved its last round."""
        self.settings, self.exchange = settings, exchange
        self.remote = Remote(settings, exchange)
        self.store = states(settings.out / "server")
        exchange.accept = self._accept
        self.requests = Requests(
            settings.rounds, settings.tol, Options(1, settings.tol is not None), (self._log,)
        )
        self.loop = self._resume() or self._start()

    def solve(self) -> Saved:
        """Run all rounds and have the clients compute their own models; save the result in `out`.

        Raises:
            RefusedError: if clients do not fit together, or one answers with an error.
            TimeoutError: if too few clients answer.
            FloatingPointError: if the run diverges; the state before that is saved.
        """
        try:
            solution = self.loop.run()
        except DivergenceError as error:
            raise self._diverged(error.solution.state) from error
        if missing := self.remote.finish_models(solution.state):
            LOG.warning("clients %s were not there to make their own models", missing)
        saved = Saved(
            result=Personalized(solution.result.shared, None),
            history=self._history(solution),
            rounds=int(solution.rounds),
            status=name_of(solution.status),
            algorithm=repr(self.settings.algorithm),
            clients=len(self.remote.members),
            versions=versions(),
            remarks=solution.advice(),
            names=Names(features=self.remote.features),
            guarantees=self._guarantees(),
        )
        write(self.settings.out / "solution.npz", saved, private=True)
        LOG.info(f"the run ended: {Status[solution.status]}")
        for remark in saved.remarks:
            LOG.warning(remark)
        return saved

    def _guarantees(self) -> tuple[Guarantee, ...]:
        """What protects the persons behind all data, if each client says that something does."""
        given = [member.guarantee for member in self.remote.members]
        if None in given or self.settings.warm_start is not None:  # which may be of other data
            return ()
        return tuple(dict.fromkeys(checked_guarantee(**each) for each in given if each))

    # --- the beginning -------------------------------------------------------------------------

    def _accept(self, hello: Mapping[str, Any]) -> None:
        """Refuse a client that does not fit the run.

        Raises:
            ValueError: says why; a `RefusedError` also names the client.
        """
        client, settings = hello["id"], self.settings
        data = shapes_from(hello["data"])
        checked_dtype("weights", hello["weights"])
        check_file_name("tag", hello["tag"])
        if hello["samples"] is not None:
            check_count("samples", hello["samples"], most=max(getattr(data, "lengths", (0,))))
        if hello["guarantee"] is not None:
            checked_guarantee(**hello["guarantee"])
        if hello["energy"] is not None:
            check_number("energy", hello["energy"], "a positive number", lambda x: x > 0)
        for name, (text, digest) in description(
            settings.algorithm, settings.wire, settings.warm_start, settings.weights
        ).items():
            if name == WEIGHTS and not is_masked(settings.wire):
                continue  # the server alone applies them
            its_text, its_digest = hello["run"][name]
            if (its_text, its_digest) != (text, digest):
                got = "other values" if its_text == text else shown(its_text)
                raise RefusedError(
                    f"{name}: wanted at client {client} the server's {text}, got {got}"
                )
        for member in self.remote.members:
            if member.id == client and member.tag != hello["tag"]:
                raise RefusedError(
                    f"data: client {client} has other data, or another folder, than those with "
                    "which it began this run; give it those, or start a new run in another folder"
                )
        features = features_with(self.remote.features, hello)
        for name, number in versions().items():
            if hello["versions"].get(name) != number:
                words = f"client {client} has {name} {shown(hello['versions'].get(name))}"
                LOG.warning(
                    f"{words}, the server {number}: numbers may differ in their last digits"
                )
        self.remote.features = features  # last, since nothing above may refuse the client any more

    def _start(self) -> HostLoop:
        """The loop before its first round, once all clients are connected.

        Raises:
            FloatingPointError: if a first message is not finite.
        """
        settings, remote = self.settings, self.remote
        if (settings.out / "solution.npz").exists():
            raise refuse("out", "a folder without a result of something else", str(settings.out))
        self.exchange.gather(settings.clients, settings.patience)
        clients, hello = self.exchange.clients(), self.exchange.hello
        like = common({client: hello[client]["data"] for client in clients})
        # No two runs may share a name, or states on a client's disk.
        run = Run(secrets.token_hex(8), settings.rounds, len(clients), like, settings.key)
        members = remote.new_members(clients, late=False)
        remote.use(Federation(settings, run, hello[clients[0]]["weights"], members), members)
        remote.federation.check()
        found = [hello[client]["energy"] for client in clients]
        if None not in found:
            warn_of_large(np.asarray(found), remote.federation.clients)
        runner = Stepwise(remote.federation.problem, remote)
        state, costs = runner.prepare(settings.warm_start, settings.rounds)
        if int(state.failure.round):
            raise self._diverged(state)
        progress = host_loop.Progress.first(state, self.requests)
        saver = _ToStore(self, costs)
        # From here on a restarted server resumes; before, it would begin another run.
        saver.save(progress, {})
        return HostLoop(runner, costs, self.requests, progress, {}, saver)

    def _resume(self) -> HostLoop | None:
        """The loop at its last save; None if nothing was saved."""
        remote = self.remote
        found = Snapshot.load(self.store, self._state_shapes)
        if found is None:
            return None
        remote.features = found.features
        # A finished run has no rounds in which a client's other data would be seen.
        members = {member.id for member in remote.members}
        waiting = self.settings.patience
        self.exchange.clients(min(waiting, self.settings.deadline or waiting))
        for client, reason in self.exchange.turned_away.values():
            if client in members:
                raise RefusedError(reason)
        remote.payloads, remote.present = found.payloads, found.present
        remote.digests = found.digests
        progress = host_loop.Progress.first(found.state, self.requests)
        LOG.info("goes on after round %d", found.state.round)
        saver = _ToStore(self, found.costs)
        runner = Stepwise(remote.federation.problem, remote)
        return HostLoop(runner, found.costs, self.requests, progress, found.history, saver)

    def _state_shapes(
        self, saved: Identity, run: Run, dtype: str, members: list[RegisteredClient]
    ) -> State:
        try:
            # Twice: settings that do not fit the members may have no program.
            check_same("out", self.settings.out, "run", saved, self._identity())
            self.remote.use(Federation(self.settings, run, dtype, members), members)
            program = {"program": ["", self.remote.federation.program]}
            check_same("out", self.settings.out, "run", saved, program)
        except CheckpointError as error:
            words = "run it as it was, or choose a new folder"
            raise CheckpointError(f"{error}; {words}") from None
        return self.remote.federation.shapes.state

    # --- what is logged and saved --------------------------------------------------------------

    def _log(self, solution: Solution) -> None:
        objective = float(solution.history["objective"][-1])
        words = "" if np.isnan(objective) else f", objective {objective:.6g}"
        clients = len(self.remote.present[-1])
        LOG.info(f"round {solution.rounds} of {self.settings.rounds}: {clients} clients{words}")

    def _diverged(self, state: State) -> FloatingPointError:
        failure = state.failure
        clients = [self.remote.members[i].id for i in np.flatnonzero(failure.clients)]
        return FloatingPointError(
            f"an objective or a message is not finite in round {int(failure.round)}, at clients "
            f"{clients}; a smaller step size or smaller data may help; the state before it is in "
            f"{self.store.folder}"
        )

    def _history(self, solution: Solution) -> dict[str, np.ndarray]:
        remote, history = self.remote, solution.history
        if remote.federation.problem.hides:  # clients then send no diagnostics
            private = remote.federation.shapes.sent.diagnostics
            history = {
                name: values
                for name, values in history.items()
                if name not in private or not np.isnan(values).all()
            }
        present = [[m.id in ids for m in remote.members] for ids in remote.present]
        return history | {"present": np.asarray(present)}

    def _identity(self) -> Identity:
        """What the result depends on, apart from the members, the program and who is in time."""
        settings = self.settings
        return {
            "rounds": [str(settings.rounds), ""],
            "tol": [str(settings.tol), ""],
            "clients": [str(settings.clients), ""],
            "key": ["", digest_of(settings.key)],
            "participation": text_and_digest(settings.participants),
            "deadline": ["none" if settings.deadline is None else "some", ""],
            **description(settings.algorithm, settings.wire, settings.warm_start, settings.weights),
            **numbers_of_versions(),
        }


@final
class _ToStore(Saver):
    every = 1

    def __init__(self, server: RunServer, costs: Costs):
        self._server, self._costs = server, costs

    def save(self, progress: host_loop.Progress, history: Mapping[str, np.ndarray]) -> None:
        """Write everything that the server resumes from."""
        remote = self._server.remote
        saved = Snapshot(
            run=remote.federation.run,
            dtype=remote.federation.dtype,
            members=remote.members,
            state=progress.state,
            costs=self._costs,
            payloads=remote.payloads,
            digests=remote.digests,
            history=dict(history),
            present=remote.present,
            features=remote.features,
        )
        program = {"program": ["", remote.federation.program]}
        saved.save(self._server.store, {**self._server._identity(), **program})
