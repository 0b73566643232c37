"""Bring a checkpoint's weights straight into the store: they are never whole in RAM.

transformers builds the model and turns the checkpoint's tensors into the model's own, with its renamings and conversions
and its report of what is missing; but the tensors that it is given are lazy ones (`megatrain_nb.runtime.lazy`).
Then the model moves into the session as any other does, and only there bytes are read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ArgumentError, MegatrainError, ModelError
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.folder import recover
from megatrain_nb.runtime.layers import parse_dtype
from megatrain_nb.runtime.offload import offload, offloaded_model
from megatrain_nb.runtime.shards import open_checkpoint

if TYPE_CHECKING:
    from megatrain_nb.runtime.lazy import LazyTensor
    from megatrain_nb.runtime.session import Session

_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_REFUSED = {
    "device_map": "the session decides where weights are",
    "quantization_config": "quantised weights cannot be trained at full precision",
    "gguf_file": "a GGUF file holds quantised weights",
    "state_dict": "the weights come from the folder",
    "tp_plan": "there is one device",
    "distributed_config": "there is one device",
}


def from_pretrained(
    auto_class: Any,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Make a model with a checkpoint's weights, straight in the open session.

    Parameters
    ----------
    auto_class
        ``AutoModelForCausalLM``, another auto class, a model class; or a model on the meta device, which gets the
        weights and moves in.
    path
        A folder that ``save_pretrained`` wrote, or a name on the Hugging Face Hub. safetensors or ``.bin``, in one
        file or in shards; float32, bfloat16, float16.
    dtype
        float32, the default; or bfloat16: computes in bf16, with the checkpoint's own numbers as fp32 master.
    **kwargs
        As for ``from_pretrained`` of transformers: ``config``, ``attn_implementation``, ``revision``, ``token``,
        ``subfolder``, ``variant``, ``trust_remote_code``, ``ignore_mismatched_sizes`` ...

    Returns
    -------
    torch.nn.Module
        What ``auto_class.from_pretrained(path)`` gives, in evaluation mode as there. Train it with ``mt.Trainer``
        or ``mt.wrap``.

    Raises
    ------
    SessionError
        No session is open.
    ArgumentError
        A dtype that is neither, no such folder, or an option that has no meaning here.
    StoreError
        A file is missing or damaged, or what files say of themselves takes more than the session's ``max_ram_gb``; or the
        offload directory is full. Nothing was allocated for it.
    ModelError
        The checkpoint's tensors do not fit the model: names them.
    BudgetError
        The budget does not hold what streams.

    Notes
    -----
    Weights that the checkpoint lacks are initialised as transformers does, and `Session.notes` names them, and
    those that the model has no place for. A weight that transformers computes from others (not stacked, joined,
    cut or transposed) is computed whole, beside nothing else.
    """
    session = require_session()
    wanted = parse_dtype(dtype) or torch.float32
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            msg = f"mt.from_pretrained takes no {name}: {why}; leave it out"
            raise ArgumentError(msg)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    variant, subfolder = kwargs.pop("variant", None), kwargs.pop("subfolder", "")
    folder = _locate(path, variant, hub) / subfolder
    session.models.check_in()
    checkpoint = open_checkpoint(
        folder, variant=variant, most_bytes=session.max_ram_bytes
    )
    if isinstance(auto_class, nn.Module):
        model = _give(auto_class, checkpoint, wanted, str(path), session)
    else:
        model = _make(auto_class, folder, checkpoint, wanted, str(path), session, kwargs)  # fmt: skip
    offload(model, session)
    return model


def _locate(path: str | os.PathLike[str], variant: str | None, hub: dict[str, Any]) -> Path:  # fmt: skip
    """Return the folder; a name on the hub is fetched into its cache, safetensors if there are any."""
    given: object = path
    if not isinstance(given, str | os.PathLike) or not str(given):
        msg = f"path={given!r} is neither a folder nor a name on the hub"
        raise ArgumentError(msg)
    folder = Path(path)
    if folder.is_dir():
        with suppress(OSError):  # a folder that may only be read
            recover(folder)
        return folder
    if folder.exists():
        msg = f"{folder} is a file; give the folder that it is in"
        raise ArgumentError(msg)
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    some = f"*.{variant}*" if variant else "*"
    for weights in (f"{some}.safetensors", f"{some}.bin"):
        try:
            found = snapshot_download(
                str(path), allow_patterns=["*.json", "*.py", weights], **hub
            )
        except (
            Exception
        ) as error:  # network, no such name, no such revision: the hub's own classes
            msg = f"{path!s} is no folder here, and could not be fetched as a name on the hub: {error}"
            raise ArgumentError(msg) from error
        if any(Path(found).rglob(weights)):
            break
    return Path(found)


def _make(
    auto_class: Any,
    folder: Path,
    checkpoint: dict[str, LazyTensor],
    dtype: torch.dtype,
    path: str,
    session: Session,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Let transformers build the model around lazy weights."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig  # noqa: PLC0415

    config = kwargs.pop("config", None)
    try:
        if not isinstance(config, PreTrainedConfig):
            config, kwargs = AutoConfig.from_pretrained(
                config or folder, return_unused_kwargs=True, **kwargs
            )
            kwargs.pop("trust_remote_code", None)
    except (OSError, ValueError) as error:
        msg = f"{path} has no usable config: {error}"
        raise ArgumentError(msg) from error
    if getattr(config, "quantization_config", None):
        msg = f"{path} holds quantised weights, which cannot be trained at full precision; take the model they were made from"
        raise ModelError(msg)
    made = _class_of(auto_class, config)
    model = _load(made, config, checkpoint, dtype, path, session, kwargs)
    model.config.name_or_path = model.name_or_path = path
    if (folder / "generation_config.json").is_file() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            msg = f"{path} has no usable generation_config.json: {error}"
            raise ArgumentError(msg) from error
    return model  # type: ignore[no-any-return]


def _load(
    made: Any,
    config: Any,
    checkpoint: dict[str, LazyTensor],
    dtype: torch.dtype,
    path: str,
    session: Session,
    kwargs: dict[str, Any],
) -> Any:
    try:
        model, info = made.from_pretrained(
            None, config=config, state_dict=dict(checkpoint), dtype=dtype, output_loading_info=True, **kwargs
        )  # fmt: skip
    except MegatrainError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        msg = f"{path} does not fit {made.__name__}: {error}"
        raise ModelError(msg) from error
    changed = [key for key, *_ in info["mismatched_keys"]]
    for what, keys in (
        ("are not in the checkpoint and were initialised anew", info["missing_keys"]),
        ("have another shape in the checkpoint and were initialised anew", changed),
        ("are in the checkpoint, and the model has no place for them", info["unexpected_keys"]),
    ):  # fmt: skip
        if keys:
            session.note(f"{path}: {_named(keys)} {what}")
    return model


def _named(keys: Any) -> str:
    names = sorted(keys)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _class_of(auto_class: Any, config: Any) -> Any:
    """Return the class of the model that an auto class makes of a config."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        return auto_class
    make = getattr(auto_class, "from_config", None)
    if make is None:
        msg = f"auto_class={auto_class!r} is neither an auto class, nor a model class, nor a model; give AutoModelForCausalLM"
        raise ArgumentError(msg)
    with torch.device("meta"):
        return type(make(config))


def _give(
    model: nn.Module,
    checkpoint: dict[str, LazyTensor],
    dtype: torch.dtype,
    path: str,
    session: Session,
) -> nn.Module:
    """Give a model on the meta device the weights of a checkpoint."""
    if offloaded_model(model) is not None:
        msg = f"{type(model).__name__} is in the session already; give the class, or a model on the meta device"
        raise ArgumentError(msg)
    values: dict[str, Tensor]
    if hasattr(model, "config") and hasattr(type(model), "from_pretrained"):
        made = _load(type(model), model.config, checkpoint, dtype, path, session, {})
        values = dict(made.named_parameters(remove_duplicate=False))
        values |= dict(made.named_buffers(remove_duplicate=False))
    else:
        values = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in checkpoint.items()
        }
    _assign(model, values, path, session)
    return model


def _assign(
    model: nn.Module, values: dict[str, Tensor], path: str, session: Session
) -> None:
    """Let a model's parameters and buffers be these tensors; tied ones stay tied."""
    params, buffers = _sites(model)
    missing = [
        names[0]
        for names in params.values()
        if not any(name in values for name in names)
    ]
    missing += [
        name for name, (module, last) in buffers.items()
        if name not in values and module._buffers[last].is_meta  # type: ignore[union-attr]
    ]  # fmt: skip
    if missing:
        msg = f"{path} has no {_named(missing)}, which {type(model).__name__} needs"
        raise ModelError(msg)
    given = {}
    for param, names in params.items():
        found = next(values[name] for name in names if name in values)
        if found.shape != param.shape:
            msg = f"{names[0]} has shape {tuple(param.shape)}, and {tuple(found.shape)} in {path}"
            raise ModelError(msg)
        given[param] = nn.Parameter(found.detach(), param.requires_grad)
    for param, names in params.items():
        for name in names:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._parameters[last] = given[param]
    for name, (module, last) in buffers.items():
        if name in values:
            module._buffers[last] = values[name].detach()
    unused = values.keys() - {name for names in params.values() for name in names} - buffers.keys()  # fmt: skip
    if unused:
        session.note(f"{path}: {_named(unused)} are in the checkpoint, and the model has no place for them")  # fmt: skip


def _sites(
    model: nn.Module,
) -> tuple[dict[nn.Parameter, list[str]], dict[str, tuple[nn.Module, str]]]:
    """Return every parameter's names, and where each buffer is."""
    params: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        params.setdefault(param, []).append(name)
    buffers = {}
    for name, _ in model.named_buffers(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        buffers[name] = model.get_submodule(owner), last
    return params, buffers
