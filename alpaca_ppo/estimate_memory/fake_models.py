"""The models of a run as fake tensors, which have a shape but no memory; and a count of the bytes of live tensors.

The code that makes a run's models makes these from their configurations. The weights of adapters that are not trained,
those of a reward or a reference, are left out.
"""

import copy
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo import saved_models
from alpaca_ppo.adapters.files import adapter_base, is_adapter, read_adapter, read_policy_adapter
from alpaca_ppo.config.names import is_server, model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import ActorCritic, CopiedReference, loading, saved_critic
from alpaca_ppo.models.factory import make_actor_critic
from alpaca_ppo.models.policy import use_eval_mode_but_checkpoint
from alpaca_ppo.models.reference import make_reference
from alpaca_ppo.ppo.teacher import load_teacher
from alpaca_ppo.saved_models import remote_code


@dataclass(frozen=True)
class Models:
    """The models of a run that `PPOConfig` does not name, by folder or hub id.

    Attributes:
        lora: the adapter to train on `policy`; None = `policy` itself, which may be an adapter.
    """

    policy: str
    lora: LoraConfig | None = None
    value: str | None = None
    rewards: Sequence[str] = ()


def build(models: Models, args: PPOConfig, *, cast_to_bf16: bool = False) -> tuple[ActorCritic, dict[str, nn.Module]]:
    """The models of a run on the meta device (small parts on the CPU), and by name all modules that hold weights:
    policy, critic, a copied reference, the teacher, reward0, reward1 and so on.

    For `cast_to_bf16` see `passes.measure`.
    """
    policy, lora = models.policy, copy.deepcopy(models.lora)
    if lora is None and is_adapter(policy):
        lora = read_policy_adapter(policy)
        lora.inference_mode = False
        policy = str(lora.base_model_name_or_path)
    with (
        torch.device("meta"),
        mock.patch.object(loading, "load_complete", without_weights),
        mock.patch.object(saved_critic, "load_complete", without_weights),
        # bitsandbytes needs a GPU, which an estimate does not; `passes` counts linear layers in 4 bits.
        mock.patch.object(loading, "four_bit", dict),
    ):
        actor_critic = make_actor_critic(policy, models.value, list(models.rewards), lora, args)
        reference = make_reference(actor_critic, None, args)
        copied = reference.policy if isinstance(reference, CopiedReference) else None
        roles = {"policy": actor_critic.policy, "critic": actor_critic.critic, "reference": copied}
        teacher = args.teacher_model_name_or_path
        if teacher is not None and not is_server(teacher):
            roles["teacher"] = load_teacher(model_folder("teacher_model_name_or_path", teacher), args)
        modules: dict[str, nn.Module] = {name: module for name, module in roles.items() if module is not None}
        if cast_to_bf16:
            # As in `DeepSpeedEngine`, buffers and reward models keep their type.
            for parameter in nn.ModuleDict(modules).parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        options: Any = {"trust_remote_code": args.trust_remote_code, "dtype": getattr(torch, args.dtype)}
        for i, name in enumerate(models.rewards):
            modules[f"reward{i}"] = without_weights(AutoModelForSequenceClassification, name, **options)
    use_eval_mode_but_checkpoint(actor_critic)
    return actor_critic, modules


def without_weights(
    auto_class: Any, name: str, *, trust_remote_code: bool, dtype: torch.dtype = torch.float32, **_: Any
) -> PreTrainedModel:
    """The model that `models.loading.load_complete` returns, on the meta device; of an adapter only its base."""
    if auto_class is AutoModelForCausalLM and is_adapter(name):
        name = adapter_base(name, read_adapter(name, name))
    problem = f"no model can be loaded from {name!r}"
    with remote_code(name, trust=trust_remote_code), saved_models.loading(problem, name, loading.LOADING_REMEDY):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if auto_class is AutoModelForSequenceClassification:
        model.config.pad_token_id = 0
        # On the CPU, because a critic's head may be initialized from this weight.
        head = model.score
        model.score = nn.Linear(head.in_features, head.out_features, bias=False, dtype=dtype, device="cpu")
    return cast(PreTrainedModel, model)


def size_of(tensors: Any) -> float:
    """Bytes of `tensors`, counting shared storage once."""
    return float(sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in list(tensors)}.values()))


def make_fake(roots: Collection[nn.Module], mode: FakeTensorMode) -> None:
    """Replaces all parameters and buffers by fake CPU tensors; shared ones stay shared."""

    def fake(tensor: Tensor) -> Tensor:
        result = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
        return nn.Parameter(result, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result

    fakes: Any = {tensor: fake(tensor) for root in roots for tensor in (*root.parameters(), *root.buffers())}
    for root in roots:
        for module in root.modules():
            for table in cast(Any, (module._parameters, module._buffers)):
                table.update({name: fakes.get(tensor, tensor) for name, tensor in table.items()})


@contextmanager
def fake_runs(model: str) -> Iterator[None]:
    """Patches three functions so that `model` runs on fake tensors. Remove a patch when its library does without.

    - Every value that is read is 0. Thus losses are finite, and a batch has padding, so that it keeps its mask.
    - transformers finds packed sequences by the values of position ids. Without values it would take every row for
      packed and build a mask over all pairs of tokens
      (https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py).
    - torch multiplies fake states (S, K) with the experts' weights (experts, K, N) in bfloat16 only
      (https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py). Here one expert gets all tokens,
      which is as many operations and bytes. Older versions of torch lack the function.

    Raises:
        ValueError: names `model` if it cannot run.
    """
    read_value = torch.ops.aten._local_scalar_dense.default
    try:
        with (
            # The run itself will show deprecation warnings of transformers.
            warnings.catch_warnings(action="ignore"),
            mock.patch.dict("torch._subclasses.fake_impls.op_implementations_dict", {read_value: lambda *_: 0}),
            mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None),
            mock.patch(
                "torch.nn.functional.grouped_mm", lambda states, weights, offs: states @ weights[0], create=True
            ),
        ):
            yield
    # What models raise that read values of tensors.
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError) as error:
        problem = f"model_name_or_path {model!r} cannot run without weights ({str(error)[:200]})"
        raise ValueError(f"{problem}; start a short run and read memory/peak_gib in its metrics.jsonl") from error


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations return inside the context, each storage once.

    torch's `torch.distributed._tools.mem_tracker.MemTracker` is private and cannot reset its peak between two passes.

    Attributes:
        live: bytes of the tensors alive now.
        peak: the maximum of `live` since the start or the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.track(result)
        return result

    def track(self, tensors: Any) -> None:
        """Counts tensors in nested containers; those on the meta device have no memory."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                # The id stays valid while the storage lives, because torch then keeps its Python object.
                key, size = id(storage), storage.nbytes()
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, partial(self._on_freed, key, size))
                    self.live += size
                    self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        """Resets `peak` to the bytes alive now."""
        self.peak = self.live

    def _on_freed(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size
