"""A privacy budget beside the data, which refuses releases that exceed it."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, final

from jaxfed._checks import (
    check_instance,
    check_name,
    check_positive,
    check_probability,
    checked_path,
    refuse,
)
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import GRADIENTS, NEIGHBOURS, Guarantee, Neighbours
from jaxfed.core.store.identity import digest_of
from jaxfed.privacy._gaussian import composed, epsilon_of

try:
    import fcntl
except ImportError:  # Windows, where the file is not locked
    fcntl = None

# The cost comes first in a line, so that an incomplete line still tells it.
COST = re.compile(r'\{"noise_multiplier": ([0-9.e+-]+), "neighbours": "(\w+)", "unit": "(\w+)",')
# Rounding must not refuse the budget itself.
SLACK = 1 + 1e-9


class _Spent(NamedTuple):
    noise_multiplier: float
    neighbours: Neighbours
    unit: str


@final
class Ledger:
    r"""The privacy budget of one data set, in a file beside it: one line for each release.

    `jaxfed.privacy.release_moments(..., ledger=ledger)` writes a line before it computes anything,
    or raises if all releases together would exceed the budget. So does a client of a deployment for
    each message, if its node configuration has an `epsilon`. Releases of Gaussian noise compose
    exactly, also where later ones depend on earlier ones: \(1/\sigma^2\) adds up.

    The file has one JSON object a line. The first is the budget. Each other line is a release: its
    noise multiplier, neighbours and unit, \(\varepsilon\) and \(\delta\), the mechanism, what was
    released, a digest of the data, and the time. All lines count, whatever the digest, because a
    new version of the data has the same persons.

    A line is on disk before a release begins, and a lock keeps other processes out meanwhile. A
    process that is killed in between has spent the line. An incomplete line counts as a release if
    it still tells its noise, and else as the whole budget: remove it by hand if you know that no
    release followed it. A copy of the file spends a budget twice; keep one beside the data.

    Source: Dong, Roth & Su (2022), Gaussian differential privacy, Corollary 3.3; Smith & Thakurta
    (2022), Fully adaptive composition for Gaussian differential privacy.
    """

    path: Path
    epsilon: float
    delta: float
    neighbours: Neighbours

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        neighbours: Neighbours = "replace",
    ):
        r"""Open a ledger, or begin one, which the first release writes.

        Args:
            path: the file, such as `"patients.privacy.jsonl"`.
            epsilon: \(\varepsilon\) of all releases together.
            delta: \(\delta\) of all releases together.
            neighbours: what the budget's unit may change, as for `release_moments`; releases of the
                other kind are converted.

        Raises:
            ValueError: if an argument is unsuitable, the file is no ledger, or it has another
                budget.
            OSError: if the file cannot be read or written.
        """
        check_positive("epsilon", epsilon, single=True)
        check_probability("delta", delta)
        check_name("neighbours", neighbours, NEIGHBOURS)
        self.path = checked_path("path", path)
        self.epsilon, self.delta, self.neighbours = float(epsilon), float(delta), neighbours
        self.spent()  # refuses what is no ledger of this budget

    def spent(self) -> float:
        r"""The \(\varepsilon\) of all releases so far, at the budget's \(\delta\).

        It is infinite if the file has a line that does not tell its cost.
        """
        try:
            with self._locked() as file:
                return self._epsilon(self._read(file))
        except FileNotFoundError:
            return 0.0

    def check(self, *guarantees: Guarantee) -> None:
        """Refuse releases that exceed the budget together, before the first of them.

        Nothing is written: each release still spends its own line.

        Args:
            guarantees: of the releases.

        Raises:
            ValueError: if the budget does not suffice, or earlier releases have another unit.
            OSError: if the file cannot be read.
        """
        for each in guarantees:
            check_instance("guarantees", each, Guarantee, "a jaxfed.privacy.Guarantee each")
        try:
            with self._locked() as file:
                earlier = self._read(file)
        except FileNotFoundError:
            earlier = []
        self._check(earlier, [_spent_by(each) for each in guarantees])

    def spend(self, guarantee: Guarantee, clients: Clients) -> None:
        """Write a release into the ledger; `release_moments` calls this before it begins.

        Args:
            guarantee: of the release.
            clients: the data behind it.

        Raises:
            ValueError: if the budget does not suffice, earlier releases have another unit, or the
                guarantee is of a training, which does not add up with others exactly. The ledger
                then stays as it is.
            OSError: if the line cannot be written.
        """
        check_instance("guarantee", guarantee, Guarantee, "a jaxfed.privacy.Guarantee")
        if guarantee.rows == GRADIENTS:  # whose multiplier is that of one step
            raise refuse("guarantee", "that of a release, not of a training", guarantee)
        check_instance("clients", clients, Clients, "jaxfed.Clients")
        what = "means and deviations" if guarantee.rows == "ranges" else "second moments"
        known = {
            "noise_multiplier": guarantee.noise_multiplier,
            "neighbours": guarantee.neighbours,
            "unit": guarantee.unit,
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "mechanism": guarantee.mechanism,
            "rows": guarantee.rows,
            "bound": guarantee.bound,
            "released": f"{what} of {clients.features} features, {len(clients)} clients",
            "data": digest_of(clients.data),
        }
        self._write(_spent_by(guarantee), known)

    def spend_message(self, noise_multiplier: float, channel: str) -> None:
        r"""Write one message of a client into the ledger, before a deployed client answers.

        Args:
            noise_multiplier: \(\sigma\) of the noise, relative to how far a message moves if all
                data of the client are replaced, which is twice its largest norm.
            channel: the channel of the message.

        Raises:
            ValueError: as for `spend`.
            OSError: if the line cannot be written.
        """
        check_positive("noise_multiplier", noise_multiplier, single=True)
        known = {
            "noise_multiplier": float(noise_multiplier),
            "neighbours": "replace",
            "unit": "client",
            "released": f"a message through {channel}",
        }
        self._write(_Spent(float(noise_multiplier), "replace", "client"), known)

    def _write(self, new: _Spent, known: Mapping[str, object]) -> None:
        """Write a release into the file, if the budget suffices."""
        line = {**known, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._locked(os.O_CREAT) as file:
            earlier = self._read(file)
            self._check(earlier, [new])
            if not os.fstat(file).st_size:
                _append(file, json.dumps({"budget": self._budget}))
                _sync_folder(self.path.parent)
            _append(file, json.dumps(line))

    def _check(self, earlier: list[_Spent | None], new: list[_Spent]) -> None:
        """Refuse releases beyond the budget, or of other units than the earlier ones."""
        known = {each.unit for each in earlier if each}
        for unit in (each.unit for each in new):
            if known - {unit}:
                raise ValueError(
                    f"ledger: wanted releases per {known.pop()}, as the earlier ones of "
                    f"{self.path}, got one per {unit}"
                )
            known.add(unit)
        before, after = self._epsilon(earlier), self._epsilon([*earlier, *new])
        if not after <= self.epsilon * SLACK:
            these = "this one" if len(new) == 1 else f"these {len(new)}"
            raise ValueError(
                f"epsilon: wanted at most {self.epsilon:g} for all releases in {self.path}, "
                f"got {before:.4g} so far and {after:.4g} with {these} (delta {self.delta:g})"
                + (", since a line there cannot be read" if None in earlier else "")
            )

    def __repr__(self) -> str:
        return (
            f"Ledger({str(self.path)!r}, epsilon={self.epsilon:g}, delta={self.delta:g}, "
            f"neighbours={self.neighbours!r})"
        )

    def _epsilon(self, releases: list[_Spent | None]) -> float:
        if None in releases:
            return float("inf")
        if not releases:
            return 0.0
        return epsilon_of(composed([self._multiplier(x) for x in releases if x]), self.delta)

    def _multiplier(self, release: _Spent) -> float:
        """A release's noise relative to how far the budget's unit can move it.

        Replacing a person moves a moment √2 times as far as adding or removing one.
        """
        if release.neighbours == self.neighbours:
            return release.noise_multiplier
        return release.noise_multiplier * (2**-0.5 if self.neighbours == "replace" else 2**0.5)

    @property
    def _budget(self) -> dict[str, object]:
        return {"epsilon": self.epsilon, "delta": self.delta, "neighbours": self.neighbours}

    @contextmanager
    def _locked(self, more: int = 0) -> Iterator[int]:
        file = os.open(self.path, os.O_RDWR | more, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, however this process ends
            yield file
        finally:
            os.close(file)

    def _read(self, file: int) -> list[_Spent | None]:
        """The releases; None for one whose cost is unknown."""
        os.lseek(file, 0, os.SEEK_SET)
        with os.fdopen(os.dup(file), "rb") as content:
            text = content.read().decode("utf-8", errors="replace")
        if not text:
            return []
        first, *lines = text.split("\n")
        try:
            found: Any = json.loads(first)["budget"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"path: wanted a ledger, whose first line is its budget, got {self.path}"
            ) from None
        if found != self._budget:
            raise ValueError(f"path: wanted a ledger with the budget {self._budget}, got {found}")
        return [_cost(line) for line in lines if line]


def _spent_by(guarantee: Guarantee) -> _Spent:
    return _Spent(guarantee.noise_multiplier, guarantee.neighbours, guarantee.unit)


def _cost(line: str) -> _Spent | None:
    """What a line spends, complete or not; None if it does not tell."""
    if (found := COST.match(line)) is None:
        return None
    try:
        multiplier = float(found[1])
    except ValueError:
        return None
    known = found[2] in NEIGHBOURS and found[3] in ("row", "person", "client")
    if not known or not 0 < multiplier < float("inf"):
        return None
    return _Spent(multiplier, found[2], found[3])  # type: ignore[arg-type]


def _append(file: int, line: str) -> None:
    """Write a line to disk, or leave the file as it is."""
    end = os.lseek(file, 0, os.SEEK_END)
    torn = False
    if end:
        os.lseek(file, end - 1, os.SEEK_SET)
        torn = os.read(file, 1) != b"\n"
    content = ("\n" * torn + line + "\n").encode()
    try:
        if os.write(file, content) != len(content):
            raise OSError("the disk is full")
    except OSError:
        os.ftruncate(file, end)
        raise
    os.fsync(file)


def _sync_folder(folder: Path) -> None:
    try:
        place = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(place)
    finally:
        os.close(place)
