"""A short round of `make torture`: a few kills, each followed by a comparison with the run that was left alone."""

import re
import subprocess

import pytest

from tests.integration.launching import ENVIRONMENT, HANG
from tests.tools.warm_python import warm_python


@pytest.mark.proof
def test_a_run_killed_at_accesses_to_the_disk_ends_as_if_nothing_had_happened():
    # In a process of its own: it forks, which a process with threads must not.
    own = [warm_python(), "-m", "tests.tools.torture", "--kills", "0", "--stride", "29"]
    done = subprocess.run(own, capture_output=True, text=True, env=ENVIRONMENT, timeout=HANG)
    assert done.returncode == 0, done.stderr
    plain, interrupted = map(int, re.findall(r"(?:each of|likewise) (\d+)", done.stdout))
    assert plain >= 3 and interrupted >= 1
