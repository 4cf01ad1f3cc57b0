"""Properties of a run: determinism, time limits, other threads, signals, device variables."""

from __future__ import annotations

import faulthandler
import signal
import threading

import numpy as np
import pytest

from rvllm.emulator import EmulatorError

from .conftest import compile_source, load

X = np.arange(1, 65, dtype=np.float32)


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_runs_are_repeatable(mode: str) -> None:
    source = """extern "C" __global__ void order(int* next, int* when) {
        when[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1);
    }"""
    module = compile_source(source, "order.cu", mode)

    def order(reverse: bool) -> list[int]:
        when = np.zeros(96, np.int32)
        module.launch("order", 3, 32, [np.zeros(1, np.int32), when], reverse=reverse)
        return list(when)

    assert order(False) == order(False) == list(range(96))
    assert order(True) == order(True) == list(range(96))[::-1]


def test_timeout_is_in_cpu_time() -> None:
    with pytest.raises(EmulatorError, match=r"0\.3 s of CPU time"):
        load("bugs_control").launch("endless", 1, 64, [X, X.copy(), 0], timeout=0.3)


def test_a_barrier_that_never_completes_in_a_cooperative_launch() -> None:
    x, partial, count = np.zeros(400, np.float32), np.zeros(4, np.float32), np.zeros(1, np.uint32)
    count[0] = 2**32 - 4  # the blocks' additions wrap it to zero, so each waits for ever
    with pytest.raises(EmulatorError, match="endless loop") as caught:
        load("cooperative").launch("row_mean_subtract", 4, 64, [x, partial, count, 400], cooperative=True, timeout=0.2)
    assert caught.value.line


def test_launch_from_another_python_thread() -> None:
    tree, endless = load("correct"), load("bugs_control")
    y = np.zeros(64, np.float32)
    caught: list[str] = []

    def work() -> None:
        tree.launch("tree", 1, 64, [X, y, 0])
        with pytest.raises(EmulatorError) as error:
            endless.launch("endless", 1, 1, [X, y, 0], timeout=0.1)
        caught.append(error.value.kind)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert y[0] == X.sum() and caught == ["timeout"]


def test_signal_handlers_are_restored() -> None:
    signals = (signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS, signal.SIGVTALRM)
    before = [signal.getsignal(number) for number in signals]
    was_enabled = faulthandler.is_enabled()
    with pytest.raises(EmulatorError):
        load("bugs_control").launch("division_by_zero", 1, 1, [X, X.copy(), 0])
    assert [signal.getsignal(number) for number in signals] == before
    assert faulthandler.is_enabled() == was_enabled
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_shared_memory_is_fresh_in_every_block() -> None:
    source = """extern "C" __global__ void peek(float* y) {
        __shared__ float s[4];
        y[blockIdx.x * 2] = s[1];
        s[1] = 7.0f;
        y[blockIdx.x * 2 + 1] = s[1];
    }"""
    y = np.zeros((3, 2), np.float32)
    compile_source(source, "peek.cu", "fast").launch("peek", 3, 1, [y])
    assert np.isnan(y[:, 0]).all() and (y[:, 1] == 7).all()


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_preemption_never_sees_half_done_work(mode: str) -> None:
    """Spinning blocks are preempted by a timer at any instruction, also within the emulator's own code."""
    for i in range(4):
        x, partial, count = np.zeros(13200, np.float32), np.zeros(132, np.float32), np.zeros(1, np.uint32)
        args = [x, partial, count, 13200]
        load("cooperative", mode).launch("row_mean_subtract", 132, 64, args, cooperative=True, reverse=i % 2 == 1)
        assert count[0] == 132


def test_grid_and_block_indices() -> None:
    source = """extern "C" __global__ void where(int* y) {
        int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        y[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
    }"""
    y = np.zeros((24, 30), np.int32)
    compile_source(source, "where.cu").launch("where", (2, 3, 4), (5, 3, 2), [y])
    np.testing.assert_array_equal(y, np.arange(24)[:, None] * 1000 + np.arange(30))


def test_a_header_can_add_a_warp_collective() -> None:
    """As later headers do for tensor-core instructions: a struct per lane, a function to serve all."""
    header = """
    struct RotateOperand { float value, result; };
    inline void serve_rotate(unsigned, void* const* operands) {
        for (int lane = 0; lane < 32; lane++)
            ((RotateOperand*)operands[lane])->result = ((RotateOperand*)operands[(lane + 1) % 32])->value;
    }
    inline float rotate(float value, emu::Place place = emu::here()) {
        RotateOperand operand = {value, 0};
        emu::warp_collective(0xffffffffu, &operand, serve_rotate, place);
        return operand.result;
    }"""
    source = """#include "rotate.cuh"
    extern "C" __global__ void k(const float* x, float* y, int n) {
        if (threadIdx.x < n) y[threadIdx.x] = rotate(x[threadIdx.x]);
    }"""
    module = compile_source(source, "k.cu", headers={"rotate.cuh": header})
    y = np.zeros(64, np.float32)
    module.launch("k", 1, 64, [X, y, 64])
    np.testing.assert_array_equal(y, np.roll(X.reshape(2, 32), -1, axis=1).ravel())
    with pytest.raises(EmulatorError, match=r"k\.cu:3: k: warp divergence"):
        module.launch("k", 1, 64, [X, y, 20])


def test_many_modules_give_their_stacks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux allows a process 65,530 mappings, a stack takes two, and every module keeps stacks for its next launch."""
    monkeypatch.setattr("rvllm.emulator.module.MAX_STACKS", 100)
    source = (
        'extern "C" __global__ void turn(int* x) { x[threadIdx.x] = __shfl_sync(0xffffffff, x[threadIdx.x], 31) + %d; }'
    )
    modules = [compile_source(source % i, f"turn{i}.cu", "check") for i in range(5)]
    for _ in range(2):
        for i, module in enumerate(modules):
            x = np.arange(64, dtype=np.int32)
            module.launch("turn", 1, 64, [x])
            assert (x[:32] == 31 + i).all() and (x[32:] == 63 + i).all()
            kept = [m._library.emu_stacks() for m in modules]
            assert sum(kept) <= 100 and kept[i] > 0
