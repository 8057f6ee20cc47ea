"""Commands that run in one process refuse to be started as several ranks."""

import importlib

import pytest

from ddp_lab.config.errors import ConfigError

LINES = {
    "advise": ["--gpus", "2xH100"],
    "eject": ["--output", "plain.py"],
    "merge": ["RUN"],
    "predict": ["RUN", "FILE"],
    "shards": ["FILE", "--bytes", "--output", "shards"],
    "submit": ["slurm"],
}


@pytest.mark.parametrize("command", LINES)
def test_command_of_one_process_refuses_ranks(command, tmp_path, monkeypatch):
    (tmp_path / "FILE").touch()
    (tmp_path / "RUN").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = importlib.import_module(f"ddp_lab.commands.{command}")
    with pytest.raises(ConfigError) as raised:
        module.main(LINES[command])
    expected = f"ddp-lab {command}: runs in one process; start it without torchrun"
    assert str(raised.value) == expected
