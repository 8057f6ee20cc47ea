"""The hosts of --hosts and of a hostfile, and mistakes in them."""

import re

import pytest

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.hostfile import Host, parse_hosts, read_hostfile


def test_hosts_are_separated_by_commas_and_may_have_users():
    assert parse_hosts("a, me@b.lab,10.0.0.1") == [Host("a"), Host("me@b.lab"), Host("10.0.0.1")]


def test_hostfile_has_hosts_slots_and_comments(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# my rack\n\nnode1 slots=4  # new\n  node2\nme@node3\tslots=1\n#node4\n")
    assert read_hostfile(file) == [Host("node1", 4), Host("node2"), Host("me@node3", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--hosts : '': is no name of a host. Must be a name, an address or USER@HOST"),
        ("a,,b", "--hosts a,,b: '': is no name of a host"),
        ("-oProxyCommand=x,b", "'-oProxyCommand=x': is no name of a host"),
        ("a;reboot,b", "'a;reboot': is no name of a host"),
        ("a b", "'a b': is no name of a host. Must be a name, an address or USER@HOST, as for "),
        ("me@-b", "'me@-b': is no name of a host"),
        ("a,b,a", "--hosts a,b,a: a is named 2 times; name each host once, with all its ranks"),
        (
            "a:4",
            "--hosts a:4: a:4: is no name of a host. For 4 ranks on each host use --nproc 4, for "
            "other numbers a --hostfile with the line `a slots=4`",
        ),
    ],
)
def test_wrong_hosts_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb slots=x", ", line 2: slots=x: is not supported; a line is `HOST` or `HOST slots=N`"),
        ("a slots = 2", ", line 1: slots = 2: is not supported; a line is `HOST`"),
        ("a max_slots=4", ", line 1: max_slots=4: is not supported; a line is `HOST`"),
        ("a slots=0", ", line 1: slots=0: must be at least 1; leave the host out instead"),
        ("\n--help", ", line 2: '--help': is no name of a host"),
        ("# none\n", ": has no host; a line is `HOST` or `HOST slots=N`"),
        ("a\nb\na slots=2", ": a is named 2 times; name each host once"),
    ],
)
def test_wrong_hostfile_is_refused_with_the_line(text, message, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"--hostfile {file}{message}")):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"\xff\xfe", "it is no text")],
)
def test_unreadable_hostfile_is_refused_with_the_reason(content, reason, tmp_path):
    file = tmp_path / "hosts"
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: cannot be read ({reason}). Must")):
        read_hostfile(file)
