"""The proof while training: right chains are proven, any wrong bit is found, closed windows say so."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from stepwell.pipeline.base import Kind
from stepwell.pipeline.digest import Digest, DigestWindow, digest_layout, values_by_part
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.plan import gradient_layout, plan_layout
from stepwell.pipeline.proof import (
    Outcome,
    ProofUpdate,
    StateSource,
    Turn,
    Verdict,
    live_subject,
    prove_chain,
    units_of,
)
from stepwell.pipeline.prover import Prover
from stepwell.pipeline.update import GroupEncoder, UpdateRecord, class_name_of, environment_of

SHAPES = [(33, 67), (3,), (130,), (40, 128), (1,), (5, 7)]
PROVEN, MISMATCH, INCONCLUSIVE = Outcome.PROVEN, Outcome.MISMATCH, Outcome.INCONCLUSIVE


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Global(torch.optim.Optimizer):
    """A user's class in which every tensor depends on all."""

    def __init__(self, params: Iterable[object]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        rows = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.norm()) for p in rows)
        for p in rows:
            self.state[p]["norms"] = [total, torch.tensor(total)]
            p.sub_(p.grad, alpha=0.1 / (1.0 + total))


class Training:
    """A live optimizer whose updates since the last save are kept."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], index: int = 0) -> None:
        self.random = torch.Generator().manual_seed(5 + index)
        self.parameters = {
            f"model/{index}.{i}": nn.Parameter(torch.randn(shape, generator=self.random))
            for i, shape in enumerate(SHAPES)
        }
        self.optimizer = make(list(self.parameters.values()))
        self.specs = [
            TensorSpec(name, tuple(p.shape), "float32", Kind.WEIGHT, f"o{index}:0")
            for name, p in self.parameters.items()
        ]
        self.layout = gradient_layout(self.specs, chunk_bytes=4096)
        self.encoder = GroupEncoder("o", [list(range(len(SHAPES)))])
        self.subject = live_subject(index, self.optimizer, self.layout, self.parameters)
        self.index = index
        self.begun = 0

    def update(self, missing: tuple[int, ...] = ()) -> ProofUpdate:
        self.begun += 1
        for i, p in enumerate(self.parameters.values()):
            p.grad = None if i in missing else torch.randn(p.shape, generator=self.random)
        record = UpdateRecord(
            self.index,
            class_name_of(type(self.optimizer)),
            self.encoder.encode(self.optimizer.param_groups),
            missing,
            None,
            None,
            environment_of("cpu"),
        )
        buffers = [self._chunk(part) for part in range(len(self.layout.chunks))]
        self.optimizer.step()
        return ProofUpdate(record, lambda part: buffers[part])

    def _chunk(self, part: int) -> np.ndarray | None:
        chunk, present = self.layout.chunks[part], False
        buffer = np.zeros(chunk.size_bytes, np.uint8)
        for piece in chunk.pieces:
            grad = self.parameters[self.layout.tensors[piece.tensor].name].grad
            if grad is not None:
                present = True
                raw = grad.reshape(-1)[piece.start : piece.stop].contiguous().view(torch.uint8).numpy()
                buffer[piece.offset_bytes : piece.offset_bytes + raw.size] = raw
        return buffer if present else None

    def window(self) -> DigestWindow:
        return DigestWindow(lambda: self.begun, self.begun)

    def frozen(self) -> StateSource:
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        state = {name: copy.deepcopy(self.optimizer.state.get(p, {})) for name, p in self.parameters.items()}
        return StateSource(weights, lambda name: state[name])


class Watched:
    """A prover whose verdicts are waited for."""

    def __init__(self, *trainings: Training, **options: int) -> None:
        self.verdicts: queue.Queue[Verdict] = queue.Queue()
        self.prover = Prover([t.subject for t in trainings], self.verdicts.put, **options)

    def save(self, training: Training) -> None:
        update = training.update()
        self.prover.observe(training.window(), [update])

    def next(self) -> Verdict:
        return self.verdicts.get(timeout=30)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*trainings: Training, **options: int) -> Watched:
        made.append(Watched(*trainings, **options))
        return made[-1]

    yield make
    for watched in made:
        watched.prover.close()


def adamw(rows: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(rows, lr=0.01)


MAKERS = [
    adamw,
    lambda rows: torch.optim.AdamW(rows, fused=True),
    lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    lambda rows: torch.optim.Adafactor(rows),
    Global,
]


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "fused", "sgd", "adafactor", "user"])
def test_all_units_are_proven_in_turn(make: Callable[..., torch.optim.Optimizer], watch: Callable) -> None:
    training = Training(make)
    watched = watch(training)
    units = units_of(training.subject)
    covered = sorted((p.tensor, p.start, p.stop) for unit in units for p in unit.pieces)
    assert sum(stop - start for _, start, stop in covered) == sum(s.element_count for s in training.specs)
    watched.prover.observe(training.window(), [])
    for k in range(len(units) + 2):
        missing = (k % len(SHAPES),) if k % 2 else ()
        updates = [training.update(missing) for _ in range(k % 3 + 1)]
        watched.prover.observe(training.window(), updates)
        assert watched.next().outcome is PROVEN
    assert (
        watched.prover.unit_count == len(units) == {adamw: len(training.layout.chunks)}.get(make, len(units))
    )
    assert (make is Global) == (len(units) == 1)


def test_two_optimizers_share_the_rotation(watch: Callable) -> None:
    first, second = Training(adamw), Training(lambda rows: torch.optim.SGD(rows, lr=0.1), 1)
    watched = watch(first, second)
    watched.prover.observe(first.window(), [])
    said = set()
    for k in range(watched.prover.unit_count):
        updates = [first.update()] + ([second.update()] if k % 2 else [])
        watched.prover.observe(first.window(), updates)
        verdict = watched.next()
        assert verdict.outcome is PROVEN, verdict
        said.add(verdict.what[-1])
    assert said == {"0", "1"}


def test_a_torn_gradient_is_found(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    outcomes = []
    watched.prover.observe(training.window(), [])
    for _ in range(watched.prover.unit_count):
        update = training.update()
        for part in range(len(training.layout.chunks)):
            update.gradients(part)[1] ^= 1
        watched.prover.observe(training.window(), [update])
        outcomes.append(watched.next())
    assert {verdict.outcome for verdict in outcomes} == {MISMATCH}
    assert all("differ" in verdict.reason and "model/" in verdict.reason for verdict in outcomes)


def test_changed_moments_are_found(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    training.update()
    watched.prover.observe(training.window(), [])
    update = training.update()
    training.optimizer.state[training.parameters["model/0.0"]]["exp_avg_sq"].view(-1)[3] += 1
    watched.prover.observe(training.window(), [update])
    verdict = watched.next()
    assert verdict.outcome is MISMATCH
    assert "'exp_avg_sq' of model/0.0[0:" in verdict.reason


def test_a_lost_gradient_is_a_mismatch(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    watched.prover.observe(training.window(), [])
    update = training.update()
    watched.prover.observe(training.window(), [ProofUpdate(update.record, lambda part: None)])
    verdict = watched.next()
    assert verdict.outcome is MISMATCH
    assert "replay failed" in verdict.reason


def test_a_closed_window_is_inconclusive(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    watched.prover.observe(training.window(), [])
    late = training.window()
    update = training.update()
    watched.prover.observe(late, [update])
    assert watched.next().outcome is INCONCLUSIVE
    # Nothing was copied, so the next save has nothing to prove, and the one after has.
    watched.save(training)
    assert watched.verdicts.empty()
    watched.save(training)
    assert watched.next().outcome is PROVEN


def test_other_writes_make_a_copy_unusable(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    watched.prover.observe(training.window(), [])
    update = training.update()
    watched.prover.observe(DigestWindow(lambda: 1, 1, lambda: False), [update])
    assert watched.next().outcome is INCONCLUSIVE


def test_reset_forgets_the_copy(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    watched.prover.observe(training.window(), [])
    watched.prover.reset()
    watched.prover.observe(training.window(), [])
    assert watched.verdicts.empty()


def test_too_large_units_are_left_out(watch: Callable) -> None:
    training = Training(Global)
    watched = watch(training, unit_bytes_max=100)
    assert watched.prover.unit_count == 0
    watched.prover.observe(training.window(), [])
    watched.save(training)
    assert watched.verdicts.empty()


def test_a_save_while_the_prover_is_busy_is_passed_over(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    gate = threading.Event()

    def slow() -> Verdict:
        gate.wait(30)
        return Verdict(PROVEN, "slow")

    assert watched.prover.submit(slow)
    watched.prover.observe(training.window(), [])
    watched.save(training)
    watched.save(training)
    gate.set()
    assert [watched.next().what[:4] for _ in range(2)] == ["slow", "chun"]
    assert watched.verdicts.empty()


def test_a_step_that_raises_is_a_mismatch(watch: Callable) -> None:
    training = Training(adamw)
    watched = watch(training)
    watched.prover.submit(lambda: 1 // 0)
    verdict = watched.next()
    assert verdict.outcome is MISMATCH
    assert "ZeroDivisionError" in verdict.reason


def test_closing_drops_what_waits() -> None:
    training = Training(adamw)
    watched = Watched(training)
    gate = threading.Event()
    running = threading.Event()

    def slow() -> Verdict:
        running.set()
        gate.wait(30)
        return Verdict(PROVEN, "slow")

    while watched.prover.submit(slow):
        pass
    assert running.wait(30)
    threading.Timer(0.05, gate.set).start()
    watched.prover.close()
    assert watched.verdicts.qsize() == 1
    assert watched.prover.stopping
    assert not watched.prover.submit(slow)
    watched.prover.close()


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "fused", "sgd", "adafactor", "user"])
def test_a_new_base_is_proven_against_the_old_one(make: Callable[..., torch.optim.Optimizer]) -> None:
    training = Training(make)
    old = training.frozen()
    updates = [training.update((k % 6,)) for k in range(7)]
    new = training.frozen()
    assert prove_chain(training.subject, "base", old, updates, new) == Verdict(PROVEN, "base")
    assert prove_chain(training.subject, "base", old, updates[:-1], new).outcome is MISMATCH
    assert prove_chain(training.subject, "base", old, updates, new, lambda: True).outcome is INCONCLUSIVE
    new.weights["model/0.5"].view(torch.int32)[4, 6] ^= 1
    verdict = prove_chain(training.subject, "base", old, updates, new)
    assert verdict.outcome is MISMATCH
    assert "model/0.5[0:35]" in verdict.reason


def test_a_proof_with_little_time_takes_the_units_in_turn() -> None:
    training = Training(MAKERS[0])
    old = training.frozen()
    updates = [training.update((k % 6,)) for k in range(7)]
    new = training.frozen()
    new.weights["model/0.5"].view(torch.int32)[4, 6] ^= 1
    units = len(units_of(training.subject))
    assert units > 2
    turn = Turn(budget_s=0.0)
    outcomes = []
    for _ in range(units):
        before = turn.next
        outcomes.append(prove_chain(training.subject, "base", old, updates, new, turn=turn).outcome)
        if outcomes[-1] is PROVEN:
            assert turn.next == before + 1
        else:
            turn.next += 1
    assert outcomes.count(MISMATCH) == 1
    assert outcomes.count(PROVEN) == units - 1


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "fused", "sgd", "adafactor", "user"])
def test_the_first_updates_are_proven_against_a_digest(make: Callable[..., torch.optim.Optimizer]) -> None:
    training = Training(make)
    base = training.frozen()
    updates = [training.update(), training.update()]
    digested = plan_layout(training.specs, chunk_bytes=4096)
    values = tuple(digest_layout(digested, training.parameters))

    def outcome(values: tuple[str | None, ...]) -> Outcome:
        known = values_by_part(training.layout, digested, Digest("xxh3-64", digested.hash, values))
        return prove_chain(training.subject, "start", base, updates, known.__getitem__).outcome

    assert outcome(values) is PROVEN
    assert outcome((None, *values[1:])) is INCONCLUSIVE
    assert outcome((*values[:-1], "0" * 16)) is MISMATCH


def test_digests_of_another_layout_prove_nothing() -> None:
    training = Training(adamw)
    other = plan_layout(training.specs, chunk_bytes=8192)
    digest = Digest("xxh3-64", other.hash, tuple(digest_layout(other, training.parameters)))
    known = values_by_part(training.layout, other, digest)
    assert None in known
    assert values_by_part(training.layout, training_layout(training), digest) == [None] * len(known)


def training_layout(training: Training) -> Layout:
    return plan_layout(training.specs, chunk_bytes=4096)
