"""The tests compose configs with caches (quick_compose.py), which must not change a config."""

import pytest
import quick_compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.compose import compose

LINES = [
    ["strategy=ddp", "name=one", "optimizer.lr=0.5"],
    ["strategy=ddp", "name=two", "+optimizer.more=1", "~data.std", "data.mean=[0.1]"],
    ["optimizer.lr=0.5", "model=gpt", "model={depth: 1}", "hydra.job.chdir=true"],
]


def composed(line: list[str], folder: str | None = None) -> dict:
    cfg = compose(line, folder, with_choices=True)
    assert OmegaConf.is_struct(cfg)
    return OmegaConf.to_container(cfg)


@pytest.fixture
def by_hydra(monkeypatch) -> list[dict]:
    """Return what Hydra composes of LINES by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(quick_compose, "remembered", lambda kind, repo, choice, make: make())
        patch.setattr(
            quick_compose.config_loader_impl,
            "create_defaults_list",
            quick_compose.create_defaults_list,
        )
        return [composed(line) for line in LINES]


def test_cached_steps_compose_the_same_config(by_hydra):
    for _ in range(2):
        assert [composed(line) for line in LINES] == by_hydra


def test_changed_config_does_not_change_the_next_one(by_hydra):
    def change(cfg: DictConfig) -> None:
        cfg.optimizer.lr = 9
        cfg.hydra.job.name = "changed"

    change(compose(LINES[0], with_choices=True))
    assert composed(LINES[0]) == by_hydra[0]


def test_files_of_a_user_are_read_each_time(tmp_path):
    file = tmp_path / "strategy" / "mine.yaml"
    file.parent.mkdir()
    for number in (1, 2):
        file.write_text(f"_target_: mine.Strategy\nnumber: {number}\n")
        assert composed(["strategy=mine"], str(tmp_path))["strategy"]["number"] == number
    with pytest.raises(HydraException, match="strategy/mine"):
        composed(["strategy=mine"])
