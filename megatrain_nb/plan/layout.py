"""What a picture of a model's bytes needs to know: its blocks, their pieces, and what the plan keeps in RAM."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from megatrain_nb.plan.model import ModelSpec

# What is drawn as one: the pieces of a pack by kind.
GROUPS = ("weights", "grads", "states")


def group_of(piece: str) -> int:
    """Return the index in `GROUPS` of a piece as the store's keys name it.

    Examples
    --------
    >>> group_of("weights"), group_of("grads"), group_of("exp_avg"), group_of("low")
    (0, 1, 2, 2)
    """
    return GROUPS.index(piece) if piece in GROUPS else 2


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """One piece: its key in the store, its bytes, whether it stays in RAM by plan, and whether it is there now.

    ``on_device``: it lives on a device, and what RAM and disk have of it may be old.
    """

    key: str
    num_bytes: int
    resident: bool
    in_ram: bool
    on_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One model's blocks, packs and pieces.

    Attributes
    ----------
    model
        The first part of its keys in the store.
    name
        Its class.
    blocks
        Names, first to last.
    pack_names, block_of_pack
        By pack index: its name, and the block that it is drawn with, the first one that uses it.
    pieces
        All of them.
    in_place
        Blocks compute in RAM: there is no other memory on a device.
    planned_bytes
        What a step reads from disk and writes to it, by the plan.
    planned_seconds
        How long it should take on this machine, by cause; empty where the machine was not measured.
    planned_peaks
        The most that the session should take, in bytes by tier (``ram``, ``device``, ``disk``), Python and torch not
        counted; empty before the model was called to train.
    """

    model: str
    name: str
    blocks: tuple[str, ...]
    pack_names: tuple[str, ...]
    block_of_pack: tuple[int, ...]
    pieces: tuple[PieceLayout, ...]
    in_place: bool = True
    planned_bytes: tuple[int, int] = (0, 0)
    planned_seconds: dict[str, float] = field(default_factory=dict, hash=False)
    planned_peaks: dict[str, int] = field(default_factory=dict, hash=False)
    _tables: dict[bool, list[list[int]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def cell_of(self, key: str) -> tuple[int, int]:
        """Return group and block of a piece or tile, by its key."""
        _, piece, pack = key.split("/")[:3]
        return group_of(piece), self.block_of_pack[int(pack)]

    def what_there_is(self) -> tuple[object, ...]:
        """Return what is the same until another model comes, or moments are stored by another codec."""
        pieces = tuple((piece.key, piece.num_bytes) for piece in self.pieces)
        return self.model, self.blocks, pieces

    def num_bytes(self, *, resident: bool = False) -> list[list[int]]:
        """Return bytes by group and block: of all pieces, or of those that stay in RAM by plan."""
        if resident in self._tables:  # drawn four times a second
            return self._tables[resident]
        table = [[0] * len(self.blocks) for _ in GROUPS]
        for piece in self.pieces:
            if piece.resident or not resident:
                group, block = self.cell_of(piece.key)
                table[group][block] += piece.num_bytes
        self._tables[resident] = table
        return table

    def to_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes."""
        fields = asdict(self)
        del fields["_tables"]
        fields["pieces"] = [list(each.values()) for each in fields["pieces"]]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Layout:
        """Return the layout that ``to_json`` wrote."""
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in fields.items()
        }
        given["pieces"] = tuple(PieceLayout(*each) for each in fields["pieces"])
        return cls(**given)


def make_layout(
    spec: ModelSpec,
    pieces: Iterable[PieceLayout],
    *,
    model: str,
    name: str,
    in_place: bool,
    planned_bytes: tuple[int, int],
    planned_seconds: Mapping[str, float] | None = None,
    planned_peaks: Mapping[str, int] | None = None,
) -> Layout:
    """Return the layout of a model.

    Examples
    --------
    >>> from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params
    >>> spec = ModelSpec(
    ...     blocks=(BlockSpec(index=0, name="head", packs=(0,)),),
    ...     packs=(pack_params(0, "head", [("weight", (1024,))]),),
    ... )
    >>> pieces = [PieceLayout("0/weights/0", 4096, True, False)]
    >>> layout = make_layout(
    ...     spec, pieces, model="0", name="Toy", in_place=True, planned_bytes=(0, 0)
    ... )
    >>> layout.num_bytes(), Layout.from_json(layout.to_json()) == layout
    ([[4096], [0], [0]], True)
    """
    owners = spec.owners()
    return Layout(
        model=model,
        name=name,
        blocks=tuple(block.name for block in spec.blocks),
        pack_names=tuple(pack.name for pack in spec.packs),
        block_of_pack=tuple(owners.get(pack.index, 0) for pack in spec.packs),
        pieces=tuple(pieces),
        in_place=in_place,
        planned_bytes=planned_bytes,
        planned_seconds=dict(planned_seconds or {}),
        planned_peaks=dict(planned_peaks or {}),
    )
