"""How far a stranger walks: code on the way of one small fit, import cycles, public names.

    python -m bench.walk

Code objects, files and depth are those of this package alone in a `jf.fit` of `PerPCA` with
gradient steps, while it is traced and run; modules are imported before. Cycles are groups of
modules that import one another, imports within functions included.
"""

import sys
import types
from pathlib import Path

import grimp
import jax
import numpy as np

import jaxfed as jf

HOME = str(Path(jf.__file__).parent)


class Walk:
    """Counts what a profiler sees."""

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self.depth = self.deepest = self.between = 0

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        """Note a call or a return within the package."""
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return
        if event == "call":
            self.codes.add(code)
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            if code.co_name == "exchange" and code.co_filename.endswith("round/client.py"):
                self.between = max(self.between, _frames_to_the_engine(frame))
        elif event == "return":
            self.depth -= 1


def _frames_to_the_engine(frame: types.FrameType | None) -> int:
    """Return the number of frames of the package between the engine and a client's exchange."""
    count = 0
    while frame := frame and frame.f_back:
        file = frame.f_code.co_filename
        if file.endswith("round/whole.py"):
            return count
        count += file.startswith(HOME)
    return 0


def public_names() -> set[str]:
    """Return the dotted names of all that `dir()` shows, submodules included."""
    found, seen = set(), set()

    def walk(module: types.ModuleType, name: str) -> None:
        for each in dir(module):
            value = getattr(module, each)
            found.add(f"{name}.{each}")
            home = value.__name__ if isinstance(value, types.ModuleType) else ""
            if home.startswith("jaxfed") and home not in seen:
                seen.add(home)
                walk(value, f"{name}.{each}")

    walk(jf, "jf")
    return found


def cycles() -> list[set[str]]:
    """Return the groups of modules that import one another."""
    graph = grimp.build_graph("jaxfed", exclude_type_checking_imports=True)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(module: str) -> None:  # Tarjan (1972)
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            group = set()
            while module not in group:
                group.add(stack.pop())
            if len(group) > 1:
                groups.append(group)

    sys.setrecursionlimit(10_000)
    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return groups


def main() -> None:
    """Print the numbers."""
    samples = np.random.default_rng(0).normal(size=(4, 20, 6)).astype(np.float32)
    walk, key = Walk(), jax.random.key(0)
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient")
    jf.fit(algorithm, jf.Clients.from_samples(samples[:, :9]), rounds=3, key=key)
    jax.clear_caches()
    clients = jf.Clients.from_samples(samples)
    sys.setprofile(walk)
    jf.fit(algorithm, clients, rounds=3, key=key)
    sys.setprofile(None)
    print(f"code objects: {len(walk.codes)}")
    print(f"files: {len({code.co_filename for code in walk.codes})}")
    print(f"depth: {walk.deepest}")
    print(f"frames between an engine's exchange and the client's: {walk.between}")
    for group in cycles():
        print(f"cycle: {', '.join(sorted(group))}")
    names = public_names()
    print(f"public names: {len(names)}")


if __name__ == "__main__":
    main()
