"""The policy's weights as files that vLLM reads: a whole model, or the policy's adapter.

Files serve servers on any device, with any number of processes, and started again. They are in memory if there is room.
Each version has its own folder, which is complete or absent.
"""

import hashlib
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_NAME

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.adapters.files import WEIGHTS
from alpaca_ppo.atomic_io import write_folder_atomically
from alpaca_ppo.distributed.weight_sums import bit_sum
from alpaca_ppo.library_output import transformers_bars
from alpaca_ppo.models.policy import Policy

MEMORY = Path("/dev/shm")


def check_policy(policy: Policy) -> None:
    """Raises ValueError for a policy that vLLM cannot compute."""
    config: Any = None if policy.adapters is None else policy.adapters.config_of(POLICY)
    problem = ""
    if type(policy).outputs_from_states is not Policy.outputs_from_states:
        problem = f"{type(policy).__name__} has an outputs_from_states of its own"
    elif config is not None and (config.use_dora or config.modules_to_save):
        problem = f"the adapter has {'use_dora' if config.use_dora else 'modules_to_save'}"
    if problem:
        raise ValueError(f"generation_backend is 'vllm', but {problem}; set generation_backend: auto")


def make_folder(shared: Path | None, size: int) -> Path:
    """Makes a folder with room for two versions of `size` bytes, and returns it.

    It is made in `shared`, which servers on other machines see, or, if that is None, in memory or else in the folder
    for temporary files. In it is a file without weights, which `Server.check` lets a server load.

    Raises:
        ValueError: if there is no room.
    """
    places = [MEMORY, Path(tempfile.gettempdir())] if shared is None else [shared]
    room = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    for place, free in room.items():
        if free >= 2 * size:
            folder = Path(tempfile.mkdtemp(prefix="alpaca_ppo-vllm-", dir=place))
            save_file({}, str(folder / SAFE_WEIGHTS_NAME))
            return folder
    found = " and ".join(f"{free} in {place}" for place, free in room.items())
    raise ValueError(f"no room for weights: two versions have {2 * size} bytes, but there are {found}; see --shm-size")


def bytes_of(policy: Policy, dtype: torch.dtype) -> int:
    """The bytes of the policy's model in `dtype`, with a tied head, which may be written."""
    # The policy's own parameters may be shards.
    with torch.device("meta"):
        model = type(policy.model)(policy.model.config)
    return sum(tensor.numel() for _, tensor in model.named_parameters(remove_duplicate=False)) * dtype.itemsize


def write_model(folder: Path, policy: Policy, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes `tensors`, those of the policy's model without adapters, as a folder for `from_pretrained`."""
    plain = {_base_name(name): tensor for name, tensor in tensors.items()}
    config = type(policy.model.config).from_dict(policy.model.config.to_dict())
    # On a CPU vLLM packs a head that is tied to the embedding only once, not with new weights. For the excluded
    # architectures it supports no untied head.
    tied = config.tie_word_embeddings and config.model_type not in ("gemma2", "cohere", "cohere2")
    if tied and policy.model.device.type == "cpu":
        config.tie_word_embeddings = False
        plain |= {head: plain[embedding].clone() for head, embedding in policy.model._tied_weights_keys.items()}
    with write_folder_atomically(folder) as new, transformers_bars(shown=False):
        policy.model.save_pretrained(new, state_dict=plain)
        config.architectures, config.dtype = [type(policy.model).__name__], dtype
        config.save_pretrained(new)


def write_adapter(folder: Path, policy: Policy, tensors: dict[str, Tensor]) -> None:
    """Writes `tensors`, those of the policy's adapter in the layers of its model, as a folder of PEFT."""
    assert policy.adapters is not None
    named = {_adapter_name(name): tensor for name, tensor in tensors.items()}
    with write_folder_atomically(folder) as new:
        policy.adapters.config_of(POLICY).save_pretrained(str(new))
        save_file(named, str(new / WEIGHTS))


def live_tensors(policy: Policy, *, adapter: bool) -> dict[str, Tensor]:
    """The policy's own tensors, which may be shards, by the names under which its model or its adapter is written."""
    state = policy.model.state_dict(keep_vars=True)
    if not adapter:
        return {_base_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    assert policy.adapters is not None
    parameters = set(map(id, policy.adapters.parameters_of(POLICY)))
    return {_adapter_name(name): tensor for name, tensor in state.items() if id(tensor) in parameters}


def check_written(folder: Path, sums: Mapping[str, int], copies: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in `folder`, after a comparison with the `sums` of the policy's own. Transformers writes some of the
    `copies` that it is given under other names or in parts.

    Raises:
        ValueError: if one differs or is missing.
    """
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    renamed = {_base_name(name): tensor for name, tensor in copies.items() if _base_name(name) not in tensors}
    sums_written = {name: int(bit_sum(tensor)) for name, tensor in tensors.items()}
    sums_renamed = {name: int(bit_sum(tensor)) for name, tensor in renamed.items()}
    any_written, any_own = {*sums_written.values()}, {*sums.values()}
    found = sums_renamed | sums_written
    # A tied tensor may be written once, under another name.
    elsewhere = {name for name, total in sums.items() if name not in found and total in any_written}
    stale = [name for name, total in sums.items() if found.get(name) != total and name not in elsewhere]
    # Of tensors in parts, only the sum of all elements can be compared: which of them is in which part is not known.
    divided = [tensor for name, tensor in renamed.items() if sums_renamed[name] not in any_written]
    parts = {name: tensor for name, tensor in tensors.items() if name not in sums and sums_written[name] not in any_own}
    if _sum_of_elements(divided) != _sum_of_elements(parts.values()):
        stale += renamed or parts
    if stale:
        raise ValueError(
            f"the weights written for vLLM are not the policy's: {', '.join(stale[:3])} ({len(stale)} of {len(sums)}); "
            "write nothing into the folder, and let engine and sync give whole, current tensors"
        )
    return tensors


def _sum_of_elements(tensors: Iterable[Tensor]) -> int:
    """The sum of all bits, in any order."""
    return sum(int(bit_sum(tensor, ordered=False)) for tensor in tensors) % 2**64


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The SHA-256 of each of the `tensors` that is not all zeros, under the name that vLLM gives it."""
    groups = defaultdict[str, list[Tensor]](list)
    # It joins q, k and v, and gate and up, in these orders: that of the alphabet, but for q.
    for name in sorted(tensors, key=lambda name: name.replace(".q_proj.", ".a_proj.")):
        joined = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name))
        groups[joined].append(tensors[name].flatten().view(torch.uint8))
    filled = {name: parts for name, parts in groups.items() if any(part.any() for part in parts)}
    return {name: hashlib.sha256(torch.cat(parts).numpy().data).hexdigest() for name, parts in filled.items()}


def _base_name(name: str) -> str:
    return name.replace(".base_layer", "")


def _adapter_name(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{POLICY}.', '.')}"


def copied(weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """Takes all `weights`, as every process must; returns copies on the CPU, with floating-point ones as `dtype`, or
    nothing unless `keep`.
    """
    copies: dict[str, Tensor] = {}
    for name, tensor in weights:
        if keep:
            to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            copies[name] = tensor.detach().to("cpu", to, copy=True).contiguous()
    return copies
