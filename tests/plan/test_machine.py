from __future__ import annotations

import pytest

from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.model import TILE_NUMEL, pack_params


def test_every_machine_of_the_catalogue_is_usable_and_marked_as_assumed() -> None:
    names = catalogue.machines()
    assert len(names) >= 20
    for name in names:
        machine = catalogue.machine(name)
        assert machine.in_place == (machine.device == "cpu")
        assert machine.ram_bytes > 8e9
        assert machine.disk_bytes > 1e11
        assert machine.bf16_rates[-1][1] >= machine.fp32_rates[-1][1]
        assert machine.read_bytes_per_s >= machine.write_bytes_per_s
        assert {"ram_bytes", "fp32_rates", "mixed_bytes_per_s"} <= machine.assumed
        assert not {"assumed", "name"} & machine.assumed
        assert all(known == "assumed" for *_, known in machine.rows())


def test_json_gives_the_same_machine_back() -> None:
    machine = catalogue.machine("h100").changed(read_bytes_per_s=1e9)
    assert Machine.from_json(machine.to_json()) == machine
    assert "read_bytes_per_s" not in machine.assumed


@pytest.mark.parametrize(
    ("figures", "match"),
    [
        ({"ram": 64}, "has no ram"),
        ({"ram_gb": 0}, "ram_gb=0"),
        ({"ram_gb": "64GB"}, "ram_gb='64GB'"),
        ({"cores": True}, "cores=True"),
        ({"vram_gb": 24}, "needs link_gb_per_s"),
        ({"ram_gb": float("nan")}, "ram_gb=nan"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    figures: dict[str, object], match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        nominal("box", figures)


def test_a_rate_lies_between_the_measured_ones() -> None:
    machine = nominal("box", {"fp32_tflops": 1}).changed(
        fp32_rates=((100, 1e9), (300, 3e9))
    )
    rates = [machine.flops_per_s(rows, bf16=False) for rows in (50, 100, 200, 300, 999)]
    assert rates == [0.5e9, 1e9, 2e9, 3e9, 3e9]


def test_an_unknown_change_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no disk"):
        nominal("box", {}).changed(disk=1)


def test_a_machine_that_is_not_there_says_what_is_near() -> None:
    with pytest.raises(ArgumentError, match="near: rtx-4090"):
        catalogue.machine("rtx4090")


def test_tiers_name_what_there_is() -> None:
    assert [tier.name for tier in catalogue.machine("h100").tiers()] == [
        "device",
        "ram",
        "disk",
    ]
    assert [tier.name for tier in catalogue.machine("cpu-laptop").tiers()] == [
        "ram",
        "disk",
    ]


def test_an_update_costs_something_for_each_tile() -> None:
    machine = nominal("box", {}).changed(update_params_per_s=1e9)
    pack = pack_params(0, "head", [("weight", (5, TILE_NUMEL // 2))])
    expected = pack.numel / 1e9 + 3 * 0.5e-3
    assert machine.update_seconds(pack) == pytest.approx(expected)
