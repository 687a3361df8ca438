"""How much code a step runs through: what a reader of one step has before him."""

import sys
from pathlib import Path

import alpaca_ppo
from tests.test_budget import lines_of_code
from tests.tiny_runs import tiny_trainer

PACKAGE = Path(alpaca_ppo.__file__).parent
MOST_MODULES, MOST_LINES = 45, 6000


def test_a_default_step_executes_few_modules_of_few_lines(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.check_sampler()
    trainer.step(trainer.prompt_batches(0))
    prompts, files = trainer.prompt_batches(1), set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        trainer.step(prompts)
    finally:
        sys.setprofile(before)
    modules = sorted(Path(name) for name in files if Path(name).is_relative_to(PACKAGE))
    lines = {str(path.relative_to(PACKAGE)): lines_of_code(path.read_text()) for path in modules}
    assert 20 < len(modules) <= MOST_MODULES and 2000 < sum(lines.values()) <= MOST_LINES, lines
