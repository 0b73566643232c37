"""What a session holds and what its last step did, as numbers, text and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from megatrain_nb.codec.names import title
from megatrain_nb.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from megatrain_nb.plan.logits import Chunking
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.runtime.callbacks import StepResult
    from megatrain_nb.runtime.offload import OffloadedModel


_FP32_BYTES = 8  # of both moments of one parameter


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Bytes in one tier: now, the most so far, and the budget (None for no limit).

    In RAM these are what the kernel counts above the session's start: the session's pool, buffers that wait for reuse
    included, and all else that the process took, as the model's own tensors do. The peak is the most of both together since
    the first model moved in. On disk it is the file's size, which grows in steps.

    Attributes
    ----------
    used_bytes, peak_bytes, limit_bytes
        Now, the most, and the budget.
    own_bytes
        Those of ``used_bytes`` in RAM that the pool does not hold. None in other tiers, and where the kernel does not
        say (not Linux): then RAM is that of the pool alone.
    """

    used_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    own_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model: its size, its steps, and what of it stays in RAM.

    ``num_split`` of its parameters compute in bf16; their fp32 numbers are stored as two halves. ``moments_bytes``
    are those of Adam's moments as they are stored, all included; ``codecs`` counts parameters by codec. ``tail`` names
    the packs that live on the device, ``tail_bytes`` are all of theirs there.
    """

    name: str
    num_params: int
    num_blocks: int
    num_steps: int
    state_bytes: int
    resident_bytes: int
    working_bytes: int
    activation_bytes: int
    keep_bytes: int
    num_split: int
    logits: Chunking | None
    moments_bytes: int
    codecs: dict[str, int]
    dynamic: bool
    tail: tuple[str, ...] = ()
    tail_bytes: int = 0

    @property
    def moments_bytes_per_param(self) -> float:
        """Bytes of both moments of one parameter, padding included; 8 in fp32."""
        return self.moments_bytes / max(self.num_params, 1)

    @property
    def moments_ratio(self) -> float:
        """How many times smaller than in fp32 the moments are."""
        return _FP32_BYTES / max(self.moments_bytes_per_param, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Displays as text and as HTML.

    Attributes
    ----------
    tiers
        ``device`` (where there is one), ``ram``, ``disk``.
    last_step
        The last optimizer step, or None.
    process_bytes
        Resident memory of the whole process, as the kernel counts it.
    packed_sizes
        Bytes of what is packed on disk: unpacked, and as they are there.
    pinned_bytes
        RAM of the session's that is page-locked for copies to a device.
    """

    tiers: dict[str, TierStatus]
    last_step: StepResult | None
    models: tuple[ModelStatus, ...]
    notes: tuple[str, ...]
    directory: str
    process_bytes: int
    packed_sizes: tuple[int, int] = (0, 0)
    pinned_bytes: int = 0

    def rows(self) -> list[tuple[str, str]]:
        """Return label and text of every line."""
        rows = [
            (name.upper() if name == "ram" else name, _describe_tier(name, tier))
            for name, tier in self.tiers.items()
        ]
        rows.append(
            (
                "process",
                f"{format_bytes(self.process_bytes)} resident, everything included"
                + (
                    f"; {format_bytes(self.pinned_bytes)} page-locked for copies to the device"
                    if self.pinned_bytes
                    else ""
                ),
            )
        )
        unpacked, packed = self.packed_sizes
        if packed:
            rows.append(
                (
                    "packed",
                    f"{format_bytes(unpacked)} take {format_bytes(packed)} on disk, bit for bit ({unpacked / packed:.2f}x)",
                )
            )
        for model in self.models:
            rows += [
                (
                    model.name,
                    f"{format_count(model.num_params)} parameters in {model.num_blocks} blocks, {model.num_steps} steps"
                    + _describe_dtype(model),
                ),
                (
                    "its state",
                    f"{format_bytes(model.state_bytes)} of weights, gradients and moments; "
                    f"{format_bytes(model.resident_bytes)} stay in RAM, {format_bytes(model.working_bytes)} of buffers for what streams, "
                    f"{format_bytes(model.activation_bytes)} set aside for activations, "
                    f"{format_bytes(model.keep_bytes)} for those that are kept instead of computed again",
                ),
            ]
            if model.tail:
                rows.append(
                    (
                        "on the device",
                        f"{format_bytes(model.tail_bytes)} of {len(model.tail)} packs, {', '.join(model.tail)}, live there: "
                        "AdamW runs there, and nothing of them moves",
                    )
                )
            if model.codecs.keys() - {"raw"}:
                rows.append(("its moments", _describe_moments(model)))
            if model.logits is not None:
                rows.append(
                    (
                        "logits",
                        f"in chunks of {model.logits.tokens} tokens: "
                        f"{format_bytes(model.logits.whole_bytes)} would not fit",
                    )
                )
        if self.last_step is not None:
            step = self.last_step
            causes = ", ".join(
                f"{cause} {format_seconds(seconds)}"
                for cause, seconds in step.seconds.items()
            )
            rows += [
                (
                    f"step {step.step}",
                    f"loss {step.loss:.4f}, gradient norm {step.grad_norm:.3g}, {step.tokens} tokens",
                ),
                ("its time", f"{format_seconds(step.total_seconds)}: {causes}"),
                (
                    "its bound",
                    ", ".join(
                        f"{resource} needs {format_seconds(seconds)}"
                        for resource, seconds in step.least_seconds.items()
                    )
                    + f"; the step reached {step.share_of_bound:.0%} of what {step.bound} allows",
                ),
                (
                    "its traffic",
                    f"{format_bytes(step.read_bytes)} read, {format_bytes(step.written_bytes)} written",
                ),
            ]
            if step.onloaded_bytes:
                rows.append(
                    (
                        "its copies",
                        f"{format_bytes(step.onloaded_bytes)} to the device, {format_bytes(step.offloaded_bytes)} back, "
                        f"{format_seconds(step.link_seconds)} beside computing",
                    )
                )
        rows.append(("directory", self.directory))
        rows += [("note", note) for note in self.notes]
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th style="text-align:left;padding:2px 12px 2px 0;white-space:nowrap">{escape(label)}</th>'
            f'<td style="text-align:left;padding:2px 0">{escape(text)}</td></tr>'
            for label, text in self.rows()
        )
        return f"<table>{cells}</table>"


def describe_model(model: OffloadedModel) -> ModelStatus:
    """Return the numbers of one model."""
    spec, residency = model.layers.spec, model.memory.residency
    tail = [spec.packs[pack] for pack in model.executor.tail]
    return ModelStatus(
        name=model.name,
        num_params=spec.num_params,
        num_blocks=len(spec.blocks),
        num_steps=model.steps.done,
        state_bytes=spec.state_bytes,
        resident_bytes=residency.resident_bytes,
        working_bytes=residency.working_bytes,
        activation_bytes=residency.activation_bytes,
        keep_bytes=residency.keep_bytes,
        logits=model.logits.chunking,
        moments_bytes=spec.moments_bytes,
        codecs=_count_codecs(spec),
        dynamic="dynamic" in model.adam.asked.values(),
        tail=tuple(pack.name for pack in tail),
        tail_bytes=sum(p.weight_bytes + p.grad_bytes + p.states_bytes for p in tail),
        num_split=sum(
            param.numel for pack in spec.packs if pack.split for param in pack.params
        ),
    )


def _describe_tier(name: str, tier: TierStatus) -> str:
    limit = (
        f"budget {format_bytes(tier.limit_bytes)}" if tier.limit_bytes else "no limit"
    )
    text = f"{format_bytes(tier.used_bytes)} now, {format_bytes(tier.peak_bytes)} at most, {limit}"
    if name != "ram":
        return text
    if tier.own_bytes is None:
        return f"{text}; the session's pool alone, since this system does not say what the process takes"
    pool = tier.used_bytes - tier.own_bytes
    return (
        f"{text}; {format_bytes(pool)} are the session's pool, {format_bytes(tier.own_bytes)} the model's own tensors and "
        "all else that the process took since the session opened"
    )


def _count_codecs(spec: ModelSpec) -> dict[str, int]:
    """Return the parameters that each codec stores, most first."""
    found: dict[str, int] = {}
    for pack in spec.packs:
        for param in pack.params:
            found[param.codec] = found.get(param.codec, 0) + param.numel
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _describe_moments(model: ModelStatus) -> str:
    counts = ", ".join(
        f"{'fp32' if codec == 'raw' else title(codec)} {format_count(numel)}"
        for codec, numel in model.codecs.items()
    )
    chosen = "chosen by error (experimental), " if model.dynamic else ""
    return (
        f"{chosen}parameters by codec: {counts}; {model.moments_bytes_per_param:.2f} bytes per parameter, "
        f"{model.moments_ratio:.1f} times smaller than fp32 (embeddings and head 8bit at least, "
        "vectors and small ones fp32)"
    )


def _describe_dtype(model: ModelStatus) -> str:
    if not model.num_split:
        return ""
    some = model.num_split < model.num_params
    count = f"{format_count(model.num_split)} of them " if some else ""
    return f"; {count}compute in bf16 with an fp32 master"
