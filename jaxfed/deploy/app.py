"""Writes the app folder that Flower runs: a few lines for the user to change."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfed import gcca, generative, pca, preprocess
from jaxfed._checks import check_count, refuse
from jaxfed.core.common.files import replacing
from jaxfed.core.contract.algorithm import Algorithm, OneExchange
from jaxfed.core.run.arguments import check_rounds
from jaxfed.core.wire.secure import secure_sum
from jaxfed.privacy.releases import guarantee_of

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{kind} on separate machines"
license = "Apache-2.0"
# jaxfed is installed on all machines, in one version; Flower must not install another.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "jaxfed"

[tool.flwr.app.components]
serverapp = "federation.app:server"
clientapp = "federation.client:client"

# What `flwr run --run-config` may change, and `make_algorithm` is given; `out` is a folder on the
# server, below the one where the SuperLink was started.
[tool.flwr.app.config]
out = {out}
"""

APP = '''\
"""{kind} on separate machines."""

{imports}


def make_algorithm(config):
    """The same on all machines."""
    return jf.{family}.{kind}({settings})


def make_data(config):
    """This machine's own client: `data` in its node configuration, a file or a folder of them."""
    read = jf.data.read_client(config["data"])
{data}


channel = {channel}
precision = "{precision}"
client = jf.deploy.flower.client_app(
    make_algorithm, make_data, channel=channel, precision=precision
)
server = jf.deploy.flower.server_app(
    make_algorithm,
    clients={number},
    rounds={rounds},
    key={key},
    channel=channel,
    precision=precision,
)
'''

DATA = """\
    return {holder}([read.samples[0]{convert}], features={features})"""

# What leaves the machine is computed from one moment, with noise that protects each person.
RELEASED = """\
    samples, features = read.samples[0].astype(float), read.features
    clients = jf.Clients.from_samples([samples], features=features)
    return jf.deploy.flower.released(config, clients, {options})"""

RELEASED_BY_PERSON = """\
    samples, names = read.samples[0].astype(float), list(read.features)
    place = names.index({person})
    person, samples = samples[:, place], np.delete(samples, place, axis=1)
    features = names[:place] + names[place + 1 :]
    clients = jf.Clients.from_samples([samples], features=features)
    return jf.deploy.flower.released(config, clients, person=[person], {options})"""

CLIENT = '''\
"""What Flower starts for each message: JAX, and `app.py`, are in this machine's resident worker."""

import jaxfed as jf

client = jf.deploy.worker.client_app("federation.app:client")
'''

BITS = 32  # of each number under masks
NOISY = pca.PerPCA, pca.OneShot, pca.Pooled  # which moments with negative eigenvalues suit
FAMILIES = {"pca": pca, "gcca": gcca, "generative": generative, "preprocess": preprocess}


def write_app(
    folder: Path,
    algorithm: str,
    settings: Mapping[str, Any],
    *,
    clients: int,
    rounds: int,
    key: int,
    masks: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    person: str | None = None,
    sharers: int = 1,
) -> None:
    """Write an app folder.

    Args:
        folder: the folder, which must be empty or missing.
        algorithm: the name of an exported algorithm, in any case.
        settings: its arguments, by name.
        clients: number of clients.
        rounds: number of rounds, of which algorithms with one exchange need one.
        key: the seed of the run's key, from 0 to 2**32 - 1.
        masks: bound of masked messages, see `jaxfed.channel.secure_sum`; None for no masks.
        epsilon: of one release of each machine's data, see `jaxfed.deploy.flower.released`; None
            for no noise.
        delta: of the same.
        person: the column with the number of the person whom a row is of, with `epsilon`; None if
            each row is another person's.
        sharers: the number of machines that share the noise of `epsilon`, under `masks`, at most
            as many as may remain in a round; 1 if each machine's noise protects its own release.

    Raises:
        ValueError: if the name or settings are unsuitable, or the folder is not empty.
        OSError: if the folder cannot be written.
    """
    check_count("clients", clients)
    check_rounds(rounds)
    check_count("key", key, least=0, most=2**32 - 1)
    known = {
        name.lower(): (family, kind)
        for family, module in FAMILIES.items()
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Algorithm)
    }
    if algorithm.lower() not in known:
        raise refuse("algorithm", f"one of {', '.join(sorted(known))}", algorithm)
    family, kind = known[algorithm.lower()]
    parameters = inspect.signature(kind).parameters
    for name in settings:
        if name not in parameters:
            raise refuse("setting", f"one of {', '.join(parameters)}", name)
    missing = [
        f"{name}=VALUE"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in settings
    ]
    if missing:
        raise ValueError(
            f"{kind.__name__}: wanted {', '.join(missing)} too; write your own app.py for settings "
            "other than numbers and text, such as a network"
        )
    kind(**settings)  # refuses unsuitable values
    channel = "jf.channel.lossless()"
    if masks is not None:
        secure_sum(clients, bits=BITS, bound=masks)  # refuses an unsuitable bound
        masked = f"jf.channel.secure_sum({clients}, bits={BITS}, bound={masks!r})"
        channel = f"jf.Wire({masked}, jf.channel.lossless())"
    family_data = DATA.format(
        convert="" if family == "generative" else ".astype(float)",
        features="read.features and [read.features]" if family == "gcca" else "read.features",
        holder="jf.gcca.Views.from_arrays" if family == "gcca" else "jf.Clients.from_samples",
    )
    release = {"epsilon": epsilon, "delta": delta}
    if sharers != 1:
        check_count("sharers", sharers, most=clients)
        if epsilon is None or masks is None or not kind.sums_moments:
            wanted = "1, or masks, epsilon and an algorithm that sums moments, such as pooled"
            raise refuse("sharers", wanted, sharers)
        release["sharers"] = sharers
    data = family_data if epsilon is None else _released(kind, settings, release, person)
    if epsilon is None and person is not None:
        raise refuse("person", "None without epsilon", person)
    if folder.exists() and any(folder.iterdir()):
        raise refuse("folder", "an empty or missing folder", str(folder))
    app = APP.format(
        kind=kind.__name__,
        family=family,
        number=clients,
        rounds=1 if issubclass(kind, OneExchange) else rounds,  # all others repeat the first
        key=key,
        channel=channel,
        settings=", ".join(f"{name}={value!r}" for name, value in settings.items()),
        # Networks would train several times as slowly in double precision.
        precision="single" if family == "generative" else "double",
        data=data,
        imports="import numpy as np\n\nimport jaxfed as jf" if person else "import jaxfed as jf",
    )
    project = PROJECT.format(
        kind=kind.__name__,
        name=f"{kind.__name__.lower()}-federation",
        out=json.dumps(f"{folder.resolve().name}/out", ensure_ascii=False),
    )
    files = {"pyproject.toml": project, "federation/__init__.py": ""}
    files |= {"federation/app.py": app, "federation/client.py": CLIENT}
    (folder / "federation").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with replacing(folder / name) as part:
            part.write_text(text, "utf8")


def _released(
    kind: type, settings: Mapping[str, Any], release: Mapping[str, Any], person: str | None
) -> str:
    """The lines that release a machine's data.

    Raises:
        ValueError: if the algorithm needs more than moments with noise, or the guarantee is none.
    """
    if kind not in NOISY:
        wanted = f"None, or one of {', '.join(x.__name__ for x in NOISY)} as the algorithm"
        raise refuse("epsilon", wanted, f"{release['epsilon']} with {kind.__name__}")
    guarantee_of(**release, several=person is not None)  # refuses unsuitable numbers
    options = ", ".join(f"{name}={value!r}" for name, value in release.items())
    if settings.get("solver") == "gradient":  # whose step sizes need eigenvalues without a sign
        options += ", semidefinite=True"
    if person is None:
        return RELEASED.format(options=options)
    return RELEASED_BY_PERSON.format(options=options, person=json.dumps(person, ensure_ascii=False))
