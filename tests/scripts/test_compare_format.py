"""scripts/compare.py compares checkpoints as files for any model and choice."""

from launches import SMALL

from ddp_lab.launchers.short_run import ShortRun
from scripts import compare


def test_runs_that_are_compared_write_checkpoints_of_one_file(tmp_path, monkeypatch):
    passed = []

    def train(overrides, ranks, out, label):
        passed.extend(overrides)
        folder = out / label / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "step_00000005.pt").touch()
        return ShortRun([], None)

    monkeypatch.setattr(compare, "train", train)
    entry = compare.Entry("fsdp", [], 2, 2)
    result = compare.run(entry, [*SMALL, "checkpoint.format=sharded"], tmp_path)
    formats = [override for override in passed if override.startswith("checkpoint.format=")]
    assert formats[-1] == "checkpoint.format=full", "the last override counts"
    assert [*result.checkpoints] == [5]
