"""What libraries print is left out line by line, and nothing else is."""

import logging
import sys
import types
import warnings

import pytest
from transformers.utils import logging as transformers_logging

from alpaca_ppo.library_output import has_screen, ignore_known_lines, transformers_bars

RENAMED = (
    "`is_gradient_checkpointing` is deprecated and will be removed in v6. Use `is_activation_checkpointing` instead."
)


@pytest.mark.parametrize(
    ("message", "category", "module", "shown"),
    [
        (RENAMED, FutureWarning, "transformers.modeling_utils", False),
        ("`gradient_checkpointing_enable` is deprecated", FutureWarning, "transformers.modeling_utils", False),
        # The same words elsewhere, other words in the same module, another kind of warning.
        (RENAMED, FutureWarning, "my_rewards", True),
        (RENAMED, FutureWarning, "transformers.modeling_utils_mine", True),
        ("`torch_dtype` is deprecated", FutureWarning, "transformers.modeling_utils", True),
        (RENAMED, UserWarning, "transformers.modeling_utils", True),
        ("the judge is slow", UserWarning, "__main__", True),
    ],
)
def test_known_warnings_are_left_out_and_all_others_shown(message, category, module, shown):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_known_lines()
        warnings.warn_explicit(message, category, "file.py", 1, module=module)
    assert [str(warning.message) for warning in caught] == [message] * shown


def test_deepspeed_does_not_name_its_accelerator():
    ignore_known_lines()
    logger = logging.getLogger("DeepSpeed")
    kept = logger.makeRecord("DeepSpeed", logging.WARNING, "/deepspeed/runtime/engine.py", 1, "a loss of NaN", (), None)
    named = logger.makeRecord("DeepSpeed", logging.WARNING, "/x/real_accelerator.py", 213, "to CPU", (), None)
    assert logger.filter(kept)
    assert not logger.filter(named)


def test_bars_are_as_before_after_the_block():
    for before in (True, False):
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()
        for shown in (True, False):
            with transformers_bars(shown=shown):
                assert transformers_logging.is_progress_bar_enabled() is (before and shown)
            assert transformers_logging.is_progress_bar_enabled() is before
    transformers_logging.enable_progress_bar()


def test_a_file_is_no_screen_and_a_terminal_or_a_notebook_is_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for terminal, notebook, expected in ((False, False, False), (True, False, True), (False, True, True)):
        monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda terminal=terminal: terminal))
        if notebook:
            monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
        assert has_screen() is expected
