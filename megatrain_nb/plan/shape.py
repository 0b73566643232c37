"""A model's shape without torch: which blocks it has, which parameters each owns, how wide it is.

A shape comes from a file of the catalogue, or from a model that was made on the meta device
(`megatrain_nb.runtime.shape`). Equal blocks that follow each other are one `Part`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from megatrain_nb.codec.choice import Compression
from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain_nb.plan.model import PackSpec

Shaped = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Blocks that are equal and follow each other.

    Attributes
    ----------
    name
        Of a block; ``{}`` stands for its number.
    kind
        ``embedding``, ``layer``, ``head``, or ``other`` (a norm, a pooler).
    params
        Name and shape of each parameter that a block owns; a name that begins with ``.`` follows the block's.
    first, count
        Number of the first block, and how many there are.
    uses
        Names of the blocks whose parameters it uses, in order; empty for its own only.
    """

    name: str
    kind: str
    params: tuple[Shaped, ...]
    first: int = 0
    count: int = 1
    uses: tuple[str, ...] = ()

    def block_names(self) -> Iterator[str]:
        """Return the name of each block, in order."""
        for number in range(self.first, self.first + self.count):
            yield self.name.replace("{}", str(number), 1)

    @property
    def numel(self) -> int:
        """Elements that one block owns."""
        return sum(math.prod(shape) for _, shape in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The widths of a model, in elements.

    Attributes
    ----------
    hidden, intermediate
        Of what passes between layers, and inside a dense MLP.
    query, key
        Of all heads' queries; of all heads' keys (values are taken to be as wide).
    heads, layers, vocabulary
        Numbers of them.
    experts, experts_per_token, expert_intermediate, shared_experts
        Of a mixture's layers; 0 without.
    eager
        Attention keeps its matrix: heads x length for each token.
    dropout
        A layer drops some of what its last product gives.
    looped
        A mixture's layers take their experts one after the other; else all in one grouped product.
    """

    hidden: int
    intermediate: int
    query: int
    key: int
    heads: int
    layers: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    eager: bool = False
    dropout: bool = False
    looped: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model as the forecast sees it.

    Attributes
    ----------
    name
        As people call it.
    family
        transformers' ``model_type``; empty for another kind of model.
    dims
        Its widths.
    parts
        Its blocks, in the order in which they are registered.
    architecture, config
        transformers' class and the values that make it; empty if they are not known.
    resident_numel
        Parameters beside the blocks, which stay ordinary ones.
    """

    name: str
    family: str
    dims: Dims
    parts: tuple[Part, ...]
    architecture: str = ""
    config: str = ""
    resident_numel: int = 0

    def blocks(self) -> Iterator[tuple[str, Part]]:
        """Return the name and the part of each block, in order."""
        for part in self.parts:
            for name in part.block_names():
                yield name, part

    @property
    def num_params(self) -> int:
        """Parameters, each tied one counted once."""
        return sum(part.numel * part.count for part in self.parts) + self.resident_numel

    @property
    def active_params(self) -> int:
        """Parameters that a token meets: of the experts only those that it is sent to."""
        return sum(
            part.count
            * sum(
                round(math.prod(shape) * self.share(shape)) for _, shape in part.params
            )
            for part in self.parts
        )

    def share(self, shape: tuple[int, ...]) -> float:
        """Return the share of a parameter that a token meets."""
        dims = self.dims
        if len(shape) == 3 and shape[0] == dims.experts:
            return dims.experts_per_token / dims.experts
        return 1.0

    def spec(
        self, *, split: bool = False, compression: Compression | None = None
    ) -> ModelSpec:
        """Return blocks and packs, as `megatrain_nb.runtime.layers.cut` finds them on the model.

        Parameters
        ----------
        split
            The model computes in bf16; else in fp32.
        compression
            How Adam's moments are stored; None for fp32.
        """
        chosen = compression or Compression()
        return _spec(self.parts, self.dims.vocabulary, split, chosen)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        parts = []
        for part in self.parts:
            entry: dict[str, Any] = {"name": part.name, "kind": part.kind}
            if part.count > 1 or part.first:
                entry |= {"first": part.first, "count": part.count}
            if part.uses:
                entry["uses"] = list(part.uses)
            entry["params"] = {name: list(shape) for name, shape in part.params}
            parts.append(entry)
        return {
            "name": self.name,
            "family": self.family,
            "architecture": self.architecture,
            "config": json.loads(self.config or "{}"),
            "dims": {
                name: value
                for name, value in asdict(self.dims).items()
                if value or name in ("hidden", "layers", "vocabulary")
            },
            "resident_numel": self.resident_numel,
            "parts": parts,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Return the shape that `to_json` wrote."""
        zeros = dict.fromkeys(
            ("intermediate", "query", "key", "heads", "hidden", "layers", "vocabulary"),
            0,
        )
        return cls(
            name=found["name"],
            family=found["family"],
            architecture=found["architecture"],
            config=json.dumps(found["config"]),
            dims=Dims(**(zeros | found["dims"])),
            resident_numel=found["resident_numel"],
            parts=tuple(
                Part(
                    name=part["name"],
                    kind=part["kind"],
                    first=part.get("first", 0),
                    count=part.get("count", 1),
                    uses=tuple(part.get("uses", ())),
                    params=tuple(
                        (name, tuple(shape)) for name, shape in part["params"].items()
                    ),
                )
                for part in found["parts"]
            ),
        )


@lru_cache(maxsize=32)
def _spec(
    parts: tuple[Part, ...], vocabulary: int, split: bool, compression: Compression
) -> ModelSpec:
    packs: list[PackSpec] = []
    blocks: list[BlockSpec] = []
    owned: dict[str, int] = {}
    for part in parts:
        for name in part.block_names():
            if part.params:
                owned[name] = len(packs)
                params = [
                    (f"{name}{param}" if param.startswith(".") else param, shape)
                    for param, shape in part.params
                ]
                tables = part.kind == "embedding"
                head = part.kind == "head"
                codecs = {
                    param: compression.codec_of(
                        param, shape, table=tables or (head and shape[0] == vocabulary)
                    )
                    for param, shape in params
                }
                packs.append(
                    pack_params(len(packs), name, params, split=split, codecs=codecs)
                )
            used = tuple(owned[other] for other in part.uses or (name,))
            blocks.append(BlockSpec(index=len(blocks), name=name, packs=used))
    return ModelSpec(blocks=tuple(blocks), packs=tuple(packs))
