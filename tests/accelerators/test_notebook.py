"""A million clients on one TPU: the notebook compiled for the chip that it is written for."""

import json

import jax
import pytest

from tests.accelerators.tpu_compiler import array, chip, compiled
from tests.helpers import ROOT

NOTEBOOK = ROOT / "notebooks" / "million_clients.ipynb"
MEMORY = 15.75 * 2**30  # of a v5e, what programs may use


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_cells_compile_for_the_chip_and_fit():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    exec(code[0].replace("%pip", "pass  #"), names)
    names["ON_ACCELERATOR"] = True
    for source in code[1:3]:  # what they define; the next runs it
        exec(source, names)
    place = jax.sharding.SingleDeviceSharding(chip())
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=place)
    shape = names["CLIENTS"], names["SAMPLES"], names["FEATURES"]
    assert shape[0] == 1_000_000
    draw = compiled(names["draw"], key)
    assert jax.eval_shape(names["draw"], key).shape == shape
    solve = compiled(names["solve"], key, array(*shape))
    for program in draw, solve:
        memory = program.memory_analysis()
        needed = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        assert needed < MEMORY
