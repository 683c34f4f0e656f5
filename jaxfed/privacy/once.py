"""A release of second moments that is kept in a file, so that the same data are released once."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxfed._checks import check_instance, check_options, checked_path
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import checked_guarantee
from jaxfed.core.clients.samples import check_complete_samples
from jaxfed.core.common.files import locked
from jaxfed.core.store.arrays import Content, read, write
from jaxfed.core.store.identity import digest_of, digest_of_text
from jaxfed.linalg import Moment
from jaxfed.linalg.platforms import is_tracing
from jaxfed.privacy.moments import release_moments
from jaxfed.privacy.releases import guarantee_of, persons_of

KIND = "jaxfed.release"


def release_once(path: str | os.PathLike[str], clients: Clients, **options: Any) -> Clients:
    r"""Release second moments as `release_moments` does, and keep them for the next call.

    Another call with the same data and options returns what the file has, and spends nothing: a
    process that starts again, as each run of a deployment does, must not draw new noise on the same
    moments. With other data (also in another precision, or clients in another order) or options
    that mean something else, it is another release, which replaces the file. A `ledger` then counts
    both, or refuses the second one and leaves the file as it is.

    The file also has a digest of the data. Only its owner may read it. A process that is killed
    between release and file has spent a release. Processes that share a path wait for each other.

    Args:
        path: the file, such as `"release.npz"`, in an existing folder.
        clients: as for `release_moments`.
        options: the other arguments of `release_moments`.

    Returns:
        Clients with moments, as of `release_moments`.

    Raises:
        ValueError: as `release_moments`; or if arguments are traced, or the file is damaged or
            something else.
        OSError: if the file cannot be read or written.
    """
    path = checked_path("path", path)
    check_instance("clients", clients, Clients, "jaxfed.Clients with samples")
    check_options(options, release_moments, without=("clients",))
    check_complete_samples(clients, "release_once")
    if is_tracing((clients, options.get("key"))):
        raise ValueError("clients: wanted arrays, got tracers; call this outside of jax.jit")
    identity = _identity(clients, options)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: wanted a file in an existing folder, got {path}")
    with locked(path.parent, "path", private=True, wait=True):
        if not path.exists() or (found := _read(path)).header["identity"] != identity:
            released = release_moments(clients, **options)
            assert released.guarantee is not None
            header = {"identity": identity, "guarantee": released.guarantee._asdict()}
            arrays = {"moments": released.data.dense, "count": released.data.count}
            write(path, KIND, header, arrays, private=True)
            found = _read(path)
        # The first call, too, returns what the file has, so that every call has the same answer.
        moments = jax.vmap(Moment.from_dense)(*(jnp.asarray(x) for x in found.arrays.values()))
        guarantee = checked_guarantee(**found.header["guarantee"])
        return replace(clients.unbucketed(), data=moments, guarantee=guarantee)


def _identity(clients: Clients, options: Mapping[str, Any]) -> list[str]:
    """Digests of data and of what options mean, however they are written.

    Neither the key nor the ledger changes what was released.
    """
    known = {x.name: x.default for x in inspect.signature(release_moments).parameters.values()}
    given: dict[str, Any] = known | dict(options)
    terms = ("epsilon", "delta", "rows", "bound", "neighbours", "sharers")
    several = given["person"] is not None
    guarantee = guarantee_of(*(given[name] for name in terms), several=several)
    # Whose row each is, whatever the persons are called.
    persons = persons_of(clients.unbucketed(), given["person"])
    data = digest_of((clients.data, clients.ids, clients.weights, persons))
    return [data, digest_of_text(repr((guarantee, given["noise"], bool(given["semidefinite"]))))]


def _read(path: Path) -> Content:
    try:
        return read(path, KIND)
    except ValueError as error:
        raise ValueError(f"path: wanted a release in {path}, got {error}") from error
