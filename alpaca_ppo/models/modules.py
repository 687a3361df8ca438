"""Changes of modules in place: train and eval mode, dropout, and activations that torch has an operator for."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers.activations import AccurateGELUActivation, GELUActivation, NewGELUActivation


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module of `model` into eval mode, and restores each module's own mode at the end."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0 in place, so that train mode computes the same numbers as eval mode.

    Besides `nn.Dropout` modules this covers float attributes such as `attention_dropout`, `resid_pdrop` and
    `layerdrop`, which attention layers read directly.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name):
                setattr(module, name, 0.0)


def use_torch_activations(model: nn.Module) -> None:
    """Replaces activations that transformers writes operator by operator by the one operator that torch has for each.

    They are equal in exact arithmetic, and differ by rounding: 2e-7 in float32, 1e-15 in float64. torch's are about
    three times as fast, and their backward pass needs the input alone instead of half a dozen tensors of its size. Left
    as they are: `gelu_fast` and BLOOM's own, whose constants are rounded to 10 and 8 digits, and `quick_gelu`, which
    torch does not have. Weights and configuration stay as they are, so a model that is saved is the same.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            # Not isinstance: a subclass may compute something else.
            if type(child) in (NewGELUActivation, AccurateGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
            elif type(child) is GELUActivation and child.act is not nn.functional.gelu:
                setattr(module, name, nn.GELU())
