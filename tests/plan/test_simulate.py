from __future__ import annotations

import itertools

import pytest

from megatrain_nb.plan import catalogue
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.memory import (
    Residency,
    plan_residency,
    streaming_bytes,
    working_bytes,
)
from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params
from megatrain_nb.plan.simulate import BlockTimes, Simulated, Simulation
from megatrain_nb.plan.traffic import link_traffic, step_traffic

BLOCKS = 8
NUMEL = 1 << 20


def make_spec(*, split: bool = False, blocks: int = BLOCKS) -> ModelSpec:
    packs = tuple(
        pack_params(i, f"layer.{i}", [("w", (NUMEL,))], split=split)
        for i in range(blocks)
    )
    return ModelSpec(
        blocks=tuple(
            BlockSpec(index=i, name=f"layer.{i}", packs=(i,)) for i in range(blocks)
        ),
        packs=packs,
    )


def make_machine(disk: float = 1e9, **changes: object) -> Machine:
    return nominal("box", {"ram_gb": 64}).changed(
        read_bytes_per_s=disk,
        write_bytes_per_s=disk,
        mixed_bytes_per_s=disk,
        update_params_per_s=1e12,
        split_update_params_per_s=1e12,
        **changes,
    )


def residency_of(
    spec: ModelSpec, share: float, elsewhere: frozenset[int] = frozenset()
) -> Residency:
    """Return a plan with room for what streams, and for a share of the state."""
    least = max(streaming_bytes(spec), working_bytes(spec, tile_numel=NUMEL))
    return plan_residency(
        spec,
        limit_bytes=least + round(share * spec.state_bytes),
        activation_bytes=0,
        tile_numel=NUMEL,
        elsewhere=elsewhere,
    )


def run(
    spec: ModelSpec,
    machine: Machine,
    *,
    share: float = 0.0,
    seconds: float = 1.0,
    trained: frozenset[int] | None = None,
) -> Simulated:
    residency = residency_of(spec, share)
    every = frozenset(range(len(spec.packs)))
    return Simulation(
        spec,
        residency,
        range(len(spec.blocks)),
        [BlockTimes(seconds, seconds, 2 * seconds)] * len(spec.blocks),
        machine,
        every if trained is None else trained,
    ).run()


@pytest.mark.parametrize(
    ("name", "share", "split"),
    [
        *itertools.product(
            ("llama-2-7b", "llama-3.1-405b", "gpt2-xl"), (0, 0.3, 0.6, 0.95), (0, 1)
        )
    ],
)
def test_it_moves_the_bytes_that_the_plan_counts(
    name: str, share: float, split: int
) -> None:
    """`step_traffic` counts from the schedule, this one obeys it: two ways to the same number."""
    spec = catalogue.model(name).spec(split=bool(split))
    residency = residency_of(spec, share)
    counted = step_traffic(spec, residency, range(len(spec.blocks)))
    done = run(spec, make_machine(), share=share)
    # A tied weight's gradient goes and comes back between its two uses: one more of each.
    first, last = spec.packs_of(0)[0], spec.packs_of(len(spec.blocks) - 1)[0]
    tied = first is last and first.index not in residency.grads
    more = first.grad_bytes if tied else 0
    assert done.read_bytes == counted.read_bytes + more
    assert done.written_bytes == counted.written_bytes + more


def test_a_slow_processor_hides_the_disk() -> None:
    done = run(make_spec(), make_machine(disk=1e9), seconds=1.0)
    # The last block turns while it is loaded: it computes nothing again.
    compute = BLOCKS * 4.0 - 1.0
    assert done.busy_s["compute"] == pytest.approx(compute)
    assert done.seconds == pytest.approx(compute, rel=0.02)


def test_a_slow_disk_bounds_the_step() -> None:
    done = run(make_spec(), make_machine(disk=1e7), seconds=1e-3)
    disk = (done.read_bytes + done.written_bytes) / 1e7
    assert disk <= done.seconds * 1.001
    assert done.seconds == pytest.approx(disk, rel=0.15)


def test_no_lane_works_on_two_things_at_once() -> None:
    done = run(make_spec(split=True), make_machine(disk=2e8), seconds=0.02)
    for lane in ("compute", "disk", "update"):
        spans = sorted(
            (span for span in done.spans if span.lane == lane), key=lambda s: s.start_s
        )
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-9
        assert done.busy_s[lane] <= done.seconds + 1e-9


def test_a_block_computes_only_with_its_weights_and_after_its_update() -> None:
    done = run(make_spec(), make_machine(disk=3e8), seconds=0.01)
    forwards = {s.name: s for s in done.spans if s.kind == "FORWARD"}
    for step in (span for span in done.spans if span.kind == "STEP"):
        assert step.end_s <= forwards[step.name].start_s + 1e-9
    assert len(forwards) == BLOCKS


def test_everything_in_ram_moves_nothing() -> None:
    done = run(make_spec(), make_machine(), share=1.1)
    assert done.read_bytes == done.written_bytes == 0
    assert done.busy_s["disk"] == 0


def test_what_is_frozen_is_not_written() -> None:
    spec = make_spec()
    done = run(spec, make_machine(), trained=frozenset())
    assert done.written_bytes == 0
    assert 0 < done.read_bytes < 2 * spec.weight_bytes
    half = run(spec, make_machine(), trained=frozenset(range(BLOCKS // 2)))
    full = run(spec, make_machine())
    assert 0 < half.written_bytes < full.written_bytes


def test_a_device_gets_weights_twice_and_gives_gradients_once() -> None:
    machine = make_machine(
        disk=1e9,
        vram_bytes=10**10,
        onload_bytes_per_s=1e9,
        offload_bytes_per_s=1e9,
    )
    spec = make_spec()
    done = run(spec, machine, seconds=0.1)
    last = spec.packs[-1].weight_bytes
    assert done.offload_bytes == sum(pack.grad_bytes for pack in spec.packs)
    assert spec.weight_bytes < done.onload_bytes <= 2 * spec.weight_bytes
    assert done.onload_bytes >= 2 * spec.weight_bytes - 4 * last
    assert done.seconds == pytest.approx(done.busy_s["compute"], rel=0.1)


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2-xl"])
@pytest.mark.parametrize("split", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("there", [0, 1, 5, None], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize("more", [0, 3], ids=["tail", "and weights"])
def test_what_lives_on_a_device_moves_nothing(
    name: str, *, split: bool, there: int | None, more: int
) -> None:
    """Simulated as `step_traffic` and `link_traffic` count it; the last packs live on the device, more weights stay."""
    spec = catalogue.model(name).spec(split=split)
    order = range(len(spec.blocks))
    packs = list(dict.fromkeys(spec.pack_indices(reversed(order))))
    count = len(packs) if there is None else there
    tail, stay = frozenset(packs[:count]), frozenset(packs[: count + more])
    residency = residency_of(spec, 0.2, tail)
    machine = make_machine(
        vram_bytes=10**12, onload_bytes_per_s=1e9, offload_bytes_per_s=1e9
    )
    every = frozenset(range(len(spec.packs)))
    times = [BlockTimes(1.0, 1.0, 2.0)] * len(spec.blocks)
    done = Simulation(spec, residency, order, times, machine, every, stay).run()
    counted = step_traffic(spec, residency, order, stay=stay)
    # A tied weight's gradient goes and comes back between its two uses: one more of each.
    first, last = spec.packs_of(0)[0], spec.packs_of(len(spec.blocks) - 1)[0]
    tied = first is last and first.index not in residency.grads | tail
    twice = first.grad_bytes if tied else 0
    assert done.read_bytes == counted.read_bytes + twice
    assert done.written_bytes == counted.written_bytes + twice
    onload, offload = link_traffic(spec, order, stay=stay, elsewhere=tail)
    assert done.onload_bytes == onload
    assert done.offload_bytes == offload + twice
    if there is None:
        assert (done.read_bytes, done.written_bytes, onload, offload) == (0, 0, 0, 0)


def test_the_update_on_a_device_takes_its_memory_s_time() -> None:
    spec = make_spec()
    machine = make_machine(
        vram_bytes=10**10,
        vram_bytes_per_s=1e9,
        onload_bytes_per_s=1e9,
        offload_bytes_per_s=1e9,
    )
    every = frozenset(range(BLOCKS))
    residency = Residency(elsewhere=every)
    times = [BlockTimes(0.1, 0.1, 0.2)] * BLOCKS
    done = Simulation(spec, residency, range(BLOCKS), times, machine, every).run()
    update = BLOCKS * 28 * NUMEL / 1e9
    assert done.seconds == pytest.approx(BLOCKS * 0.4 - 0.1 + update)
    assert done.busy_s["update"] == 0


@pytest.mark.parametrize("numel", [9 << 20, 30 << 20], ids=["three tiles", "eight"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_little_room_costs_time_and_no_bytes(numel: int, share: float) -> None:
    """Between the least room and that with which streaming never waits."""
    packs = tuple(pack_params(i, f"layer.{i}", [("w", (numel,))]) for i in range(6))
    blocks = tuple(BlockSpec(index=i, name=str(i), packs=(i,)) for i in range(6))
    spec = ModelSpec(blocks=blocks, packs=packs)
    least, most = working_bytes(spec), streaming_bytes(spec)
    assert least < most

    def done(room: int) -> Simulated:
        residency = Residency(working_bytes=room)
        times = [BlockTimes(0.02, 0.0, 0.04)] * 6
        every = frozenset(range(6))
        order = range(6)
        return Simulation(spec, residency, order, times, make_machine(1e9), every).run()

    room = round(least + share * (most - least))
    found, free = done(room), done(most)
    counted = step_traffic(spec, Residency(working_bytes=room), range(6))
    assert (found.read_bytes, found.written_bytes) == (
        counted.read_bytes,
        counted.written_bytes,
    )
    assert found.seconds >= 0.99 * free.seconds
    disk = (found.read_bytes + found.written_bytes) / 1e9
    assert found.seconds <= disk + found.busy_s["compute"] + found.busy_s["update"]
    for lane in ("compute", "disk", "update"):
        spans = sorted(
            (span for span in found.spans if span.lane == lane), key=lambda s: s.start_s
        )
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-9


def test_what_blocks_keep_may_take_the_room_of_what_streams() -> None:
    numel = 10 << 20
    packs = tuple(pack_params(i, f"layer.{i}", [("w", (numel,))]) for i in range(6))
    blocks = tuple(BlockSpec(index=i, name=str(i), packs=(i,)) for i in range(6))
    spec = ModelSpec(blocks=blocks, packs=packs)
    room = round(0.72 * streaming_bytes(spec))
    times = [BlockTimes(0.02, 0.0, 0.04)] * 6

    def seconds(lent: dict[int, int], room: int = room) -> float:
        return (
            Simulation(
                spec,
                Residency(working_bytes=room),
                range(6),
                times,
                make_machine(1e9),
                frozenset(range(6)),
                lent=lent,
            )
            .run()
            .seconds
        )

    assert seconds({}) == seconds(dict.fromkeys(range(6), 0))
    assert seconds(dict.fromkeys(range(6), numel // 2)) > seconds({})
    # For a part of the step it is as if there were less room.
    for block in range(5):
        assert seconds({block: numel}) >= seconds({})
        assert seconds({block: 4 * numel}) > seconds({})
        assert seconds({block: 4 * numel}) < seconds({}, room - 4 * numel)


def test_it_says_the_same_each_time() -> None:
    machine = make_machine(disk=3e8)
    assert run(make_spec(), machine) == run(make_spec(), machine)
