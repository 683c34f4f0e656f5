"""Writes the app folder that Flower runs: a few lines for the user to change."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfed import gcca, generative, pca, preprocess
from jaxfed._checks import check_count, refuse
from jaxfed.core.common.files import replacing
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.arguments import check_rounds
from jaxfed.core.wire.secure import secure_sum

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

import jaxfed as jf


def make_algorithm(config):
    """The same on all machines."""
    return jf.{family}.{kind}({settings})


def make_data(config):
    """This machine's own client: `data` in its node configuration, a file or a folder of them."""
    read = jf.data.read_client(config["data"])
    return {holder}([read.samples[0]{convert}], features={features})


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

CLIENT = '''\
"""What Flower starts for each message: JAX, and `app.py`, are in this machine's resident worker."""

import jaxfed as jf

client = jf.deploy.worker.client_app("federation.app:client")
'''

BITS = 32  # of each number under masks
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
) -> None:
    """Write an app folder.

    Args:
        folder: the folder, which must be empty or missing.
        algorithm: the name of an exported algorithm, in any case.
        settings: its arguments, by name.
        clients: number of clients.
        rounds: number of rounds.
        key: the seed of the run's key, from 0 to 2**32 - 1.
        masks: bound of masked messages, see `jaxfed.channel.secure_sum`; None for no masks.

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
    if folder.exists() and any(folder.iterdir()):
        raise refuse("folder", "an empty or missing folder", str(folder))
    app = APP.format(
        kind=kind.__name__,
        family=family,
        number=clients,
        rounds=rounds,
        key=key,
        channel=channel,
        settings=", ".join(f"{name}={value!r}" for name, value in settings.items()),
        # Networks would train several times as slowly in double precision.
        precision="single" if family == "generative" else "double",
        convert="" if family == "generative" else ".astype(float)",
        features="read.features and [read.features]" if family == "gcca" else "read.features",
        holder="jf.gcca.Views.from_arrays" if family == "gcca" else "jf.Clients.from_samples",
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
