"""The messages of commands about a user's mistakes."""

import json

import pytest

from ddp_lab.config.errors import SampleError
from ddp_lab.launchers.arguments import installed
from ddp_lab.launchers.command import user_errors


def test_sample_that_cannot_be_read_is_reported_by_the_rank_that_read_it(monkeypatch, capsys):
    @user_errors()
    def command() -> None:
        raise SampleError("sample 5 cannot be read")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: sample 5 cannot be read\n")


def test_exception_of_a_rank_is_written_to_its_error_file_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended, user_errors():
        raise RuntimeError("a bug")
    assert (ended.value.code, capsys.readouterr().err) == (1, "")
    callstack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"][
        "py_callstack"
    ]
    assert callstack.startswith("Traceback")
    assert callstack.endswith("RuntimeError: a bug\n")


def test_version_of_a_package_that_is_not_installed_is_said():
    assert installed("no-such-package") == "no-such-package (not installed)"
    assert installed("pytest") == f"pytest {pytest.__version__}"
