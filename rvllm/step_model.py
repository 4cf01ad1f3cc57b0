"""What the models of part IV have in common: fixed arrays, programs by shape, tokens chosen on the device.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm.cpu_model import read_config, read_rotary
from rvllm.device_sampling import SamplingArrays, sample
from rvllm.gguf import GGUFFile
from rvllm.ops import blocks_for
from rvllm.program import Program
from rvllm.runtime import Array, Runtime
from rvllm.sampling import SamplingState
from rvllm.step import Step
from rvllm.step_inputs import Limits, StepInputs
from rvllm.transfers import Delivery, Ticket, Uplink, new_stream

Ints = NDArray[np.int32]


def bucket(n: int) -> int:
    """The power of two that n fits into: fixed shapes come in few sizes."""
    return 1 << (n - 1).bit_length()


def rope_table(file: GGUFFile, config: Any, positions: int) -> NDArray[np.float32]:
    """Cosine and sine of every pair at every position, float32 [positions + 1, d/2, 2]: they never change.

    One more than there are, since a place that nobody uses any more may have gone one too far.
    """
    rotary, table = read_rotary(file, config), np.empty((positions + 1, config.head_dim // 2, 2), np.float32)
    for first in range(0, positions + 1, 4096):  # the angles themselves take four times the room
        part = table[first : first + 4096]
        phases = rotary.phases(np.arange(first, first + len(part), dtype=np.int32))[:, 0]
        part[..., 0], part[..., 1] = phases.real, phases.imag
    return table


class StepModel:
    """What the models of part IV have in common: fixed arrays, programs by shape, tokens chosen on the device.

    Notebook 15, section 6. A subclass says which program a step takes (`shape_of`) and writes its launches (`build`).
    The step's tokens lie end to end, as the scheduler makes them; every token is a row of its own.
    """

    def __init__(self, file: GGUFFile, rt: Runtime, cache: Any, limits: Limits) -> None:
        self.config, self.rt, self.cache, self.limits = read_config(file), rt, cache, limits
        self.stream = new_stream(rt)
        self.inputs = StepInputs(rt, limits)
        longest = min(self.config.max_position_embeddings, limits.max_blocks * cache.block_size)
        self.rope = rt.upload(rope_table(file, self.config, longest))
        self.logits = rt.empty((limits.row_capacity, self.config.vocab_size))
        self.chosen: Array = rt.zeros(limits.row_capacity, np.int32)
        self._known_tokens = np.zeros(0, np.int32)
        self.delivery = Delivery(rt, limits.row_capacity)
        self._sampling = SamplingArrays(rt, limits.row_capacity)
        self._sampling_uplink = Uplink(rt, self._sampling.words.reshape(-1).view(np.int32))
        self._programs: dict[tuple[Any, ...], Program] = {}

    def shape_of(self, step: Step) -> tuple[Any, ...]:
        """The sizes that a step's launches depend on; steps of one shape share a program."""
        raise NotImplementedError

    def build(self, shape: tuple[Any, ...]) -> Program:
        """The launches of steps of one shape; `head_at` is where those of the logits begin."""
        raise NotImplementedError

    def send_more(self, step: Step) -> None:
        """A place for what a model must send beyond StepInputs."""

    def program(self, step: Step) -> Program:
        """The program that a step takes, made when it is needed for the first time."""
        shape = self.shape_of(step)
        if shape not in self._programs:
            self._programs[shape] = self.build(shape)
        return self._programs[shape]

    def add_advance(self, program: Program, num_rows: int) -> None:
        """The end of a step whose tokens arg-max has chosen; choose.cu does this itself."""
        inputs = self.inputs
        arguments = [self.chosen, inputs.counts, inputs.positions, inputs.computed, self.delivery.delivered]
        program.add_for_each("advance", num_rows, [*arguments, self.limits.row_capacity])

    def start(self, step: Step, states: Sequence[SamplingState | None]) -> Ticket:
        """Begin a step and return at once; the ticket waits for its tokens.

        states[i]: how sequence i's token is chosen; None: nobody wants it. A token id ~i in the step is the token
        chosen for row i of the step started before.
        """
        with self.rt.on_device(), self.stream:
            self.inputs.put(step, self._known_tokens)
            self.send_more(step)
            self.program(step).run()
            self.inputs.advance(step)
            if any(state is not None and state.params.temperature > 0 for state in states):
                self._draw(step, states)
            self._known_tokens = np.zeros(0, np.int32)
            turn = self.inputs.turn
            return self.delivery.ticket(turn, step.num_seqs, lambda token_ids: self._remember(turn, token_ids))

    def forward(self, step: Step, _cache: Any = None, all_positions: bool = False) -> NDArray[np.float32]:
        """Logits float32 [B, V] of each sequence's last token, or [n, V] of all tokens of the step, in NumPy."""
        with self.rt.on_device(), self.stream:
            self.inputs.put(step, np.zeros(0, np.int32))
            self.send_more(step)
            program = self.program(step)
            program.run()
            self.inputs.advance(step)
            self._known_tokens = np.zeros(0, np.int32)
            if not all_positions:
                return self.rt.download(self.logits[: step.num_seqs])
            return self._all_logits(program, len(step.token_ids))

    def _all_logits(self, program: Program, n: int) -> NDArray[np.float32]:
        """The last part of the program again, for a few tokens at a time."""
        parts, at_once = [], min(program.max_rows, self.limits.max_num_seqs)
        for first in range(0, n, at_once):
            rows = np.arange(first, min(n, first + at_once), dtype=np.int32)
            self.inputs.put_rows(rows)
            program.run_head()
            parts.append(self.rt.download(self.logits[: len(rows)]))
        return np.concatenate(parts)

    def _draw(self, step: Step, states: Sequence[SamplingState | None]) -> None:
        """Choose again, by chance, where a temperature says so. A draw belongs to its seed and to the text's length."""
        words = self._sampling.fill(states, step.seq_lens.tolist())
        self._sampling_uplink.send(words.reshape(-1).view(np.int32))
        sample(self.rt, self.logits, self.inputs.counts[1:], self._sampling, self.chosen)
        B = self.limits.row_capacity
        arguments = [self.chosen, self.inputs.counts, self.delivery.delivered, B]
        self.rt.launch("redeliver", blocks_for(B), 256, arguments)

    def _remember(self, turn: int, token_ids: Ints) -> None:
        if turn == self.inputs.turn:  # no other step has started: the device still has them at hand
            self._known_tokens = token_ids
