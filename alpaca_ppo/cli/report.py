"""Write the report of one or several runs, or check a run for faults.

What the page shows is in `report`; the findings are the doctor's.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alpaca_ppo.config.model_names import check_folder
from alpaca_ppo.report.page import write_report
from alpaca_ppo.report.runs import Run, read_runs


def make_parser() -> argparse.ArgumentParser:
    """The flags of `alpaca-ppo report`."""
    parser = argparse.ArgumentParser(
        prog="alpaca-ppo report",
        description="Writes the report of one or several runs: one HTML file that opens from disk.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run; several are overlaid")
    parser.add_argument(
        "--output",
        type=Path,
        help="the HTML file; by default report.html in the run's folder, or, of several runs, in the current one",
    )
    parser.add_argument(
        "--token_mb", type=float, default=20.0, help="megabytes of per-token numbers in the file at most (default: 20)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print the doctor's findings and exit with 1 if one is an error",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report, or checks the runs; returns the exit status.

    Raises:
        ValueError: if a folder is not that of a run, or `--token_mb` is negative.
    """
    args = make_parser().parse_args(argv)
    if not args.token_mb >= 0:
        raise ValueError(f"--token_mb is {args.token_mb}; it must be at least 0")
    for name in args.runs:
        check_folder("the run", name)
    runs = read_runs(args.runs)
    if args.check:
        return _check(runs)
    default = (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
    path = write_report(runs, args.output or default, token_mb=args.token_mb)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0


def _check(runs: Sequence[Run]) -> int:
    for run in runs:
        count = len(run.findings)
        print(f"{run.path}: {count} finding{'' if count == 1 else 's'} up to step {run.last_step}")
        for finding in run.findings:
            print(finding)
    return int(any(finding.severity == "error" for run in runs for finding in run.findings))


if __name__ == "__main__":
    sys.exit(main())
