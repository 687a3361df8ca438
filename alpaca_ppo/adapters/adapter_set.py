"""Several LoRA adapters on one frozen base: the policy's, the critic's, a reward model's, and the base without any.

PEFT injects adapters into the base's layers, so the base's forward pass uses whichever adapter is active. This module
switches between them without changing `requires_grad`, which PEFT's switches do.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.adapters import checks
from alpaca_ppo.adapters.files import check_adapter_shapes, is_head, lora_config, weight_shapes, weights_file
from alpaca_ppo.saved_models import loading

# Names of the adapters. The policy's is PEFT's default, which is saved without a sub-folder.
POLICY, VALUE, REWARD, REFERENCE = "default", "value", "reward", "reference"


class AdapterSet:
    """The adapters of one base model, `peft`. One is active at a time: the policy's, except inside `active`."""

    def __init__(self, peft: PeftModel) -> None:
        self.peft = peft

    @property
    def model(self) -> PreTrainedModel:
        """The language model, with the adapters in its layers."""
        return cast(PreTrainedModel, self.peft.get_base_model())

    @property
    def starting_point(self) -> str | None:
        """The adapter that training started from; None = the base without an adapter."""
        return REFERENCE if REFERENCE in self.peft.peft_config else None

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Activates the adapter `name` inside the block; None = the base without an adapter."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.peft.parameters()]
        before = self.peft.active_adapter
        try:
            if name is not None:
                self.peft.set_adapter(name)
            with self.peft.disable_adapter() if name is None else nullcontext():
                checks.restore_requires_grad(flags)
                yield
        finally:
            self.peft.set_adapter(before)
            checks.restore_requires_grad(flags)

    def add(self, name: str, config: LoraConfig, *, trainable: bool) -> None:
        """Adds an adapter `name`, which PEFT initializes to a product of zero; it replaces one of this name that an
        earlier run added. PEFT may modify `config`.

        Raises:
            ValueError: when the model has an adapter of this name that was not added by a run.
        """
        checks.delete_owned_adapters((name,), self.peft)
        flags = [(parameter, parameter.requires_grad) for parameter in self.peft.parameters()]
        self.peft.add_adapter(name, config)
        checks.mark_as_owned(name, self.peft)
        self.peft.set_adapter(POLICY)
        checks.restore_requires_grad(flags)
        _start_magnitudes(self.peft, name)
        for parameter in self.parameters_of(name):
            parameter.requires_grad_(trainable)

    def load(self, name: str, field: str, folder: str, config: LoraConfig, *, trainable: bool) -> dict[str, Tensor]:
        """Adds an adapter with the weights in `folder` (or hub id), as `add` does; returns the weights of a
        classifier's head that are there too. `field` names the source in errors.

        Raises:
            ValueError: when it does not fit the base or has no safetensors file; as `add` and `lora_config`.
        """
        check_adapter_shapes(field, folder, self.model)
        warn_of_other_base(folder, config, self.model)
        self.add(name, config, trainable=trainable)
        tensors = load_file(weights_file(field, folder))
        try:
            # Checked again, because PEFT may have resolved older layer names to parameters of experts of this base.
            lora_config(config, f"{field} {folder}")
            weights = {key: value for key, value in tensors.items() if not is_head(key)}
            if different := sorted(set(get_peft_model_state_dict(self.peft, adapter_name=name)) ^ set(weights)):
                names = ", ".join(different[:3])
                raise ValueError(f"the adapter in {folder} does not fit its base: {names} missing or unexpected")
            set_peft_model_state_dict(self.peft, weights, adapter_name=name)
        except ValueError:
            self.peft.delete_adapter(name)
            raise
        return {key: value for key, value in tensors.items() if is_head(key)}

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        return [parameter for key, parameter in self.peft.named_parameters() if checks.belongs_to(name, key)]

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """The weights of the adapter `name` under the names of an adapter folder, contiguous and on the CPU."""
        weights = get_peft_model_state_dict(self.peft, adapter_name=name)
        return {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}

    def config_of(self, name: str) -> LoraConfig:
        """A copy of the configuration of the adapter `name`, to make another adapter from."""
        return copy.deepcopy(lora_config(self.peft.peft_config[name]))

    def copy(self, source: str, name: str, *, trainable: bool = False) -> None:
        """Adds an adapter `name` with the current weights of the adapter `source`."""
        self.add(name, self.config_of(source), trainable=trainable)
        weights = get_peft_model_state_dict(self.peft, adapter_name=source)
        set_peft_model_state_dict(self.peft, weights, adapter_name=name)


def describe(config: LoraConfig) -> str:
    """The settings of an adapter that affect its output, as text."""
    names = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    lists = {name: sorted(map(str, getattr(config, name) or ())) for name in ("target_modules", "modules_to_save")}
    return str({name: getattr(config, name) for name in names} | lists)


def warn_of_other_base(folder: str, config: LoraConfig, model: PreTrainedModel) -> None:
    """Warns if the adapter in `folder`, of `config`, names another base than `model`."""
    trained_on, here = config.base_model_name_or_path, model.config.name_or_path
    if trained_on and here and trained_on != here:
        difference = f"the adapter in {folder} was trained on {trained_on}, but the base here is {here}"
        warnings.warn(f"{difference}; make sure that both are the same weights", stacklevel=3)


def add_policy_adapter(model: PreTrainedModel, config: Any) -> AdapterSet:
    """Freezes `model`, in place, and adds a new policy adapter of `config`, a `peft.LoraConfig`.

    Raises:
        ValueError: for an adapter that changes the base even when it is switched off, for one of the output head, of
            layers that do not exist or of half-precision `modules_to_save`, and for a model that already has adapters.
    """
    config = lora_config(config)
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        # PEFT would silently initialize them again; it keeps its table of them on the base model as well.
        problem = f"already has adapters {sorted(vars(model).get('peft_config', ()))} in its layers"
        remedy = "pass their PeftModel without peft_config, or remove them (base = peft.unload())"
        raise ValueError(f"{type(model).__name__} {problem}; {remedy}")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    adapters = AdapterSet(checks.inject_adapter(PeftModel, model, config))
    try:
        checks.check_head(adapters.model, config)
        checks.raise_precision(adapters.peft)
    except ValueError:
        checks.remove_adapter(adapters.peft, flags)
        raise
    _start_magnitudes(adapters.peft, POLICY)
    return adapters


def load_adapters(model: PreTrainedModel, folder: str) -> AdapterSet:
    """Loads the adapter in `folder` (or hub id) onto `model` as the policy's, to train it further. A frozen copy of it
    becomes the reference.

    Raises:
        ValueError: when the adapter does not fit the model; as `load_peft_model` and `from_peft_model`.
    """
    check_adapter_shapes("model_name_or_path", folder, model)
    peft = load_peft_model("model_name_or_path", model, folder, is_trainable=True)
    return from_peft_model(peft, field=f"model_name_or_path {folder}")


def load_peft_model(field: str, model: PreTrainedModel, folder: str, *, is_trainable: bool = False) -> PeftModel:
    """`model` with the adapter in `folder` (or hub id), under PEFT's default name; `field` is its option.

    Raises:
        ValueError: when the adapter is damaged, is not in safetensors, does not fit the model, lacks weights, or is one
            that this package cannot handle.
    """
    # First, because PEFT would also read weights that are not in safetensors.
    saved, name = weight_shapes(field, folder), f"{field} {folder}"
    with loading(f"{name}: no adapter can be loaded from {folder!r}", folder, "save or download the adapter again"):
        peft = PeftModel.from_pretrained(model, folder, adapter_name=POLICY, is_trainable=is_trainable)
    # Loading translates the names of an older PEFT, and only then the layers of experts show as parameters.
    lora_config(peft.peft_config[POLICY], name)
    # PEFT only warns of missing weights, and initializes them at random.
    if missing := sorted(set(get_peft_model_state_dict(peft, adapter_name=POLICY)) - set(saved)):
        raise ValueError(f"{name} lacks weights of its adapter_config.json: {', '.join(missing[:3])}; save it again")
    return peft


def from_peft_model(peft: PeftModel, field: str = "peft_config") -> AdapterSet:
    """The adapters of a PEFT model, changed in place: `default` becomes the policy's, and a frozen copy of it the
    reference. `field` names the model's source in errors.

    Raises:
        ValueError: for adapters that this package cannot handle or whose names it reserves; when the adapter `default`
            is missing, inactive or frozen.
    """
    if POLICY not in peft.peft_config:
        raise ValueError(f"the model's adapters are {sorted(peft.peft_config)}; the policy's must be named {POLICY!r}")
    config = lora_config(peft.peft_config[POLICY], field)
    adapters = AdapterSet(peft)
    checks.check_head(adapters.model, config)
    checks.check_active_adapter(POLICY, peft)
    checks.raise_precision(peft)
    # An earlier trainer may have added these to the same model.
    checks.delete_owned_adapters((VALUE, REWARD, REFERENCE), peft)
    # Training starts from this adapter: the base with adapters switched off would not do as the reference.
    adapters.copy(POLICY, REFERENCE)
    return adapters


def _start_magnitudes(peft: PeftModel, name: str) -> None:
    """Initializes DoRA's magnitudes again, in float32.

    PEFT rounds them to the base's half precision, and the adapted model would then not start equal to the base.
    """
    for layer in peft.modules():
        if isinstance(layer, LoraLayer) and name in layer.lora_magnitude_vector and name in layer.lora_A:
            magnitudes: Any = layer.lora_magnitude_vector[name]
            trainable = magnitudes.weight.requires_grad
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            magnitudes.update_layer(base_layer=layer.get_base_layer(), lora_A=a, lora_B=b, scaling=layer.scaling[name])
            magnitudes.weight.requires_grad_(trainable)
