"""The house rules that a machine can check: the top level, the direction and circles of imports, names, unread options.

Each rule is a function from source text to a list of complaints; one test runs it over the repository, another over a
planted offence.
"""

import ast
import fnmatch
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "alpaca_ppo"
EXAMPLES = ROOT / "examples"
TESTS = ROOT / "tests"

TOP_LEVEL = set(
    "setup.cfg pyproject.toml README.md LICENSE CHANGELOG.md CONTRIBUTING.md AGENTS.md Makefile constraints.txt .ci "
    ".gitignore mkdocs.yml alpaca_ppo docs examples tests".split()
)
TIERS = (
    {"types", "registry", "presets", "async_calls", "atomic_io", "control_tokens", "saved_models", "library_output"},
    {"functional", "adapters", "config", "hook_checks"},
    {"models", "http_json"},
    {"distributed"},
    {"generation", "data", "rewards", "tracking", "doctor", "migrate"},
    {"environments"},
    {"ppo", "checkpoint", "evaluation", "report", "supervised"},
    {"estimate_memory"},
    {"trainer"},
    {"cli"},
)
NEVER = (("ppo", "tracking"),)
"""Imports that no tier forbids, but the house does: one step of PPO stands without what a run tells."""
SAYS_NOTHING = {"utils", "util", "common", "misc", "helpers", "helper"}


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def assert_none(offences: list[str]) -> None:
    assert not offences, "\n".join(["", *offences])


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(text: str, module: str) -> Iterator[str]:
    """Dotted absolute name of everything that `text`, the source of `module`, imports, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = module.split(".")[: -node.level] if node.level else []
            base = [*start, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def module_name(path: Path) -> str:
    """Dotted name of the module at `path`; a package keeps its `__init__`, from where its relative imports count."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def tier_offences(text: str, module: str) -> list[str]:
    """Imports of `module` (dotted, below alpaca_ppo) that point up or sideways between the tiers."""
    level = {part: index for index, tier in enumerate(TIERS) for part in tier}
    part = module.split(".")[1]
    if part == "__init__":
        return []
    if part not in level:
        return [f"{module}: alpaca_ppo.{part} has no tier; give it one in TIERS"]
    offences = []
    for name in imported_names(text, module):
        top, *rest = name.split(".")
        if top in {"examples", "tests"}:
            offences.append(f"{module} imports {name}: the package stands without it")
        if top != "alpaca_ppo":
            continue
        other = rest[0] if rest else ""
        if other == part:
            continue
        if (part, other) in NEVER:
            offences.append(f"{module} imports {name}: {part} stands without {other}")
        if other not in level:
            offences.append(f"{module} imports {name}: import it from the module that defines it")
        elif level[other] >= level[part]:
            offences.append(f"{module} (tier {level[part]}) imports {name} (tier {level[other]})")
    return offences


def leaf_offences(text: str, module: str) -> list[str]:
    """Imports of a module of `functional` that are neither torch, the standard library nor `functional` itself."""
    allowed = sys.stdlib_module_names | {"torch"}
    return [
        f"{module} imports {name}"
        for name in imported_names(text, module)
        if name.split(".")[0] not in allowed and not name.startswith(("alpaca_ppo.functional", "alpaca_ppo.registry"))
    ]


def import_circle(texts: dict[str, str]) -> list[str]:
    """Modules each of which imports the next, the first named again as the last; empty without a circle.

    `texts` are sources by dotted name; a package's name ends in `__init__`.
    """
    modules = {module.removesuffix(".__init__") for module in texts}
    imported: dict[str, set[str]] = {}
    for module, text in texts.items():
        found = set()
        for name in imported_names(text, module):
            # What is imported is a module or, if there is none of that name, something in the module before the dot.
            found.add(name if name in modules else name.rpartition(".")[0])
        name = module.removesuffix(".__init__")
        imported[name] = (found & modules) - {name}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def fields_of(text: str, class_name: str) -> list[str]:
    """Names of the annotated fields in the body of `class_name`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            return [n.target.id for n in fields if not ast.unparse(n.annotation).startswith("ClassVar")]
    return []


def options_read(text: str, of: str = "(arg|argument|config)s?") -> set[str]:
    """Attributes that `text` reads from something named arguments or configuration: `args.x`, `self.args.x`; and what
    it takes from a dictionary of options: `values["x"]`.
    """
    nodes = list(ast.walk(ast.parse(text)))
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    taken = [node.slice for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "values"]
    return {node.attr for node in reads if re.search(f"{of}$", ast.unparse(node.value))} | {
        key.value for key in taken if isinstance(key, ast.Constant)
    }


def test_top_level_holds_what_the_design_names_and_nothing_else():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()] + [".git"]
    found = {p.name for p in ROOT.iterdir() if not any(fnmatch.fnmatch(p.name, pattern) for pattern in ignored)}
    assert found == TOP_LEVEL


def test_imports_point_one_way_between_the_tiers():
    assert_none([o for p in sources(PACKAGE) for o in tier_offences(p.read_text(), module_name(p))])


def test_the_modules_of_the_package_import_each_other_in_no_circle():
    circle = import_circle({module_name(path): path.read_text() for path in sources(PACKAGE)})
    assert not circle, " imports ".join(circle)


def test_a_circle_of_imports_is_found_inside_functions_and_through_packages_too():
    line = {"p.a": "import p.b", "p.b": "from p.c import x", "p.c": "import torch"}
    assert import_circle(line) == []
    circle = import_circle(line | {"p.c": "def f():\n    from . import a"})
    assert circle[0] == circle[-1] and " ".join(circle) in {"p.a p.b p.c p.a", "p.b p.c p.a p.b", "p.c p.a p.b p.c"}
    assert set(import_circle({"p.__init__": "from .a import x", "p.a": "from p import y"})) == {"p", "p.a"}


def test_functional_imports_torch_and_the_standard_library_only():
    modules = sources(PACKAGE / "functional")
    assert modules
    assert_none([o for p in modules for o in leaf_offences(p.read_text(), module_name(p))])


@pytest.mark.parametrize(
    "line",
    [
        "import alpaca_ppo.trainer",
        "from alpaca_ppo import trainer",
        "from alpaca_ppo.trainer import PPOTrainer",
        "from alpaca_ppo import PPOTrainer",
        "from ..trainer import PPOTrainer",
        "def f():\n    from alpaca_ppo.tracking import RunLog",
        "importlib.import_module('alpaca_ppo.trainer')",
        "from examples.mini_farm import grammar",
    ],
)
def test_an_import_that_points_up_or_sideways_is_found(line):
    down = "from alpaca_ppo.functional.packing import x\nfrom .policy import x\nimport torch\n"
    assert len(tier_offences(down + line, "alpaca_ppo.models.loading")) == 1


def test_a_module_without_a_tier_and_a_leaf_with_a_library_are_found():
    assert len(tier_offences("", "alpaca_ppo.brand_new")) == 1
    assert leaf_offences("import numpy\nimport math\nfrom torch import nn", "alpaca_ppo.functional.kl") == [
        "alpaca_ppo.functional.kl imports numpy"
    ]


def test_no_module_has_a_name_that_says_nothing():
    everything = [p for folder in (PACKAGE, EXAMPLES, TESTS) for p in sources(folder)]
    assert_none([named(p) for p in everything if SAYS_NOTHING & set(p.relative_to(ROOT).with_suffix("").parts)])


def test_no_test_is_skipped_or_expected_to_fail_and_nothing_is_left_to_do():
    # Spelled in two parts so that this file does not find itself.
    pattern = re.compile(r"pytest\.(skip|xfail|importorskip)|mark\.(skip|xfail)|\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    everything = [p for folder in (PACKAGE, EXAMPLES, TESTS) for p in sources(folder) if p != Path(__file__)]
    lines = [(p, i, line) for p in everything for i, line in enumerate(p.read_text().splitlines(), 1)]
    assert_none([f"{named(p)}:{i} {line.strip()}" for p, i, line in lines if pattern.search(line)])


@pytest.mark.parametrize(
    ("class_name", "module"),
    [
        ("RunOptions", "run_options"),
        ("LearningOptions", "learning_options"),
        ("PPOConfig", "ppo_config"),
        ("ScriptArguments", "script_arguments"),
    ],
)
def test_every_configuration_field_is_read_by_code_outside_its_module(class_name, module):
    home = PACKAGE / "config" / f"{module}.py"
    fields = fields_of(home.read_text(), class_name)
    assert fields
    others = [p for folder in (PACKAGE, EXAMPLES) for p in sources(folder) if p != home]
    read = set().union(*(options_read(p.read_text()) for p in others))
    if class_name != "PPOConfig":
        # Its properties, which have readers of their own.
        read |= options_read((PACKAGE / "config/ppo_config.py").read_text(), of="self")
    assert_none([f"{class_name}.{field} is read by no code" for field in fields if field not in read])


def test_a_field_counts_as_read_only_when_it_is_taken_from_arguments():
    text = "a = self.args.gamma\nb = config.lam\nself.args.seed = 1\noptimizer.learning_rate\nf(cliprange=1)\n"
    text += "c = values['critic']"
    assert options_read(text) == {"gamma", "lam", "critic"}


SHARDING = re.compile(r"deepspeed|fsdp|zero_stage|zero3", re.IGNORECASE)
# Options and launch files name them; the estimate asks `distributed` for what a configuration shards.
NAMES_SHARDING = ("cli/launch.py", "config/", "estimate_memory/")


def sharding_known(text: str) -> list[str]:
    """What code knows of a library that shards: imports, names, attributes and compared texts; no other text."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute | ast.Name):
            found.append(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Compare):
            found += [str(side.value) for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)]
    return [name for name in found if SHARDING.search(name)]


def test_only_distributed_knows_how_models_are_sharded():
    elsewhere = ("distributed/", *NAMES_SHARDING)
    others = [p for p in sources(PACKAGE) if not str(p.relative_to(PACKAGE)).startswith(elsewhere)]
    assert_none([f"{named(p)} knows {name}" for p in others for name in sharding_known(p.read_text())])
    planted = 'import deepspeed\nif kind == "FSDP" or state.deepspeed_plugin: pass\nx = "deepspeed: FILE"'
    assert sharding_known(planted) == ["deepspeed", "FSDP", "deepspeed_plugin"]
