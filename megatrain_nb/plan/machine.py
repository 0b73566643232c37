"""A machine as the planner sees it: tiers with capacities and rates, and how fast it computes.

The figures are measured (`megatrain_nb.runtime.probe`) or nominal: what the makers publish, rounded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_nb.plan.model import PackSpec

Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of memory: what it holds, and how fast bytes come out of it and go into it."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a forecast needs to know of a machine.

    Attributes
    ----------
    name, device
        Of the machine, and of what computes; ``device`` is ``"cpu"`` where there is no accelerator.
    vram_bytes, vram_bytes_per_s
        The accelerator's memory, and how fast it is read and written together; 0 where blocks compute in RAM.
    ram_bytes, disk_bytes
        What a session may take without a limit of its own.
    pin_bytes
        Host memory that may be page-locked.
    framework_bytes
        RAM that Python, torch and transformers take before there is a model.
    fp32_rates, bf16_rates
        Matrix products: (rows, operations per second), rising in rows. Few rows use the units badly.
    memory_bytes_per_s, fresh_bytes_per_s
        Host memory, read and written together; and how fast the system gives memory that was not in use.
    onload_bytes_per_s, offload_bytes_per_s, pageable_bytes_per_s
        The link to the device and back from page-locked memory, and from ordinary memory; 0 without a device.
    read_bytes_per_s, write_bytes_per_s, mixed_bytes_per_s
        The disk in the offload directory: alone, and both at once (their sum).
    io_lost_s_per_byte
        Seconds that computing on the host's cores loses for a byte that goes to or from the disk meanwhile.
    update_params_per_s, split_update_params_per_s
        AdamW on the host: fp32 parameters, and those in two halves.
    codec_params_per_s
        The same with encoded moments and fp32 weights: (codec, parameters per second).
    endurance_bytes
        What the drives' makers warrant to be written; 0 if unknown.
    assumed
        Names of the fields that were not measured.
    """

    name: str
    device: str = "cpu"
    vram_bytes: int = 0
    vram_bytes_per_s: float = 0.0
    ram_bytes: int
    disk_bytes: int
    pin_bytes: int = 0
    cores: int = 1
    framework_bytes: int = 600_000_000
    fp32_rates: Rates
    bf16_rates: Rates
    memory_bytes_per_s: float
    fresh_bytes_per_s: float = 5e9
    onload_bytes_per_s: float = 0.0
    offload_bytes_per_s: float = 0.0
    pageable_bytes_per_s: float = 0.0
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    io_lost_s_per_byte: float = 0.0
    update_params_per_s: float
    split_update_params_per_s: float
    codec_params_per_s: tuple[tuple[str, float], ...] = ()
    endurance_bytes: int = 0
    assumed: frozenset[str] = field(default_factory=frozenset)

    @property
    def in_place(self) -> bool:
        """Whether blocks compute in RAM."""
        return self.vram_bytes == 0

    def tiers(self) -> tuple[Tier, ...]:
        """Return device (where there is one), RAM and disk."""
        ram = Tier(
            "ram", self.ram_bytes, self.memory_bytes_per_s, self.memory_bytes_per_s
        )
        disk = Tier(
            "disk", self.disk_bytes, self.read_bytes_per_s, self.write_bytes_per_s
        )
        if self.in_place:
            return ram, disk
        device = Tier(
            "device", self.vram_bytes, self.offload_bytes_per_s, self.onload_bytes_per_s
        )
        return device, ram, disk

    def flops_per_s(self, rows: float, *, bf16: bool) -> float:
        """Return the rate of a matrix product with so many rows, between the measured ones.

        Examples
        --------
        >>> from megatrain_nb.plan.machine import nominal
        >>> machine = nominal("box", {"ram_gb": 64, "bf16_tflops": 2, "fp32_tflops": 1})
        >>> machine.flops_per_s(4096, bf16=True) / machine.flops_per_s(4096, bf16=False)
        2.0
        """
        rates = self.bf16_rates if bf16 else self.fp32_rates
        (below, rate), *_ = rates
        if rows <= below:
            return rate * rows / below
        for above, faster in rates[1:]:
            if rows <= above:
                share = (rows - below) / (above - below)
                return rate + share * (faster - rate)
            below, rate = above, faster
        return rate

    def update_seconds(self, pack: PackSpec) -> float:
        """Return how long the update of a pack takes on the host: the kernels, and what leads to each tile's."""
        return -(-pack.numel // TILE_NUMEL) * _TILE_S + self._kernel_seconds(pack)

    def _kernel_seconds(self, pack: PackSpec) -> float:
        wide = self.update_params_per_s
        rate = self.split_update_params_per_s if pack.split else wide
        if not pack.encoded:
            return pack.numel / rate
        rates = dict(self.codec_params_per_s)
        slower = rate / wide  # two halves cost as much more with any codec
        return sum(
            param.numel / (slower * rates.get(param.codec, wide))
            for param in pack.params
        )

    def device_update_seconds(self, pack: PackSpec) -> float:
        """Return how long the update of a pack takes that lives on the device."""
        each = _SPLIT_UPDATE_BYTES if pack.split else _UPDATE_BYTES
        return (
            pack.numel * each / self.vram_bytes_per_s if self.vram_bytes_per_s else 0.0
        )

    def changed(self, **changes: Any) -> Self:
        """Return this machine with other figures; they are no longer assumed.

        Raises
        ------
        ArgumentError
            A name that is not one of the figures.
        """
        known = {each.name for each in fields(self)}
        unknown = changes.keys() - known
        if unknown:
            msg = f"a machine has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
            raise ArgumentError(msg)
        return replace(
            self, **({"assumed": self.assumed - changes.keys()} | dict(changes))
        )

    def to_json(self) -> str:
        """Return text that `from_json` takes."""
        return json.dumps(asdict(self) | {"assumed": sorted(self.assumed)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the machine that `to_json` wrote; raises ValueError or TypeError if it is another text."""
        found = json.loads(text)
        for name in ("fp32_rates", "bf16_rates"):
            found[name] = tuple((int(rows), float(rate)) for rows, rate in found[name])
        found["codec_params_per_s"] = tuple(
            (str(codec), float(rate)) for codec, rate in found["codec_params_per_s"]
        )
        return cls(**(found | {"assumed": frozenset(found["assumed"])}))

    def rows(self) -> list[tuple[str, str, str]]:
        """Return label, text, and how it is known, of every figure."""
        gb = "GB/s"
        wide, halves = self.fp32_rates[-1][1], self.bf16_rates[-1][1]
        lines = [
            ("device", self.device, "device"),
            (
                "fp32 matrix products",
                f"{format_count(wide)} operations/s ({_thin(self.fp32_rates)})",
                "fp32_rates",
            ),
            (
                "bf16 matrix products",
                f"{format_count(halves)} operations/s ({_thin(self.bf16_rates)})",
                "bf16_rates",
            ),
            (
                "host memory",
                f"{self.memory_bytes_per_s / 1e9:.3g} {gb}",
                "memory_bytes_per_s",
            ),
            (
                "memory from the system",
                f"{self.fresh_bytes_per_s / 1e9:.3g} {gb}",
                "fresh_bytes_per_s",
            ),
            (
                "disk, read",
                f"{self.read_bytes_per_s / 1e9:.3g} {gb}",
                "read_bytes_per_s",
            ),
            (
                "disk, written",
                f"{self.write_bytes_per_s / 1e9:.3g} {gb}",
                "write_bytes_per_s",
            ),
            (
                "disk, both at once",
                f"{self.mixed_bytes_per_s / 1e9:.3g} {gb} together",
                "mixed_bytes_per_s",
            ),
            (
                "for each GB of that, computing loses",
                f"{1e9 * self.io_lost_s_per_byte:.2g} s",
                "io_lost_s_per_byte",
            ),
            (
                "AdamW on the host",
                f"{format_count(self.update_params_per_s)} parameters/s, in halves "
                f"{format_count(self.split_update_params_per_s)}",
                "update_params_per_s",
            ),
            *(
                (
                    f"AdamW with {codec} moments",
                    f"{format_count(rate)} parameters/s",
                    "codec_params_per_s",
                )
                for codec, rate in self.codec_params_per_s
            ),
            ("RAM", format_bytes(self.ram_bytes), "ram_bytes"),
            ("that may be page-locked", format_bytes(self.pin_bytes), "pin_bytes"),
            (
                "taken by Python and torch",
                format_bytes(self.framework_bytes),
                "framework_bytes",
            ),
            ("disk", f"{format_bytes(self.disk_bytes)} free", "disk_bytes"),
        ]
        if not self.in_place:
            lines += [
                ("device memory", format_bytes(self.vram_bytes), "vram_bytes"),
                (
                    "device memory, read and written",
                    f"{self.vram_bytes_per_s / 1e9:.3g} {gb}",
                    "vram_bytes_per_s",
                ),
                (
                    "link to the device",
                    f"{self.onload_bytes_per_s / 1e9:.3g} {gb}, from ordinary memory "
                    f"{self.pageable_bytes_per_s / 1e9:.3g} {gb}",
                    "onload_bytes_per_s",
                ),
                (
                    "link from the device",
                    f"{self.offload_bytes_per_s / 1e9:.3g} {gb}",
                    "offload_bytes_per_s",
                ),
            ]
        return [
            (label, text, "assumed" if name in self.assumed else "measured")
            for label, text, name in lines
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, *_ in rows)
        lines = [f"{label:<{width}}  {text}  [{known}]" for label, text, known in rows]
        return "\n".join([self.name, *lines])

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        # By name: pictures are the notebook's, which knows this layer and not the other way round.
        from importlib import import_module  # noqa: PLC0415

        draw = import_module("megatrain_nb.notebook.forecast").machine_html
        return {"text/plain": str(self), "text/html": draw(self)}


# What a nominal machine reaches of its makers' figures: matrix products of many rows in a decoder layer.
SUSTAINED = 0.5

# AdamW in fp32 passes 28 bytes of host memory for each parameter, in two halves 32: weights, gradient and both
# moments are read, all but the gradient written.
_UPDATE_BYTES, _SPLIT_UPDATE_BYTES = 28, 32

# Encoded moments pass fewer bytes and compute more: as fast as fp32 with one or two codes in a byte, about half as fast
# with others (docs/codecs.md).
_CODEC_SPEED = {"8bit": 1.0, "4bit": 1.0, "3bit": 0.55, "2bit": 0.6}

# What Python does for each tile of an update. Measured (docs/forecast.md).
_TILE_S = 0.5e-3

_TOLD = {"name", "assumed"}  # what is no figure

_NOMINAL = {
    "device": "cpu",
    "vram_gb": 0.0,
    "vram_gb_per_s": 500.0,
    "ram_gb": 64.0,
    "disk_gb": 1000.0,
    "cores": 8,
    "fp32_tflops": 1.0,
    "bf16_tflops": 1.0,
    "memory_gb_per_s": 60.0,
    "link_gb_per_s": 0.0,
    "disk_read_gb_per_s": 5.0,
    "disk_write_gb_per_s": 3.0,
    "endurance_tb": 600.0,
}


def nominal(name: str, figures: Mapping[str, Any]) -> Machine:
    """Return a machine from a few public figures; all that follows from them is assumed.

    Parameters
    ----------
    name
        Of the machine.
    figures
        ``device``, ``cores``, ``vram_gb``, ``ram_gb``, ``disk_gb`` (GB), ``fp32_tflops``, ``bf16_tflops`` (dense, as
        published), ``vram_gb_per_s`` (the device's memory), ``memory_gb_per_s`` (host), ``link_gb_per_s`` (each way),
        ``disk_read_gb_per_s``, ``disk_write_gb_per_s``, ``endurance_tb``. What is left out is that of a middling desktop.

    Raises
    ------
    ArgumentError
        An unknown name, or not a number above 0 (``vram_gb``, ``link_gb_per_s`` and ``endurance_tb`` may be 0).

    Notes
    -----
    A third of the rate is taken at 128 rows, two thirds at 1024, the whole at 8192.
    """
    unknown = figures.keys() - _NOMINAL.keys()
    if unknown:
        msg = f"{name}: a machine has no {', '.join(sorted(unknown))}; it has {', '.join(_NOMINAL)}"
        raise ArgumentError(msg)
    found: dict[str, Any] = _NOMINAL | dict(figures)
    for key, value in found.items():
        if key == "device":
            continue
        least = 0 if key in ("vram_gb", "link_gb_per_s", "endurance_tb") else 1e-9
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < 1e12
        ):
            msg = f"{name}: {key}={value!r} is not usable; give a number above 0"
            raise ArgumentError(msg)
    if found["vram_gb"] and not found["link_gb_per_s"]:
        msg = f"{name}: a device with its own memory needs link_gb_per_s"
        raise ArgumentError(msg)

    def rates(tflops: float) -> Rates:
        full = SUSTAINED * tflops * 1e12
        return (128, full / 3), (1024, full * 2 / 3), (8192, full)

    memory = found["memory_gb_per_s"] * 1e9
    read, write = found["disk_read_gb_per_s"] * 1e9, found["disk_write_gb_per_s"] * 1e9
    link = found["link_gb_per_s"] * 1e9
    return Machine(
        name=name,
        device=str(found["device"]),
        vram_bytes=round(found["vram_gb"] * 1e9),
        vram_bytes_per_s=found["vram_gb_per_s"] * 1e9 if found["vram_gb"] else 0.0,
        ram_bytes=round(found["ram_gb"] * 0.8e9),  # a fifth is the system's
        disk_bytes=round(found["disk_gb"] * 1e9),
        pin_bytes=round(found["ram_gb"] * 0.4e9),
        cores=int(found["cores"]),
        fp32_rates=rates(found["fp32_tflops"]),
        bf16_rates=rates(found["bf16_tflops"]),
        memory_bytes_per_s=memory,
        onload_bytes_per_s=link,
        offload_bytes_per_s=link,
        pageable_bytes_per_s=link / 3,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=2 * read * write / (read + write),
        io_lost_s_per_byte=1.5e-10 / int(found["cores"]),
        update_params_per_s=memory / _UPDATE_BYTES,
        split_update_params_per_s=memory / _SPLIT_UPDATE_BYTES,
        codec_params_per_s=tuple(
            (codec, speed * memory / _UPDATE_BYTES)
            for codec, speed in _CODEC_SPEED.items()
        ),
        endurance_bytes=round(found["endurance_tb"] * 1e12),
        assumed=frozenset(each.name for each in fields(Machine)) - _TOLD,
    )


def _thin(rates: Rates) -> str:
    rows, rate = rates[0]
    return f"{format_count(rate)} with {rows} rows"
