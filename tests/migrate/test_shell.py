"""Shell scripts that start verl: the overrides that a shell would pass, worked out by hand, or what is not known."""

from pathlib import Path

import pytest

from alpaca_ppo.migrate import translate
from alpaca_ppo.migrate.shell import overrides_of_shell

RUN = "python3 -m verl.trainer.main_ppo"


def read(text: str) -> dict[str, str]:
    return dict(override.split("=", 1) for override in overrides_of_shell(text, "run.sh"))


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
        # Elements of an array, on several lines and on one.
        (
            f'A=(\n  a.n=1  # one\n  "a.m=2"\n)\nB=(b.n=$((2 * (3 + 1))))\n{RUN} "${{A[@]}}" "${{B[@]}}"',
            {"a.n": "1", "a.m": "2", "b.n": "8"},
        ),
        # Text that is split into words.
        (f'S="\n  a.n=1 \\\n  a.m=2"\nT="b.n=3 b.m=4"\n{RUN} $S $T', {"a.n": "1", "a.m": "2", "b.n": "3", "b.m": "4"}),
        (
            f"f=\"['$HOME/a', 'b']\"\n{RUN} a.f=\"$f\" a.g='[\"c\"]'",
            {"a.f": f"['{Path.home()}/a', 'b']", "a.g": '["c"]'},
        ),
        # A comment ends with its line, although that ends with a backslash.
        (f"# don't \\\n{RUN} \\\n  a.n=1 \\\n  a.k=3 2>&1 | tee log  # it's \\\n", {"a.n": "1", "a.k": "3"}),
        (f"cat > x <<EOF\nit's\nif b.c=1\nEOF\n{RUN} a.n=1", {"a.n": "1"}),
        # A branch that sets nothing else.
        (f"if [ -z $X ]; then\n  echo $X\n  Y=1\nfi\n{RUN} a.n=1", {"a.n": "1"}),
        # Commands and functions that leave the variable alone, or come before it is set.
        (f"N=1\nif (( N == 2 )); then echo; fi\n((M += 1))\necho 'wait for N'\n{RUN} a.n=$N", {"a.n": "1"}),
        (f"N=1\nM=$((N * 2)) K=$((1 + 1))\n{RUN} a.n=$N a.m=$M a.k=$K", {"a.n": "1", "a.m": "2", "a.k": "2"}),
        (
            f"source env.sh\nread M\nN=1  # read for N\n{RUN} a.n=$N a.f=$HOME/x",
            {"a.n": "1", "a.f": f"{Path.home()}/x"},
        ),
        (f"N=1; M=2\npip install -e . && cd .\n./prepare.sh\n{RUN} a.n=$N a.m=$M", {"a.n": "1", "a.m": "2"}),
        (f"log() {{\n  echo $1 $N\n}}\nN=1\nlog x\n{RUN} a.n=$N", {"a.n": "1"}),
        (f"{RUN} -cn other a.n=1", {"hydra.config_name": "other", "a.n": "1"}),
        (
            f"{RUN} --config-path=/c --config-name x a.n=1",
            {"hydra.config_path": "/c", "hydra.config_name": "x", "a.n": "1"},
        ),
        (f"{RUN} trainer=x ~a.n b.n=$((7 % 4)) $@", {"trainer": "x", "~a.n": "null", "b.n": "3"}),
        # A comment begins where a word would, outside of quotes.
        (f"A=x#1; N=2 # 3\n{RUN} a.m=$A b.m='# c' a.n=$N", {"a.m": "x#1", "b.m": "# c", "a.n": "2"}),
        (f"G=(0 1)\n{RUN} b.m=${{#G[@]}} b.k=${{M##*/}} a.n=1", {"b.m": "${#G[@]}", "b.k": "${M##*/}", "a.n": "1"}),
        (f"M=a/b; K=${{M#/}}; N=2\n{RUN} a.n=$N", {"a.n": "2"}),
        (f"{RUN} b.m=1 `# the model` \\\n  a.n=2", {"b.m": "1", "a.n": "2"}),
        # An assignment before a command is for this command alone, and does not count in its own words.
        (f"L=1\nL=2 {RUN} a.n=$L", {"a.n": "1"}),
        (f"N=1\nM=$N N=2 K=$N\n{RUN} a.m=$M a.n=$N a.k=$K", {"a.m": "1", "a.n": "2", "a.k": "2"}),
        (f"N=1\nexport N=2 K=$N\n{RUN} a.n=$N a.k=$K", {"a.n": "2", "a.k": "1"}),
        # Quotes. A backslash says that no variable is meant, except in verl's own references.
        (f"N=1\n{RUN} a.n='$N' a.m=\\$N a.k=\"x y\"'2'", {"a.n": "\\$N", "a.m": "\\$N", "a.k": "x y2"}),
        (f"{RUN} a.n='${{b.m}}' a.m=\\${{b.k}}", {"a.n": "${b.m}", "a.m": "${b.k}"}),
        (f"{RUN} a.n=\"${{A:-'x'}}\" a.m=${{A:-'x'}} a.k=${{A:-\"x y\"}}", {"a.n": "'x'", "a.m": "x", "a.k": "x y"}),
        (f'N=1\nN+=0\nM="${{N}}2"\n{RUN} a.n=$M', {"a.n": "102"}),
        # An empty value is a value for `-`, but not for `:-`.
        (f"E=\n{RUN} a.n=x${{E-8}} a.m=${{E:-8}}", {"a.n": "x", "a.m": "8"}),
        (f': ${{L:=1}} "${{M:=2}}"\n{RUN} a.n=$L a.m=$M', {"a.n": "1", "a.m": "2"}),
        # In a calculation, a name stands for a number, and $name for its text: 2 + 3 * 2 = 8.
        (f"A=2+3\n{RUN} a.n=$(($A * 2)) a.m=$((A * 2))", {"a.n": "8", "a.m": "$(...)"}),
        # Only the arguments of verl count, and of them no redirection.
        (f"N=1\nN=2 echo b.n=5\npip install b.x=1\n{RUN} a.n=1 > b.y=2 &", {"a.n": "1"}),
        (f"ray submit --env='{{\"a.b=1\": 2}}' -- {RUN} a.n=1; {{ echo; }} | tee x", {"a.n": "1"}),
        (f"cat > x <<-'EOF'\n\tN=2\n\tEOF\nN=1; cat <<< EOF\n{RUN} a.n=$N", {"a.n": "1"}),
    ],
)
def test_overrides_are_those_that_a_shell_would_pass(text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"{RUN} a.n=$N",
        f"{RUN} a.n=$(nproc)",
        f"N=$(date +%Y)\n{RUN} a.n=x_$N",
        f"{RUN} a.n=$((N * 2))",
        f"{RUN} a.n=$((2 ** 10))",
        # A shell rounds -3.5 to -3.
        f"{RUN} a.n=$(((3 - 10) / 2))",
        f"N=-7\n{RUN} a.n=$((N / 2))",
        f"M=a/b\n{RUN} a.n=${{M##*/}}",
        f"N=1\nif [ $A ]; then\n  N=2\nelse\n  N=3\nfi\n{RUN} a.n=$N",
        f"N=1\nif [ $A ]; then N=2; fi\n{RUN} a.n=$N",
        f"N=1\nif [ $A ]; then\n  if [ $B ]; then X=1; fi\n  N=2\nfi\n{RUN} a.n=$N",
        f"case $1 in\n  a) N=1 ;;\n  *) N=2 ;;\nesac\n{RUN} a.n=$N",
        f"N=1\n[ $A ] && N=2\n{RUN} a.n=$N",
        f"N=1\n[ $A ] &&\n  N=2\n{RUN} a.n=$N",
        f"N=1\n( N=2 )\n{RUN} a.n=$N",
        f"N=1\n{{ N=2; }} 2> /dev/null\n{RUN} a.n=$N",
        f"N=2 | cat\n{RUN} a.n=${{N:-1}}",
        f"N=2 &\n{RUN} a.n=${{N:-1}}",
        f"[ $A ] || : ${{N:=2}}\n{RUN} a.n=${{N:-1}}",
        f"N=(1 2)\n{RUN} a.n=$N",
        f"N=(1 2)\n{RUN} a.n=${{N[0]}}",
        f"N=1\nN[0]=2\n{RUN} a.n=$N",
        f"N=1\ndeclare -i N\nN+=2\n{RUN} a.n=$N",
        f"N=1; coproc N=2\n{RUN} a.n=$N",
        f"M=a:~/y\n{RUN} a.n=$M",
        f"M=1\n{RUN} a.n=$M\\\n3",
        f"{RUN} a.n=$((010))",
        # Commands that change a variable.
        *(
            f"N=100\n{command}\n{RUN} a.n=$N"
            for command in (
                "((N+=28))",
                "(( N = N * 2 ))",
                "((N++))",
                "((--N))",
                "(( N > 3 )) && (( N <<= 1 ))",
                "M=$((N++))",
                'echo "$((N += 2))"',
                "let N+=1",
                'let "N = N * 2"',
                "printf -v N '%d' 5",
                "unset N",
                "unset M N; echo",
                "read N",
                "read -r -p 'how; many? ' N",
                "echo 5 | read N",
                "while read -r N; do echo; done < f",
                "mapfile -t N < f",
                "for N in 1 2; do echo $N; done",
                "source env.sh",
                ". env.sh",
                ". ./env.sh",
                "[ -f env.sh ] && . env.sh",
                'eval "$(cat env)"',
                "export $(cat .env)",
            )
        ),
        f"N=1; ((N += 28)); {RUN} a.n=$N",
        f"source env.sh\n{RUN} a.n=${{N:-4}}",
        f"source env.sh\n{RUN} a.n=$((N * 2))",
        # A function that is called after the variable was set.
        *(
            f"{function}\nN=3\nset_n\n{RUN} a.n=$N"
            for function in (
                "set_n() { N=5; }",
                "set_n() {\n  read N\n}",
                "function set_n {\n  N=5\n}",
                "set_n()\n{\n  if true; then\n    N=5\n  fi\n}",
                "set_n() {\n  ((N++))\n}",
            )
        ),
    ],
)
def test_what_only_a_run_decides_keeps_a_dollar_sign(text):
    assert "$" in read(text)["a.n"]


@pytest.mark.parametrize(
    "text",
    [
        "echo 1",
        "python3 -m verl.trainer.main_generation a.n=1",
        f"{RUN} a.n=1\n{RUN} a.n=2",
        f"for N in 1 2; do\n  {RUN} a.n=$N\ndone",
        f"run() {{\n  {RUN} a.n=1\n}}\nrun",
        f"C='{RUN} a.n=1'\neval $C",
        f"if [ $A ]; then\n  {RUN} a.n=1\nelse\n  {RUN} a.n=2\nfi",
    ],
)
def test_a_script_that_does_not_start_one_training_is_refused(text):
    with pytest.raises(ValueError, match="run.sh has no overrides of verl.trainer.main_ppo"):
        overrides_of_shell(text, "run.sh")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        # A comment or an empty line ends the command.
        (f"{RUN} a.n=1 \\\n  # a.k=2 \\\n  a.m=3", 3, "before a.m=3 ends the command"),
        (f"{RUN} a.n=1 \\\n\n  a.m=3", 3, "before a.m=3 ends the command"),
        # What may hold overrides.
        (f"{RUN} a.n=1 $MORE", 1, r"\$MORE may hold overrides"),
        (f"{RUN} a.n=1 $(cat more)", 1, "may hold overrides"),
        (f'if [ $X ]; then\n  A=(a.n=2)\nfi\n{RUN} a.n=1 "${{A[@]}}"', 4, "A.* may hold overrides"),
        (f'A=(a.n=1)\n[ $X ] && A+=(a.n=2)\n{RUN} "${{A[@]}}"', 3, "A.* may hold overrides"),
        (f'set_a() {{\n  A=(a.n=2)\n}}\nA=(a.n=1)\nset_a\n{RUN} "${{A[@]}}"', 6, "A.* may hold overrides"),
        (f'S="b.n=1"\nif [ $X ]; then\n  S="$S a.n=2"\nfi\n{RUN} $S', 5, r"\$S may hold overrides"),
        (f"{RUN} a.n={{1,2}}", 1, r"a.n=\{1,2\} may hold overrides"),
        # Commands after which a script has another meaning.
        (f"set -- 8\n{RUN} a.n=${{1:-4}}", 1, "set -- 8"),
        (f"N=1\ndeclare -n r=N\nr=2\n{RUN} a.n=$N", 2, "declare -n r=N"),
        (f"IFS=,\nS=a.n=1,a.m=2\n{RUN} $S", 1, "IFS=,"),
        (f"load() {{\n  source env.sh\n}}\nN=1\nload\n{RUN} a.n=$N", 2, "source env.sh"),
        (f"if [ -f e ]; then . e; fi\n{RUN} a.n=1", 1, "[.] e"),
    ],
)
def test_a_line_that_may_change_what_is_read_is_refused_by_its_number(text, line, said):
    with pytest.raises(ValueError, match=f"run.sh, line {line}: .*{said}"):
        overrides_of_shell(text, "run.sh")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('python -m verl.trainer.main_ppo data.train_batch_size=4 "x', "cannot be read as a shell script .No closing"),
        ("if true; then\npython -m verl.trainer.main_ppo data.train_batch_size=4", "cannot be read .*No closing fi"),
        (
            "python -m verl.trainer.main_ppo data.train_batch_size=4; }",
            "cannot be read .*line 1: nothing is open that }",
        ),
        (
            "cat <<E\npython -m verl.trainer.main_ppo data.train_batch_size=4",
            "cannot be read .*a document does not end",
        ),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=x data.max_prompt_length=$((4/0))",
            r"data.max_prompt_length is '\$\(\(4/0\)\)'",
        ),
    ],
)
def test_what_no_shell_could_run_is_refused_by_name(script, said, tmp_path):
    (tmp_path / "run.sh").write_text(script)
    with pytest.raises(ValueError, match=said):
        translate(str(tmp_path / "run.sh"))


def test_text_where_a_number_is_needed_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("max_steps: abc\nnum_generations: 4\nbeta: 0.1\n")
    with pytest.raises(ValueError, match="max_steps is 'abc' in TRL's GRPOConfig in run.yaml; it must be a number"):
        translate(str(tmp_path / "run.yaml"))
