"""The bare compute with torch's operator for the activation, which this package uses too (`models.activations`), where
transformers' `gelu_new` is a chain of eight.
"""

from dataclasses import replace

from tests.tools.benchmarks.bare_steps import answer_steps
from tests.tools.benchmarks.worker import given_workload

if __name__ == "__main__":
    answer_steps(replace(given_workload(), activation="gelu_pytorch_tanh"))
