"""Variables of an environment that a person has pasted."""

import subprocess

import pytest

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.ranks.variables import own_gloo_interfaces, parse_environment

PASTES = {
    "env": ("A=1\nB=x=y z\nC=\n", {"A": "1", "B": "x=y z", "C": ""}),
    "env with values of several lines": (
        "A=one\ntwo words\n{ three\nB=2\n",
        {"A": "one\ntwo words\n{ three", "B": "2"},
    ),
    "env with an exported function": (
        "RANK=1\nBASH_FUNC_ml%%=() {  RANK=2;\n  eval x\n}\nB=2\n",
        {"RANK": "1", "BASH_FUNC_ml%%": "() {  RANK=2;\n  eval x\n}", "B": "2"},
    ),
    "env -0": ("A=one\nB=two\0C=3\0", {"A": "one\nB=two", "C": "3"}),
    "Windows line ends": ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
    "blank lines and no line end": ("\nA=1\n\nB=2", {"A": "1", "B": "2"}),
}


@pytest.mark.parametrize("form", PASTES)
def test_every_form_of_pasted_environment_is_read(form: str) -> None:
    text, expected = PASTES[form]
    assert parse_environment(text) == expected


HOSTILE = ["", "plain", "it's", 'say "x"', "$HOME `id` \\", "a\nRANK=9\nb", "\n", "tab\there", "é"]


@pytest.mark.parametrize("value", HOSTILE)
def test_what_env_prints_is_read_back(value: str) -> None:
    printed = subprocess.run(
        ["env", "-0"], env={"PATH": "/usr/bin:/bin", "V": value}, capture_output=True, check=True
    )
    assert parse_environment(printed.stdout.decode())["V"] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no NAME=value line"),
        ("hello\n", "no NAME=value line"),
        ('declare -x A="1"\n', "a shell's declarations"),
        ("export A='1'\n", "a shell's declarations"),
        ("SLURM_PROCID=0\nSLURM_PROCID=1\n", "expected one task's variables"),
    ],
)
def test_a_paste_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_environment(text)


@pytest.mark.parametrize(
    ("wanted", "own"),
    [
        ("ib0", "ib0"), ("=ib0", "ib0"), ("ib", "ib01"), ("=ib0,none", "ib0"), ("none,eth", "eth0"),
        ("ib1,ib0", "ib1"), ("ib0,ib1", "ib1"), ("ib0,", "ib0"), ("^docker0", ""),
        ("^=docker0", ""),
    ],
)  # fmt: skip
def test_gloo_gets_one_interface_of_those_that_nccls_form_means(wanted: str, own: str) -> None:
    environ, names = {"GLOO_SOCKET_IFNAME": wanted}, ["lo", "eth0", "ib0", "ib01", "ib1"]
    for world_size in (1, 2):
        found = own_gloo_interfaces(environ, world_size, lambda: names, lambda n: n != "ib0")
        assert found == {"GLOO_SOCKET_IFNAME": own}


def test_an_interface_of_this_host_without_an_address_is_passed_over() -> None:
    environ, names = {"GLOO_SOCKET_IFNAME": "none,lo"}, ["none", "lo"]
    assert own_gloo_interfaces(environ, 2, lambda: names) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("wanted", ["none", "=ib", "x y", ","])
def test_interfaces_that_a_host_lacks_are_refused(wanted: str) -> None:
    environ = {"GLOO_SOCKET_IFNAME": wanted, "SLURMD_NODENAME": "h02"}
    with pytest.raises(DistEnvError, match="expected network interfaces of h02, which has lo, ib0"):
        own_gloo_interfaces(environ, 2, lambda: ["lo", "ib0"])
    assert own_gloo_interfaces(environ, 1, lambda: ["lo", "ib0"]) == {"GLOO_SOCKET_IFNAME": ""}
    assert own_gloo_interfaces({}, 2, lambda: ["lo", "ib0"]) == {}
