"""The models of a run with fake tensors, which have a shape but no memory; and the count of live tensors' bytes.

They are made by the code that makes a run's models, from their configurations in place of their weights. Left out are
the weights of adapters that are not trained: those of a reward, and of a reference. Patches for what transformers and
torch do differently with fake tensors follow.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    masking_utils,
)

from alpaca_ppo import saved_models
from alpaca_ppo.adapters.files import adapter_base, is_adapter, read_adapter, read_policy_adapter
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import ActorCritic, CopiedReference, loading, saved_critic
from alpaca_ppo.models.factory import make_actor_critic
from alpaca_ppo.models.reference import make_reference
from alpaca_ppo.saved_models import remote_code


@dataclass(frozen=True)
class Models:
    """The models of a run, by folder or hub id; what `PPOConfig` names itself is not repeated."""

    policy: str
    lora: LoraConfig | None = None
    """Of the adapter to train on `policy`; None = that of the policy if it is an adapter, else all its weights."""
    value: str | None = None
    rewards: Sequence[str] = ()


def build(models: Models, args: PPOConfig, *, half: bool = False) -> tuple[ActorCritic, dict[str, nn.Module]]:
    """Builds the models of a run on the meta device (small parts on the CPU).

    Returns:
        Policy and critic; and all that hold weights: policy, critic, a copied reference, reward0, reward1 and so on.

    Args:
        models: their names.
        args: of the run.
        half: cast the trained models and the reference to bfloat16, as DeepSpeed does.

    Raises:
        ValueError: as `make_actor_critic` and `make_reference`.
    """
    policy, lora = models.policy, copy.deepcopy(models.lora)
    if lora is None and is_adapter(policy):
        lora = read_policy_adapter(policy)
        policy, lora.inference_mode = str(lora.base_model_name_or_path), False
    with (
        torch.device("meta"),
        mock.patch.object(loading, "load_complete", without_weights),
        mock.patch.object(saved_critic, "load_complete", without_weights),
        # A run for a GPU is estimated where there is none; `passes` counts its linear layers in 4 bits.
        mock.patch.object(loading, "_four_bit", dict),
    ):
        actor_critic = make_actor_critic(policy, models.value, list(models.rewards), lora, args)
        reference = make_reference(actor_critic, None, args)
        copied = reference.policy if isinstance(reference, CopiedReference) else None
        roles = {"policy": actor_critic.policy, "critic": actor_critic.critic, "reference": copied}
        modules: dict[str, nn.Module] = {name: module for name, module in roles.items() if module is not None}
        # Parameters, but not buffers, as `DeepSpeedEngine` does; reward models keep their precision.
        for parameter in (parameter for module in modules.values() for parameter in module.parameters() if half):
            parameter.data = parameter.data.to(torch.bfloat16)
        given: Any = {"trust_remote_code": args.trust_remote_code, "dtype": getattr(torch, args.dtype)}
        for i, name in enumerate(models.rewards):
            modules[f"reward{i}"] = without_weights(AutoModelForSequenceClassification, name, **given)
    return actor_critic.train(), modules


def without_weights(
    auto_class: Any, name: str, *, trust_remote_code: bool, dtype: torch.dtype = torch.float32, **_: Any
) -> PreTrainedModel:
    """What `models.loading.load_complete` returns, on the meta device; of an adapter its base.

    Raises:
        ValueError: when `name` has no configuration, one that `auto_class` cannot build, or code that it may not run.
    """
    if auto_class is AutoModelForCausalLM and is_adapter(name):
        name = adapter_base(name, read_adapter(name, name))
    problem, trust = f"no model can be loaded from {name!r}", trust_remote_code
    with remote_code(name, trust=trust), saved_models.loading(problem, name, loading.LOADING_REMEDY):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust)
    if auto_class is AutoModelForSequenceClassification:
        model.config.pad_token_id = 0
        # Not on the meta device: a critic's head is initialized from this weight.
        width, labels = model.score.in_features, model.score.out_features
        model.score = nn.Linear(width, labels, bias=False, dtype=dtype, device="cpu")
    return model  # type: ignore[no-any-return]


def size_of(tensors: Any) -> float:
    """Bytes of `tensors`, counting shared storage once."""
    return float(sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in list(tensors)}.values()))


def make_fake(roots: Collection[nn.Module], mode: FakeTensorMode) -> None:
    """Replaces all parameters and buffers by fake CPU tensors; shared ones stay shared."""

    def fake(tensor: Tensor) -> Tensor:
        other = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
        return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other

    known: Any = {tensor: fake(tensor) for root in roots for tensor in (*root.parameters(), *root.buffers())}
    for module in (module for root in roots for module in root.modules()):
        tables: Any = (module._parameters, module._buffers)
        for table in tables:
            table.update({name: known.get(tensor, tensor) for name, tensor in table.items()})


@contextmanager
def as_with_values() -> Iterator[None]:
    """Inside, three functions take fake tensors as they take others in a run.

    Where a value is read, it is 0: a loss is finite, and a batch has padding, so that it keeps its attention mask.
    transformers finds packed sequences by the values of the position ids. Without them it would take every row for
    packed and build a mask over all pairs of tokens
    (https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py). torch multiplies states
    (S, K) with the experts' weights (experts, K, N) in bfloat16 alone
    (https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py). Remove these patches when they do.
    """

    def grouped(states: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        # As many operations and bytes as if one expert had all tokens.
        return states @ weights[0]

    with (
        mock.patch.dict(fake_impls.op_implementations_dict, {torch.ops.aten._local_scalar_dense.default: lambda *_: 0}),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        # `create` because older versions of torch do not have it.
        mock.patch.object(functional, "grouped_mm", grouped, create=True),
    ):
        yield


class LiveBytes(TorchDispatchMode):
    """Inside, counts the storages of all tensors that operations return, each storage once.

    Not seen is what a kernel allocates and frees internally, nor what an allocator keeps in reserve. torch's own
    `torch.distributed._tools.mem_tracker.MemTracker` is private and cannot restart its peak between two passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of the tensors alive now."""
        self.peak = 0
        """Maximum of `live` since the start or the last `reset_peak`."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.track(result)
        return result

    def track(self, tensors: Any) -> None:
        """Counts the tensors in `tensors`, nested containers, that are not counted yet.

        Tensors on the meta device have no memory and are skipped.
        """
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key, size = id(storage), storage.nbytes()
                if key not in self._storages:
                    # torch keeps one Python object per storage for as long as the storage lives.
                    self._storages[key] = weakref.ref(storage, partial(self._on_freed, key, size))
                    self.live += size
                    self.peak = max(self.peak, self.live)

    def track_all(self) -> None:
        """Counts every tensor known to Python's garbage collector; call it before the work to be measured."""
        gc.collect()
        # Not isinstance, which would trigger the imports of lazily loaded library modules.
        self.track([thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)])

    def reset_peak(self) -> None:
        """Resets `peak` to the bytes alive now."""
        self.peak = self.live

    def _on_freed(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size
