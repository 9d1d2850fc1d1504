"""Shell text is read as bash reads it; what only the running shell knows stands as a mark."""

import subprocess

import pytest

from clusterddp.scripts import shell
from clusterddp.scripts.shell import Script
from tests import hostile


def words(text: str) -> list[list[str]]:
    script = shell.read(text)
    return [[script.with_sources(word) for word in command.texts] for command in script.commands]


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("echo a b", [["echo", "a", "b"]]),
        ("echo 'a b' \"c d\"e", [["echo", "a b", "c de"]]),
        (r"echo a\ b \"c", [["echo", "a b", '"c']]),
        ("echo a \\\n  b", [["echo", "a", "b"]]),
        ("a # b\nc", [["a"], ["c"]]),
        ("echo a#b '# c'", [["echo", "a#b", "# c"]]),
        ("a; b & c && d || e | f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("if a; then b; elif c; then d; else e; fi", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("for x in 1 2; do a $x; done; b", [["a", "$x"], ["b"]]),
        ("for ((i=0; i<3; i++)); do a; done", [["a"]]),
        ("while read -r x; do a; done < f", [["read", "-r", "x"], ["a"], []]),
        ("case $x in a|b) c;; *) d ;; esac; e", [["c"], ["d"], ["e"]]),
        ("f() { a; }; function g { b; }; f", [["a"], ["b"], ["f"]]),
        ("(a; b) > c", [["a"], ["b"], []]),
        ("[[ $a == b && -n $c ]] && d", [["[[", "$a", "==", "b", "-n", "$c", "]]"], ["d"]]),
        ("! a; time b", [["a"], ["b"]]),
        ("cat <<EOF\na; b\nEOF\nc", [["cat"], ["c"]]),
        ("cat <<-'EOF' | d\n\ta\n\tEOF\nc", [["cat"], ["d"], ["c"]]),
        ("a 2>&1 >f <<<w b", [["a", "b"]]),
        ("a $'x\\ty'", [["a", "x\ty"]]),
        ("a=1\necho $a ${a} \"$a\" '$a'", [[], ["echo", "1", "1", "1", "$a"]]),
        ("a='x y'\necho $a \"$a\"", [[], ["echo", "x", "y", "x y"]]),
        ("a=\necho $a b", [[], ["echo", "b"]]),
        ("a=1 b\necho $a", [["b"], ["echo", "$a"]]),
        ("a=x; a+=y; echo $a", [[], [], ["echo", "xy"]]),
        ("a=(x 'y z')\nb \"${a[@]}\" ${a[0]}", [[], ["b", "x", "y z", "x"]]),
        ("a=()\nb ${a[@]} c", [[], ["b", "c"]]),
        ("a=(x)\na+=(y)\nb ${a[@]}", [[], [], ["b", "x", "y"]]),
        ("echo ${a:-5} ${b=5}", [["echo", "${a:-5}", "${b=5}"]]),  # the environment may have it
        ("a=1\nb=\necho ${a:-5} ${b:-5} ${b-5}", [[], [], ["echo", "1", "5"]]),
        ("export a+=x\necho $a", [["export"], ["echo", "$ax"]]),
        (f"a=(x)\necho ${{a[{'1' * 5000}]}}", [[], ["echo", f"${{a[{'1' * 5000}]}}"]]),
        ("n=3\necho $((n * 4 + 1)) $(( ${n} - 1 ))", [[], ["echo", "13", "2"]]),
        ("echo $((n + 1)) $(a | b)", [["echo", "$((n + 1))", "$(a | b)"]]),
        ("if t; then a=1; else a=2; fi\necho $a", [["t"], [], [], ["echo", "$a"]]),
        ("a=1\nread a\necho $a", [[], ["read", "a"], ["echo", "$a"]]),
        # Behind a condition it is open what was set under it; within, it is known.
        ("if t; then a=1; echo $a; fi\necho $a", [["t"], [], ["echo", "1"], ["echo", "$a"]]),
        ("f() { a=1; b $a; }\nf; b $a", [[], ["b", "1"], ["f"], ["b", "$a"]]),
        ("a=1\nt && a=2 && b $a\nb $a", [[], ["t"], [], ["b", "2"], ["b", "$a"]]),
        ("t ||\n\n a=1; b $a", [["t"], [], ["b", "$a"]]),
        ("t && { a=1; c=2; b $c; }\nb $a $c", [["t"], [], [], ["b", "2"], ["b", "$a", "$c"]]),
        ("{ t; a=1; }\nb $a", [["t"], [], ["b", "1"]]),
        ("if t; then a=1; fi && b $a", [["t"], [], ["b", "$a"]]),
        ("(a=1; b $a); b $a", [[], ["b", "1"], ["b", "$a"]]),
        ("a=(x)\nif t; then a+=(y); fi\nb ${a[@]}", [[], ["t"], [], ["b", "${a[@]}"]]),
        ("if t; then a=(y); fi\nb ${a[@]}", [["t"], [], ["b", "${a[@]}"]]),
    ],
)
def test_the_commands_are_those_that_bash_runs(text: str, commands: list[list[str]]) -> None:
    assert words(text) == commands


def test_a_value_tells_what_the_running_shell_puts_into_it() -> None:
    script = shell.read("R=$SLURM_PROCID\nA=$(scontrol show hostnames $L | head -n1)\nx $R:$A\n")
    (value,) = script.commands[-1].texts[1:]
    assert not shell.is_known(value)
    assert [each.name for each in script.direct(value)] == ["SLURM_PROCID", ""]
    assert [each.name for each in script.expanded(value)] == ["SLURM_PROCID", "", "L"]
    assert [each.line for each in script.direct(value)] == [1, 2]
    inside = script.direct(value)[1].commands
    assert [command.texts[0] for command in inside] == ["scontrol", "head"]


def test_the_text_of_an_inner_shell_keeps_what_the_outer_one_expands() -> None:
    outer = shell.read('bash -c "echo $OUT \\$IN"')
    inner = shell.read(outer.commands[0].texts[2], outer=outer)
    mine, theirs = inner.commands[0].texts[1:]
    assert inner.direct(mine) == outer.direct(outer.commands[0].texts[2])
    assert [each.name for each in inner.direct(theirs)] == ["IN"]


def test_commands_know_where_they_stand() -> None:
    script = shell.read("a &\nif b; then\n  f() {\n    c\n  }\nfi\nd | e \\\n  g\n")
    assert [(c.line, c.last_line, c.inside, c.background, c.piped) for c in script.commands] == [
        (1, 1, (), True, False),
        (2, 2, ("if",), False, False),
        (4, 4, ("if", "function", "{"), False, False),
        (7, 7, (), False, True),
        (7, 8, (), False, False),
    ]
    assert script.commands[-1].source == "e \\\n  g"


def test_a_here_document_is_expanded_unless_its_word_is_quoted() -> None:
    script = shell.read("a <<E >f\n$X 'b'\nE\na <<'E'\n$X\nE\n")
    first, second = (command.redirects[0].body or "" for command in script.commands)
    assert script.with_sources(first) == "$X 'b'\n"
    assert [each.name for each in script.direct(first)] == ["X"]
    assert (second, shell.is_known(second)) == ("$X\n", True)


def test_exports_are_told_from_other_variables() -> None:
    script = shell.read("export A=1 B\nC=2\ndeclare -x D=3\ndeclare E=4\n")
    assert script.exported == {"A", "B", "D"}
    assert script.variables == {"A": "1", "C": "2", "D": "3", "E": "4"}


@pytest.mark.parametrize("value", hostile.CARRIED)
def test_a_value_in_single_quotes_arrives_as_bash_has_it(value: str) -> None:
    quoted = "'" + value.replace("'", "'\\''") + "'"
    asked = subprocess.run(
        ["bash", "-c", f"printf %s {quoted}"], capture_output=True, check=True, text=True
    )
    assert shell.read(f"x {quoted}").commands[0].texts == ("x", asked.stdout)


ODD_TEXTS = [
    *hostile.REFUSED,
    *("$(" * 3000, "${x:-" * 3000, "`" * 3001, '"$(' * 3000, "((" * 3000, "<<A " * 3000 + "\n"),
    *("case x in " * 2000, "f() {" * 2000, "[[ " * 2000, "'", '"', "$'", "${", "$((", "A=(", "\\"),
    *("fi done esac } ) ;; ", "\U000f0000 $x", "a=$((9" + "9" * 5000 + "))", "a[" * 3000),
    'A="x x"\n' + 'A="$A $A"\n' * 40 + "echo $A $A $(echo $A)\n" * 2000,
]


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=str(number)) for number, text in enumerate(ODD_TEXTS)]
)
def test_text_that_is_no_shell_is_read_as_far_as_it_goes(text: str) -> None:
    script = shell.read(text)
    assert isinstance(script, Script)
    for command in script.commands:
        for value in shell.values(command):
            script.with_sources(value)
            script.expanded(value)
