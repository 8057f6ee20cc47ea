import logging
import os

from worlds import run_world

from ddp_lab.observe.log import log, setup_logging


def log_on_every_rank(run_dir) -> None:
    setup_logging(run_dir, int(os.environ["RANK"]))
    log.info("all is well")
    logging.getLogger("somebody.else").info("chatter")
    if os.environ["RANK"] == "1":
        log.warning("not quite")


def test_rank_0_logs_info_and_other_ranks_warn_with_their_rank(tmp_path):
    run_world(3, log_on_every_rank, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.log", "train.rank1.log"]
    assert (tmp_path / "train.log").read_text().endswith("INFO all is well\n")
    assert (tmp_path / "train.log").read_text().count("\n") == 1
    assert (tmp_path / "train.rank1.log").read_text().endswith("WARNING [rank 1] not quite\n")


def test_no_more_than_the_first_ranks_have_a_log_file(tmp_path):
    run_world(1, warn_as, tmp_path, 7)
    run_world(1, warn_as, tmp_path, 700)
    assert [path.name for path in tmp_path.iterdir()] == ["train.rank7.log"]


def warn_as(run_dir, rank: int) -> None:
    setup_logging(run_dir, rank)
    log.warning("not quite")
