"""What was said: the same game before and after a run, as text for RESULTS.md."""

from collections.abc import Sequence

from examples.games.pipeline import Experiment, Row, table_of
from examples.games.results import turns_of
from examples.mini_farm.base import EOS


def transcripts(experiment: Experiment, row: str, seed: int, places: Sequence[int]) -> str:
    """Returns the held-out games at `places` of the table, before and after the run of `row` with `seed`."""
    run = experiment.run(row, seed=seed)
    blocks = []
    for place in places:
        for title, table in (("before", table_of(run, 0)), ("after", table_of(run, -1))):
            game = table[place % len(table)]
            won = experiment.game.is_won(game["columns"], turns_of(game))
            told = f"{', '.join(f'{name} {value}' for name, value in game['columns'].items())}, {title}"
            lines = "\n".join([f"prompt       {_text(game['prompt'])}", *_lines(game)])
            blocks.append(f"{told}: {'won' if won else 'lost'}\n\n```text\n{lines}\n```")
    return "\n\n".join(blocks)


def _lines(game: Row) -> list[str]:
    parts = game.get("turns", [{"role": "policy", "text": game["response"]}])
    return [f"{part['role']:<12} {_text(part['text'])}" for part in parts]


def _text(text: str) -> str:
    return text.replace(EOS, " ").strip()
