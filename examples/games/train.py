"""One run with an environment, or one evaluation: what `pipeline` starts as a process of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.config.parser import parse_args
from examples.games.calculator import Calculator
from examples.games.guessing import Guess, GuessByTurn

ENVIRONMENTS = {kind.__name__: kind for kind in (Guess, GuessByTurn, Calculator)}


def _required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What is played, by which model."""

    environment: str = _required(f"One of {', '.join(ENVIRONMENTS)}.")
    model: str = _required("Folder of the model.")
    reference_model: str = _required("Folder of the model that the KL is measured to.")
    prompts: str = _required("JSON lines with the games to train on.")
    held_out: str = _required("JSON lines with the games of the evaluations.")
    only_evaluate: bool = field(default=False, metadata={"help": "Play the held-out games, and do not train."})


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains or evaluates as the command line says."""
    run, args = parse_args([RunArguments, PPOConfig], argv)
    trainer = PPOTrainer(
        model=run.model,
        args=args,
        train_dataset=Dataset.from_list(read_rows(run.prompts)),
        eval_dataset=Dataset.from_list(read_rows(run.held_out)),
        environment_factory=ENVIRONMENTS[run.environment],
        ref_model=run.reference_model,
    )
    if run.only_evaluate:
        trainer.evaluate()
        trainer.run_log.finish()
    else:
        trainer.train()


if __name__ == "__main__":
    main()
