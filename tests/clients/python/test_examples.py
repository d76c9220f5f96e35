"""The examples of the Python client, run as a reader would run them."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_pytest_example_passes() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_front_end.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


def steer(tmp_path: Path, losses: list[float], *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_ms": 2, "loss": losses}))
    config = tmp_path / "run.toml"
    config.write_text('model = "m"\ndata = "d"\nmax_steps = 200\nlearning_rate = 1e-3\n')
    words = [sys.executable, str(EXAMPLES / "lower_learning_rate.py"), str(config), "--window", "5", *options]
    worker = [f"--worker-arg={word}" for word in ("--engine", "fake", "--script", str(script))]
    return subprocess.run([*words, *worker], capture_output=True, text=True, timeout=240)


def test_the_steering_example_lowers_a_flat_run_s_learning_rate_and_stops_a_good_one(tmp_path: Path) -> None:
    flat = [2.0] * 30
    good = [0.4] * 100
    done = steer(tmp_path, [*flat, *good], "--target", "0.5")
    assert done.returncode == 0, done.stderr
    assert "the loss is flat; learning_rate is 0.0005 now" in done.stdout
    assert "learning_rate is 0.00025 now" in done.stdout
    assert "loss 0.400 is good; saved" in done.stdout
    assert "stopped at step" in done.stdout
    logged = [json.loads(line) for line in (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    changes = [line["changes"]["learning_rate"] for line in logged if line["type"] == "config_changed"]
    assert changes[0] == {"from": 1e-3, "to": 5e-4}


def test_the_steering_example_lets_a_run_that_gets_better_alone(tmp_path: Path) -> None:
    done = steer(tmp_path, [4.0 * 0.98**n for n in range(200)], "--target", "0.01")
    assert done.returncode == 0, done.stderr
    assert "flat" not in done.stdout
    assert "completed at step 200" in done.stdout


def test_the_steering_example_says_why_a_run_failed(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('model = "m"\ndata = "d"\nbatchsize = 4\n')
    words = [sys.executable, str(EXAMPLES / "lower_learning_rate.py"), str(config), "--worker-arg=--engine=fake"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "batch_size" in done.stderr
