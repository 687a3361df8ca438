"""Which defaults to start with: five tasks, the settings that were tried, and the search that chose among them.

`python -m examples.defaults.search` makes the runs that are missing; every one of them is a line of search.jsonl, and
SEARCH.md is the table of all. The runs of the search have other data and seeds than those of the comparison.
"""
