"""What is started by hand and not by pytest: benchmarks, same-numbers, torture, processes that start warm."""
