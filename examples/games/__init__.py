"""Two games that a small model learns by talking: a number to be guessed, and sums that need a calculator.

    python -m examples.games.row     one row of the table, with one seed
    python -m examples.games.table   the rows that are missing, then RESULTS.md and its figure

The games and their players are in `guessing` and `calculator`, what each row changes in `rows`, the experiment in
`pipeline`. The stages are cached by `examples.mini_farm.stages`, so that every command continues where an earlier one
stopped.
"""
