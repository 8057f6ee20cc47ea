"""scripts/compare.py: the runs, the table and the HTML report, which is opened in a browser."""

import shutil
import subprocess

import pytest
from launches import SMALL, launch
from PIL import Image

STRATEGIES = ["scratch", "pipeline", "tp", "ddp_pipeline"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the report's directory and the output for three ranks, under which strategies that need pairs cannot run."""
    out = tmp_path_factory.mktemp("compare")
    code, output = launch(
        f"python scripts/compare.py --ranks 3 --out {out} --strategies",
        *STRATEGIES,
        "--",
        *SMALL,
        "epochs=4",
        "model=lenet",
        "data.dataset.channels=1",
    )
    assert code == 0, output
    return out, output


def test_compare_shows_the_same_weights_for_all_strategies(report):
    out, output = report
    rows = {row[1]: row[2:-1] for line in output.splitlines() if len(row := [cell.strip() for cell in line.split("|")]) == 13}
    assert set(rows) - {"strategy", "---"} == {"single", *STRATEGIES}
    for name in ("scratch", "pipeline"):
        assert rows[name][0] == "3"
        assert float(rows[name][-1]) < 1e-6, "the weights at the end differ from single's"
        assert rows[name][7] == rows["single"][7], "the test accuracy differs"
        assert int(rows[name][5].removesuffix(" MiB").replace(",", "")) > 100
    assert float(rows["scratch"][-1]) > 0, "no rounding difference: was single's checkpoint read?"
    assert rows["scratch"][6] == "516kB", "not LeNet's 129,068 gradients of 4 bytes"
    assert rows["single"][6] == "0B"
    assert rows["tp"][1] == "not run: needs an even number of ranks, got 3"
    assert (out / "report.md").read_text() in output
    assert "- pipeline-3: bubble: the busiest rank" in output


def test_compare_skips_profiles_of_too_short_runs(tmp_path):
    code, output = launch(f"python scripts/compare.py --out {tmp_path} --strategies single --", *SMALL, "epochs=1")
    assert code == 0, output
    assert "without profiles: profile=true: needs 16 steps" in output
    assert "| single | 1 |" in output


def test_compare_html_report_is_self_contained_and_opens(report, tmp_path):
    out, _ = report
    page = (out / "report.html").read_text()
    assert "http" not in page
    assert page.count("<tr>") == 2 + len(STRATEGIES)
    assert Image.open(out / "plots.png").width > 1000
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    picture = tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={picture}", "--window-size=1200,1200"]
    subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", f"file://{out}/report.html"],
        check=True,
        timeout=90,
        capture_output=True,
    )
    shown = Image.open(picture).convert("RGB")
    assert (0, 114, 178) in {colour for _, colour in shown.getcolors(1_000_000)}, "the plots are not shown"


def test_compare_refuses_overrides_it_sets_itself():
    code, output = launch("python scripts/compare.py runs_dir=elsewhere")
    assert code == 2
    assert "runs_dir=elsewhere: is set by compare.py; use --out" in output


def test_compare_refuses_unknown_strategies():
    code, output = launch("python scripts/compare.py --strategies magic")
    assert code == 2
    assert "--strategies magic: no such strategy; allowed: single, scratch, ddp" in output


def test_compare_refuses_a_directory_that_is_not_empty(tmp_path):
    """The numbers of other runs would be mistaken for those of this report."""
    (tmp_path / "other").touch()
    code, output = launch(f"python scripts/compare.py --out {tmp_path}")
    assert (code, output) == (1, f"error: --out {tmp_path}: is not empty; choose another\n")
    code, output = launch(f"python scripts/compare.py --out {tmp_path}/other")
    assert (code, output) == (1, f"error: --out {tmp_path}/other: cannot be made (File exists); choose another\n")


def test_compare_refuses_zero_ranks():
    code, output = launch("python scripts/compare.py --ranks 2 0 -- epochs=2")
    assert code == 2
    assert "--ranks 2 0: each must be at least 1" in output
