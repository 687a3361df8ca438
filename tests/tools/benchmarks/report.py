"""The tables of examples/performance.md: ratios of steps made in the same round, with their spread, and the machine."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.benchmarks.programs import Step
from tests.tools.benchmarks.workloads import Workload

OWN, BARE, TRL = "own_steps", "bare_steps", "trl_steps"
NAMES = {TRL: "TRL", BARE: "bare compute", OWN: "alpaca_ppo"}
STAGES = ("rollout", "score", "logprobs", "old policy", "update")
BEGIN, END = "<!-- make bench writes this -->", "<!-- until here -->"


@dataclass(frozen=True)
class Comparison:
    """All programs on one workload."""

    name: str
    workload: Workload
    counted: dict[str, Step]
    """A step of each program whose FLOPs were counted; its time says nothing."""
    steps: dict[str, list[Step]]
    """The measured steps of each other program, one a round."""
    own: dict[str, list[Step]]
    """Those of this package in the same rounds, by the other program."""
    versions: dict[str, str]


@dataclass(frozen=True)
class Growth:
    """One program on workloads that differ in one size from the first."""

    program: str
    workload: Workload
    """The first."""
    steps: dict[str, list[Step]]


@dataclass
class Machine:
    """What the figures depend on besides the programs."""

    threads: int
    busy_before: float
    used_before: float
    start: float
    others: float = field(default=0.0)
    """Cores that other processes used on average."""

    @classmethod
    def begin(cls, threads: int) -> "Machine":
        """Starts to watch what other processes use."""
        return cls(threads, _busy_seconds(), _own_seconds(), time.perf_counter())

    def end(self) -> "Machine":
        """Ends it, once all programs have ended."""
        busy, own = _busy_seconds() - self.busy_before, _own_seconds() - self.used_before
        self.others = max(0.0, busy - own) / (time.perf_counter() - self.start)
        return self


def _busy_seconds() -> float:
    """Seconds in which a core of this machine was busy, summed over cores."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    return sum(os.times()[:4])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the smallest and largest of `values`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def wall(step: Step) -> float:
    """Seconds by the clock."""
    return step.wall


def cpu(step: Step) -> float:
    """Processor time."""
    return step.cpu


def without_old_policy(seconds: Callable[[Step], float]) -> Callable[[Step], float]:
    """`seconds` less those of the policy's pass with its old weights, which only the bare program tells apart."""

    def rest(step: Step) -> float:
        stages = step.stages if seconds is wall else step.cpu_stages
        return seconds(step) - stages["old policy"]

    return rest


def ratios(
    above: Sequence[Step],
    below: Sequence[Step],
    seconds: Callable[[Step], float],
    below_seconds: Callable[[Step], float] | None = None,
) -> list[float]:
    """`above` / `below` in each round."""
    other = below_seconds or seconds
    return [seconds(a) / other(b) for a, b in zip(above, below, strict=True)]


def claims(comparison: Comparison) -> list[str]:
    """The rows of the table of ratios."""
    steps, own, counted = comparison.steps, comparison.own, comparison.counted
    rows = []
    for label, seconds in (("by the clock", wall), ("in processor time", cpu)):
        if TRL in steps:
            rows.append(f"times as fast as TRL, {label} | {spread(ratios(steps[TRL], own[TRL], seconds))}")
        rows.append(f"of bare compute, {label} | {spread(ratios(own[BARE], steps[BARE], seconds))}")
        rest = ratios(own[BARE], steps[BARE], seconds, without_old_policy(seconds))
        rows.append(f"of bare compute without the old policy's pass, {label} | {spread(rest)}")
    for name in steps:
        flops, memory = (counted[OWN].flops or 0) / (counted[name].flops or 1), _peak(own[name]) / _peak(steps[name])
        rows.append(f"of the FLOPs of {NAMES[name]} | {flops:.2f}")
        rows.append(f"of the peak memory of {NAMES[name]} | {memory:.2f}")
    return rows


def recomputed(steps: Sequence[Step]) -> str:
    """In how many of `steps` the policy's log-probs were computed again."""
    return f"{sum(step.recomputed for step in steps)} of {len(steps)}"


def _peak(steps: Sequence[Step]) -> int:
    return max(step.peak_bytes for step in steps)


def describe(workload: Workload) -> str:
    """One sentence about a workload."""
    low, high = min(workload.lengths), max(workload.lengths)
    mean = sum(workload.lengths) / workload.num_prompts
    lengths = f"of {low} tokens each" if low == high else f"of {low} to {high} tokens, {mean:.0f} on average"
    steps = -(-workload.num_prompts // workload.step_batch_size)
    return (
        f"{workload.num_prompts} prompts of {workload.prompt_len} tokens, responses {lengths} (room for "
        f"{workload.response_len}); {workload.ppo_epochs} epochs of {steps} optimizer step{'s' if steps > 1 else ''} "
        f"in micro-batches of {workload.micro_batch_size} rows"
    )


def stage_table(comparison: Comparison) -> list[str]:
    """Seconds by stage and peak memory of each program; of this package, in all rounds."""
    steps = comparison.steps | {OWN: [step for steps in comparison.own.values() for step in steps]}
    lines = [f"| {comparison.name} | {' | '.join(NAMES[name] for name in steps)} |", "|---" * (len(steps) + 1) + "|"]
    rows: list[tuple[str, Callable[[Sequence[Step]], str]]] = [
        (f"{stage}, s", lambda s, stage=stage: _seconds([step.stages.get(stage) for step in s])) for stage in STAGES
    ]
    rows += [
        ("step by the clock, s", lambda s: spread([step.wall for step in s])),
        ("step in processor time, s", lambda s: spread([step.cpu for step in s])),
        ("steps with the old policy's pass", recomputed),
        ("peak memory above the start, MiB", lambda s: f"{_peak(s) / 2**20:.0f}"),
    ]
    lines += [f"| {label} | {' | '.join(cell(steps[name]) for name in steps)} |" for label, cell in rows]
    flops = [f"{(step.flops or 0) / 1e9:.0f}" for step in comparison.counted.values()]
    return [*lines, f"| FLOPs of a step, 1e9 | {' | '.join(flops)} |"]


def _seconds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def growth_table(growths: Sequence[Growth]) -> list[str]:
    """Processor time and peak memory with one size doubled, relative to the first workload."""
    names = [NAMES[growth.program] for growth in growths]
    lines = [
        f"| twice as | {' | '.join(f'{name}, time | {name}, memory' for name in names)} |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    base, *doubled = growths[0].steps
    for size in doubled:
        cells = []
        for growth in growths:
            time_ratio = statistics.median(ratios(growth.steps[size], growth.steps[base], cpu))
            cells += [f"{time_ratio:.2f}", f"{_peak(growth.steps[size]) / _peak(growth.steps[base]):.2f}"]
        lines.append(f"| {SIZES[size]} | {' | '.join(cells)} |")
    return lines


SIZES = {
    "prompts": "many prompts",
    "response length": "long responses",
    "vocabulary": "large a vocabulary",
    "layers": "many layers",
}


def machine_facts(machine: Machine, versions: dict[str, str]) -> str:
    """The machine and the versions."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = cpus[0].partition(":")[2].strip() if cpus else platform.machine()
    installed = {**versions, "torch": importlib.metadata.version("torch")}
    listed = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    return (
        f"Machine: {len(os.sched_getaffinity(0))} cores ({model}), {machine.threads} threads for every program; other "
        f"processes used {machine.others:.1f} cores on average meanwhile. Python {platform.python_version()}, {listed}."
    )


def text(comparisons: Sequence[Comparison], growths: Sequence[Growth], machine: Machine) -> str:
    """The whole block that `make bench` writes."""
    rounds = len(comparisons[0].steps[BARE])
    lines = [machine_facts(machine, comparisons[0].versions), ""]
    lines += [f"- **{comparison.name}**: {describe(comparison.workload)}." for comparison in comparisons]
    lines += [
        "",
        f"Median, smallest and largest of {rounds} rounds, warm-up excluded:",
        "",
        f"| alpaca_ppo's step is | {' | '.join(comparison.name for comparison in comparisons)} |",
        "|---" * (len(comparisons) + 1) + "|",
    ]
    rows = zip(*(claims(comparison) for comparison in comparisons), strict=True)
    for row in rows:
        label = row[0].partition(" | ")[0]
        lines.append(f"| {label} | {' | '.join(cell.partition(' | ')[2] for cell in row)} |")
    lines += ["", "What the ratios are made of. The seconds hold for this machine alone; stages are medians.", ""]
    for comparison in comparisons:
        lines += [*stage_table(comparison), ""]
    if growths:
        steps = growths[0].steps.values()
        own = [step for growth in growths if growth.program == OWN for size in growth.steps.values() for step in size]
        lines += [
            f"Growth of a smaller workload ({describe(growths[0].workload)}; {growths[0].workload.num_hidden_layers} "
            f"layers), in processor time (median of {len(next(iter(steps)))} rounds) and peak memory. alpaca_ppo made "
            f"the old policy's pass in {recomputed(own)} steps:",
            "",
            *growth_table(growths),
            "",
        ]
    return "\n".join(lines)


def write_between_markers(path: Path, block: str, begin: str = BEGIN) -> None:
    """Replaces what is between the markers in the file at `path`."""
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    assert found, f"{path} has no marker {begin}"
    after = rest.partition(END)[2]
    path.write_text(f"{before}{begin}\n{block}{END}{after}", encoding="utf-8")
