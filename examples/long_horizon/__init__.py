"""A task where credit matters: 30 decisions in 211 tokens, one reward at the end, and estimators compared on it.

    python -m examples.long_horizon.row     one row of the table, with one seed
    python -m examples.long_horizon.table   the rows that are missing, then RESULTS.md and its figure

The task is in `task`, what each row changes in `rows`, the experiment in `pipeline`. The stages are cached by
`examples.mini_farm.stages`, so that every command continues where an earlier one stopped.
"""
