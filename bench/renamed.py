"""Public names and parameters that another revision had and this one does not, with the new ones.

    python -m bench.renamed 4f4ac50d             # a row for each, as in CHANGELOG.md
    python -m bench.renamed 4f4ac50d --check     # fail unless `renamed.toml` has just these

Both lists come from `dir()` and `inspect.signature` in a process of their own. What became of a
name is in `renamed.toml`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Prints the parameters of each public name; None for what has none.
LIST = """
import importlib, inspect, json, types
import jaxfed
seen, found = set(), {}
def walk(module, name):
    for each in dir(module):
        value = getattr(module, each)
        path = f"{name}.{each}"
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith("jaxfed") and value.__name__ not in seen:
                seen.add(value.__name__)
                walk(value, path)
            continue
        try:
            parameters = list(inspect.signature(value).parameters) if callable(value) else None
        except (TypeError, ValueError):
            parameters = None
        found[path] = parameters
        if inspect.isclass(value) and value.__module__.startswith("jaxfed"):
            for method in dir(value):
                home = getattr(getattr(value, method, None), "__module__", None) or ""
                if not method.startswith("_") and home.startswith("jaxfed"):
                    found[f"{path}.{method}"] = None
walk(jaxfed, "jf")
print(json.dumps(found))
"""


def names(folder: Path) -> dict[str, list[str] | None]:
    """Return the public names in a checkout, with their parameters."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIST],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{folder / 'kernels'}", "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def gone(old: dict[str, list[str] | None], new: dict[str, list[str] | None]) -> list[str]:
    """Return what is missing: names, and parameters as `name(parameter)`."""
    missing = [name for name in old if name not in new]
    classes = tuple(f"{name}." for name in missing)  # their methods went with them
    missing = [name for name in missing if not name.startswith(classes)]
    for name, parameters in old.items():
        now = new.get(name)
        if parameters and now is not None:
            missing += [f"{name}({each})" for each in parameters if each not in now]
    return sorted(missing)


def main() -> int:
    """Print the table, or check that it is whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    became = tomllib.loads((ROOT / "bench" / "renamed.toml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", arguments.revision], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        old = gone(names(Path(folder)), names(ROOT))
    unknown = [name for name in old if name not in became]
    extra = [name for name in became if name not in old]
    if arguments.check:
        for name in unknown:
            print(f"{name} is gone, and bench/renamed.toml does not say what became of it")
        for name in extra:
            print(f"{name} is in bench/renamed.toml, and it was not there or is there still")
        return 1 if unknown or extra else 0
    print("| before | now |\n| --- | --- |")
    for name in old:
        print(f"| `{name}` | {became.get(name, '?')} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
