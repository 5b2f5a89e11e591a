"""What a run refers to is checked before it starts, and threads share the machine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dataplane.kernels import program as ir
from dataplane.kernels.cpu import packing
from dataplane.kernels.cpu.executor import KV, CpuExecutor, LoadedProgram, Step, StepError
from tests.dataplane.kernels.cpu.conftest import Executors
from tests.dataplane.kernels.cpu.programs import head, multiply, noise, whole


@pytest.fixture
def body(executors: Executors) -> LoadedProgram:
    """Embeds 40 ids, rotates by 12 positions and attends over 5 blocks of 4 tokens."""
    executor = executors("scalar", 2)
    x, q, k, v = whole(0, 32), ir.Columns(0, 32, 0, 16), ir.Columns(0, 32, 16, 8), ir.Columns(0, 32, 24, 8)
    ones = np.ones((12, 8), dtype=np.float32)
    operations = (
        ir.Embed(x, packing.pack_float32(noise(40, 32))),
        ir.Rotate(q, q, ones, ones, 8),
        ir.Attend(whole(32, 16), q, k, v, 0, 1.0, None, None),
    )
    pool = np.zeros((1, 5, 32), dtype=np.float32)
    return executor.load(ir.Program(operations, 48, whole(32, 16), 0), 6, KV([pool], [pool.copy()], 4))


def step(**changes: object) -> Step:
    """Two decodes and three tokens of a prefill."""
    good = {
        "ids": [1, 2, 3, 4, 39],
        "positions": [3, 5, 0, 1, 2],
        "slots": [7, 9, 12, 13, 14],
        "tables": [[1, 0], [4, 2], [3, 0]],
        "starts": [3, 5, 0],
        "counts": [1, 1, 3],
    }
    return Step(**{name: np.array(value, dtype=np.int64) for name, value in (good | changes).items()})  # type: ignore[arg-type]


def test_a_good_step_runs(body: LoadedProgram) -> None:
    body.run(step())
    assert np.isfinite(body.result(5)).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": [1, 2, 3, 4, 40]}, r"ids hold 40, which is not in 0…39"),
        ({"ids": [1, 2, -3, 4, 5]}, r"ids hold -3"),
        ({"positions": [3, 5, 0, 1, 12]}, r"positions hold 12, which is not in 0…11"),
        ({"positions": [3, 5, 0, 1]}, r"4 positions were given for 5 ids"),
        ({"slots": [7, 9, 12, 13, 20]}, r"slots hold 20, which is not in 0…19"),
        ({"slots": [7, 9]}, r"2 slots were given for 5 ids"),
        ({"tables": [[1, 0], [4, 2], [5, 0]]}, r"tables hold 5, which is not in 0…4"),
        ({"tables": [[1, 0], [4, 2]]}, r"3 counts, 3 starts and 2 tables do not agree"),
        ({"starts": [3, 8, 0]}, r"lengths 4, 9, 3 do not lie in tables of 8 tokens"),
        ({"starts": [-1, 5, 0]}, r"lengths 0, 6, 3"),
        ({"counts": [1, 1, 2]}, r"counts 1, 1, 2 are not those of 5 tokens"),
        ({"counts": [0, 2, 3]}, r"counts 0, 2, 3 are not"),
        ({"ids": [0] * 7, "positions": [0] * 7}, r"7 rows do not fit a program of 6"),
        ({"ids": [], "positions": []}, r"0 rows do not fit"),
    ],
)
def test_what_is_not_there_is_named(body: LoadedProgram, changes: dict[str, object], said: str) -> None:
    with pytest.raises(StepError, match=said):
        body.run(step(**changes))
    body.run(step())


def test_numbers_of_another_type_are_refused(body: LoadedProgram) -> None:
    good = step()
    with pytest.raises(StepError, match="ids are contiguous numbers of int64, not int32"):
        body.run(good._replace(ids=good.ids.astype(np.int32)))
    with pytest.raises(StepError, match="tables are contiguous"):
        body.run(good._replace(tables=np.asfortranarray(good.tables)))


def test_rows_to_take_are_checked(executors: Executors) -> None:
    loaded = head(executors("scalar", 2), packing.pack_float32(noise(5, 8)), rows=4)
    source, out, rows = noise(3, 8), np.empty((2, 5), np.float32), np.array([0, 2])
    loaded.take(source, rows, out)
    with pytest.raises(StepError, match=r"rows hold 3, which is not in 0…2"):
        loaded.take(source, np.array([0, 3]), out)
    with pytest.raises(StepError, match="matrix of 8 columns"):
        loaded.take(source[:, :7], rows, out)
    with pytest.raises(StepError, match=r"the output is a float32 matrix \[2, 5\]"):
        loaded.take(source, rows, np.empty((2, 6), np.float32))
    wide = noise(3, 20)
    loaded.take(wide[:, 4:12], rows, out)
    apart = out.copy()
    loaded.take(np.ascontiguousarray(wide[:, 4:12]), rows, out)
    np.testing.assert_array_equal(out, apart)


def test_callers_take_turns(executors: Executors) -> None:
    """Programs of one executor that several threads run at once give what they give alone."""
    executor = executors("scalar", 2)
    programs = [head(executor, packing.pack_int8(noise(60, 64, seed=i))) for i in range(4)]
    inputs = [noise(30, 64, seed=10 + i) for i in range(4)]
    alone = [multiply(loaded, x) for loaded, x in zip(programs, inputs, strict=True)]
    wrong: list[int] = []

    def again(index: int) -> None:
        found = (multiply(programs[index], inputs[index]) for _ in range(50))
        wrong.extend(index for each in found if not np.array_equal(each, alone[index]))

    callers = [threading.Thread(target=again, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_many_more_threads_than_cores_finish(executors: Executors) -> None:
    executor = executors("scalar", 16)
    packed, x = packing.pack_int4(noise(500, 128)), noise(100, 128)
    expected = multiply(head(executors("scalar", 1), packed), x)
    loaded = head(executor, packed)
    for _ in range(100):
        np.testing.assert_array_equal(multiply(loaded, x), expected)


def test_a_closed_executor_says_so(executors: Executors) -> None:
    executors("scalar", 1)
    executor = CpuExecutor(2)
    loaded = head(executor, packing.pack_float32(noise(5, 8)))
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        multiply(loaded, noise(1, 8))
    with pytest.raises(ValueError, match="0 threads"):
        CpuExecutor(0)
