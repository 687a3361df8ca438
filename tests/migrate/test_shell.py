"""Shell scripts that start verl: the overrides that a shell would pass, worked out by hand, or the refused line."""

import subprocess
from pathlib import Path

import pytest

from alpaca_ppo.migrate import translate
from alpaca_ppo.migrate.shell import overrides_of_shell

RUN = "python3 -m verl.trainer.main_ppo"


def read(text: str) -> dict[str, str]:
    parts = [override.partition("=") for override in overrides_of_shell(text, "run.sh")]
    return {name: value for name, _, value in parts}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RUN} a.n=$((1024 * 2)) a.m=$((7/2))", {"a.n": "2048", "a.m": "3"}),
        # (512 + 2048) / 4 = 640, and 640 - 7 * 3 = 619.
        (
            f"p=512\nr=$((p * 4))\nt=$(( ($p + ${{r}}) / 4 ))\n{RUN} a.n=${{t}} a.m=$((t - 7 * 3))",
            {"a.n": "640", "a.m": "619"},
        ),
        (f"{RUN} a.n=${{A:-${{B:-3}}}}", {"a.n": "3"}),
        (f"P=8\nT=${{T:-$((P + 1))}}\n{RUN} a.n=$T", {"a.n": "9"}),
        (f'ROOT=${{ROOT:-"${{HOME}}/data"}}\n{RUN} a.f="$ROOT/x"', {"a.f": f"{Path.home()}/data/x"}),
        (f"x=1\nx=$((x + 1))\n{RUN} a.n=$x", {"a.n": "2"}),
        (f"n=${{N:-}}\nn=${{n:-7}}\n{RUN} a.n=$n", {"a.n": "7"}),
        (f"TP=${{1:-4}}\n{RUN} a.n=$TP $@", {"a.n": "4"}),
        (
            f"f=\"['$HOME/a', 'b']\"\n{RUN} a.f=\"$f\" a.g='[\"c\"]'",
            {"a.f": f"['{Path.home()}/a', 'b']", "a.g": '["c"]'},
        ),
        # A comment ends with its line, although that ends with a backslash.
        (f"# don't \\\n{RUN} \\\n  a.n=1 \\\n  a.k=3 2>&1 | tee log  # it's \\\n", {"a.n": "1", "a.k": "3"}),
        (
            f'set -euxo pipefail\nN=1; M=2\npip install -e .\necho "b.n=5"\n{RUN} a.n=$N a.m=$M',
            {"a.n": "1", "a.m": "2"},
        ),
        (
            f"{RUN} --config-path=/c --config-name x a.n=1",
            {"hydra.config_path": "/c", "hydra.config_name": "x", "a.n": "1"},
        ),
        (f"{RUN} trainer=x '~a.n' b.n=$((7 % 4)) $@", {"trainer": "x", "~a.n": "", "b.n": "3"}),
        # A comment begins where a word would, outside of quotes.
        (f"A=x#1; N=2 # 3\n{RUN} a.m=$A b.m='# c' a.n=$N", {"a.m": "x#1", "b.m": "# c", "a.n": "2"}),
        # An assignment before a command is for this command alone, and does not count in its own words.
        (f"L=1\nL=2 {RUN} a.n=$L", {"a.n": "1"}),
        (f"N=1\nexport N=2 K=$N\n{RUN} a.n=$N a.k=$K", {"a.n": "2", "a.k": "1"}),
        (f"{RUN} a.k=\"x y\"'2' a.m=\\[\\'b\\'\\,\\ 1\\]", {"a.k": "x y2", "a.m": "['b', 1]"}),
        # A line that goes on within a word, and a backslash that is one.
        (f'N=1\n{RUN} a.n="\\\n$N" a.m="a\\b\\"" a.k=\\\\x', {"a.n": "1", "a.m": 'a\\b"', "a.k": "\\x"}),
        # A `$` that was quoted begins one of verl's references.
        (f"{RUN} a.n='${{b.m}}' a.m=\\${{b.k}}", {"a.n": "${b.m}", "a.m": "${b.k}"}),
        (f'{RUN} a.m="${{A:-"x"}}" a.k=${{A:-\'x\'}}', {"a.m": "x", "a.k": "x"}),
        # In a calculation, a name stands for a number, and $name for its text: 2 + 3 * 2 = 8, (2 + 3) * 2 = 10.
        (f"A=2+3\n{RUN} a.n=$(($A * 2)) a.m=$((A * 2))", {"a.n": "8", "a.m": "10"}),
        # Only the arguments of verl count, and of them no redirection.
        (f"{RUN} a.n=1 > b.y=2", {"a.n": "1"}),
        (f"ray job submit --env='{{\"a.b=1\": 2}}' -- {RUN} a.n=1", {"a.n": "1"}),
        # The script's arguments from the third on, and a last line that goes on.
        (f'{RUN} a.n=1 ${{@:3}} "${{@:1}}" \\', {"a.n": "1"}),
        (f"hf download x --local-dir $HOME/x\n{RUN} --config-dir c a.n=1", {"hydra.config_dir": "c", "a.n": "1"}),
        # What a command prints is not known: it stays as it is, in one word.
        (
            f'P="$(pwd)"\nT=${{T:-$(date +"%Y-%m")}}\n{RUN} a.n="$P/x" a.m=x_$T | tee $(date).log',
            {"a.n": "$(pwd)/x", "a.m": 'x_$(date+"%Y-%m")'},
        ),
        (f"uv run --frozen --no-sync {RUN} a.n=1", {"a.n": "1"}),
        (f"{RUN} $@", {}),
        # Of a variable that is not set, the name stays, with its dollar sign.
        (f"N=x_$USER\n{RUN} a.n=$N a.m=${{M}}", {"a.n": "x_$USER", "a.m": "$M"}),
    ],
)
def test_overrides_are_those_that_a_shell_would_pass(text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        # A number that only a run decides, and commands that are more than a name and words.
        (f"N=$(nproc)\n{RUN} a.n=$((N * 2))", 2, "N . 2"),
        (f"{RUN} a.n=$(($(nproc) * 2))", 1, "nproc"),
        (f"{RUN} a.n=`nproc`", 1, "nproc"),
        (f"{RUN} a.n=$(basename $(pwd))", 1, "basename"),
        (f'{RUN} a.n="$(echo ")")"', 1, "echo"),
        (f"{RUN} $(cat more)", 1, "more"),
        (f"{RUN} a.n=$((N * 2))", 1, "N . 2"),
        (f"N=~/y\n{RUN} a.n=$N", 1, "~/y"),
        (f"N=1\n{RUN} a.n='$N'", 2, r"'\$N'"),
        (f"N=1\n{RUN} a.n=$N\\\n3", 2, r"\$N"),
        (f"{RUN} a.n=${{RANDOM:-1}}", 1, "RANDOM"),
        # Calculations: a shell rounds -3.5 to -3, and knows octal numbers.
        *(
            (f"N=-7\n{RUN} a.n=$(({text}))", 2, "")
            for text in ("2 ** 10", "(3 - 10) / 2", "N / 2", "010", "1 > 0", "4/0")
        ),
        # Other expansions.
        *(
            (f"N=a/b\n{RUN} a.n={text}", 2, "")
            for text in ("${N##*/}", "${N-1}", "${#N}", "${N[0]}", "{1,2}", "a*", "~/a", "${M:-~/a}")
        ),
        # What may hold several overrides.
        (f"N='1 a.m=2'\n{RUN} a.n=$N", 2, "a.n=.N"),
        (f'{RUN} a.n=1 "${{A[@]}}"', 1, "A"),
        (f"{RUN} a.n=1 other", 1, "other"),
        # A comment or an empty line ends the command.
        (f"{RUN} a.n=1 \\\n  # a.k=2 \\\n  a.m=3", 3, "a.m=3"),
        (f"{RUN} a.n=1 \\\n\n  a.m=3", 3, "a.m=3"),
        # Blocks, whether they set a variable or start verl.
        (f"N=1\nif [ $A ]; then\n  N=2\nfi\n{RUN} a.n=$N", 2, "if"),
        (f"for N in 1 2; do\n  {RUN} a.n=$N\ndone", 1, "for"),
        (f"case $1 in\n  a) N=1 ;;\nesac\n{RUN} a.n=$N", 1, "case"),
        (f"run() {{\n  {RUN} a.n=1\n}}\nrun", 1, "run"),
        (f"function set_n {{\n  N=5\n}}\nset_n\n{RUN} a.n=${{N:-1}}", 1, "function"),
        (f"{{ N=2; }} 2> /dev/null\n{RUN} a.n=${{N:-1}}", 1, "N=2"),
        (f"cat > x <<E\nit's\nE\n{RUN} a.n=1", 1, "<<E"),
        # Commands that may change a variable, and assignments that are no plain ones.
        *(
            (f"N=100\n{command}\n{RUN} a.n=$N", 2, "")
            for command in (
                "((N+=28))",
                "M=$((N++))",
                'echo "$((N += 2))"',
                "let N+=1",
                "printf -v N '%d' 5",
                "unset N",
                "read N",
                "echo 5 | read N",
                "[ $A ] && N=2",
                "( N=2 )",
                "N=2 &",
                "N=2 | tee x",
                "N+=0",
                "N[0]=2",
                "N=(1 2)",
                "N=2 M=$N",
                "declare -i N=2",
                "source env.sh",
                ". ./env.sh",
                'eval "$(cat env)"',
                "export $(cat .env)",
                ": ${N:=2}",
                "echo ${M:=2}",
                "set -- 8",
                "IFS=,",
                "alias python3=echo",
            )
        ),
        # Another program, and a quote that does not end.
        ("python3 -m verl.trainer.main_generation a.n=1", 1, "main_generation"),
        (f"C='{RUN} a.n=1'\n$C", 2, "C"),
        (f'{RUN} a.n="x', 1, '"x'),
    ],
)
def test_what_is_more_than_plain_assignments_and_the_command_is_refused_by_its_line(text, line, said):
    with pytest.raises(ValueError, match=f"run.sh, line {line}: `(?s:.*{said}.*)` is more than migrate reads"):
        overrides_of_shell(text, "run.sh")


@pytest.mark.parametrize(("text", "times"), [("echo 1", 0), (f"{RUN} a.n=1\n{RUN} a.n=2", 2)])
def test_a_script_that_does_not_start_one_training_is_refused(text, times):
    with pytest.raises(ValueError, match=f"run.sh starts verl.trainer.main_ppo {times} times"):
        overrides_of_shell(text, "run.sh")


def test_the_line_that_printf_prints_in_a_shell_is_read_to_the_same_words():
    words = [
        "a.f=['/x/a', \"b\"]",
        "a.g={k: 1, l: [2]}",
        "a.h=",
        "a.k=100% #1 & more; (~x) *?!",
        "a.m=${b.c}",
        "a.n=a\\b",
    ]
    command = ["bash", "-c", "printf '%q ' python3 -m verl.trainer.main_ppo \"$@\"", "run", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert overrides_of_shell(printed, "run.sh") == words


def test_text_where_a_number_is_needed_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("max_steps: abc\nnum_generations: 4\nbeta: 0.1\n")
    with pytest.raises(ValueError, match="max_steps is 'abc' in TRL's GRPOConfig in run.yaml; it must be a number"):
        translate(str(tmp_path / "run.yaml"))
