"""A group of 128 threads of a CUDA device, by NumPy: what a compiled kernel does, without one.

It knows the instructions of `jaxfed_kernels.inverse_sqrt_cuda` as JAX 0.10 to 0.12 compiles it, and
no others. All threads take each instruction together. So that this hides nothing, what is read or
written between two barriers by one thread and written by another is an error; and so is a branch
that only some take.
"""

import operator
import re

import numpy as np

THREADS, WARP = 128, 32
BASE = 2**32  # where the device's memory begins
_THREAD = np.arange(THREADS)
_LANE, _FIRST_LANE = _THREAD % WARP, _THREAD - _THREAD % WARP
_NOBODY, _SEVERAL = -1, -2

_TYPES = {
    "pred": np.uint8,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
}
_COMPARED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "gt": operator.gt}
_COMPUTED = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}


class Group:
    """One block of a grid.

    Args:
        text: the kernel, in PTX.
        place: of the block in the grid.
        addresses: of the arrays that it is called with.
        memory: the device's, as 32-bit words; written in place.
    """

    def __init__(self, text: str, place: int, addresses: list[int], memory: np.ndarray):
        self.addresses, self.memory = addresses, memory
        self.registers = {
            "%tid.x": _THREAD.astype(np.uint64),
            "%ctaid.x": np.full(THREADS, place, np.uint64),
        }
        self.shared = np.zeros(232448 // 4, np.uint32)
        self.barrier()
        body = re.sub(r"//.*", "", text).partition("{")[2].partition("$L__func_end")[0]
        self.code, self.labels = [], {}
        for line in map(str.strip, re.split(r"[;\n]", body)):
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif line.startswith(".shared"):
                self.registers[line.split()[-1].rstrip("[]")] = np.zeros(THREADS, np.uint64)
            elif line and line[0] not in ".{}":
                self.code.append(line)

    def run(self) -> None:
        at = 0
        with np.errstate(all="ignore"):
            while (line := self.code[at]) != "ret":
                at = self.take(line, at + 1)

    def take(self, line: str, following: int) -> int:
        """Does one instruction, and tells which is the next."""
        guard, name, arguments = re.fullmatch(r"(?:@(%p\d+))?\s*([\w.:]+)\s*(.*)", line).groups()
        given = re.findall(r"{[^}]*}|\[[^]]*\]|[^,\s]+", arguments)
        if name.startswith("bra"):
            taken = [1] if guard is None else self.of(guard, "pred")
            assert len(set(taken)) == 1, f"some threads take {line}"
            return self.labels[given[0]] if taken[0] else following
        assert guard is None, line
        kind, *parts = name.split(".")
        if kind == "bar":
            self.barrier()
        elif kind in ("ld", "st", "ldmatrix", "stmatrix"):
            self.move(kind, parts, given)
        elif kind == "elect":
            self.keep(given[0].split("|")[1], _LANE == 0)
        elif kind == "setp":
            found = _COMPARED[parts[0]](*(self.of(x, parts[-1]) for x in given[1:3]))
            if len(given) > 3:
                found = _COMPUTED[parts[1]](found, self.of(given[3], "pred") > 0)
            self.keep(given[0], found)
        elif kind != "fence":
            self.keep(given[0].split("|")[0], self.computed(kind, parts, given[1:]))
        return following

    def computed(self, kind: str, parts: list[str], given: list[str]) -> np.ndarray:
        of = self.of
        if kind in ("mov", "cvt", "cvta"):
            return of(given[0], parts[-1])
        if kind == "selp":
            return np.where(of(given[2], "pred") > 0, *(of(x, parts[-1]) for x in given[:2]))
        if kind == "fma":  # the product exact
            x, y, z = (of(x, "f32").astype(np.float64) for x in given)
            return (x * y + z).astype(np.float32)
        if kind == "bfe":
            x, start, length = (of(x, "u32") for x in given)
            return x >> start & (1 << length) - 1
        if kind == "shfl":
            lane = of(given[1], "s32")
            return of(given[0], "b32")[_FIRST_LANE + (_LANE ^ lane if "bfly" in parts else lane)]
        return _COMPUTED[kind](*(of(x, "u64" if "wide" in parts else parts[-1]) for x in given))

    def of(self, name: str, kind: str) -> np.ndarray:
        """A register or constant, of all threads."""
        dtype = np.dtype(_TYPES[kind])
        if name.startswith("0f"):
            bits = np.full(THREADS, int(name[2:], 16), np.uint64)
        elif re.match(r"-?\d", name):
            bits = np.full(THREADS, int(name), np.int64).view(np.uint64)
        else:
            bits = self.registers[name]
        return bits.astype(f"u{dtype.itemsize}").view(dtype)

    def keep(self, name: str, value: np.ndarray) -> None:
        self.registers[name] = value.view(f"u{value.itemsize}").astype(np.uint64)

    # --- memory -------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.readers, self.writers = np.full((2, self.shared.size), _NOBODY)

    def move(self, kind: str, parts: list[str], given: list[str]) -> None:
        if "param" in parts[0]:
            argument = int(re.search(r"param_(\d+)", given[1])[1])
            self.keep(given[0], np.full(THREADS, self.addresses[argument], np.uint64))
            return
        values, where = given if kind.startswith("ld") else reversed(given)
        name, offset = re.fullmatch(r"\[([\w%$]+)\+?(-?\d+)?\]", where).groups()
        address = self.of(name, "s64") + int(offset or 0)
        for place, value in enumerate(re.findall(r"[^{},\s]+", values)):
            word = address + 4 * place
            if kind.endswith("matrix"):  # each eight lanes hold the addresses of eight rows
                word = address[_FIRST_LANE + 8 * place + _LANE // 4] + 4 * (_LANE % 4)
            assert not np.any(word % 4)
            words = word // 4 if "shared" in parts else (word - BASE) // 4
            if kind.startswith("ld"):
                self.keep(value, self.read(words, "shared" in parts))
            else:
                self.write(words, self.of(value, "b32"), "shared" in parts)

    def read(self, words: np.ndarray, shared: bool) -> np.ndarray:
        if not shared:
            return self.memory[words]
        writers = self.writers[words]
        assert np.all((writers == _NOBODY) | (writers == _THREAD)), "read without a barrier"
        readers = self.readers[words]
        self.readers[words] = np.where(
            (readers == _NOBODY) | (readers == _THREAD), _THREAD, _SEVERAL
        )
        found, times = np.unique(words, return_counts=True)
        self.readers[found[times > 1]] = _SEVERAL
        return self.shared[words]

    def write(self, words: np.ndarray, values: np.ndarray, shared: bool) -> None:
        assert len(set(words.tolist())) == THREADS
        if not shared:
            self.memory[words] = values
            return
        for before in self.readers[words], self.writers[words]:
            assert np.all((before == _NOBODY) | (before == _THREAD)), "written without a barrier"
        self.writers[words] = _THREAD
        self.shared[words] = values
