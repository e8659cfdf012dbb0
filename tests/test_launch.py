"""Commands as jobs: what sbatch is given, one log a process, and a requeue that lets the run save and resumes it."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stop_mim import cli
from stop_mim.errors import InputError
from stop_mim.launch import Command, LaunchConfig, make_executor, submit
from stop_mim.training.pretrain import TrainResult

pytest.importorskip("submitit")

# Trains until SIGTERM, as `pretrain` does, then saves; `resume` is done at once.
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

run = Path(sys.argv[2])
print(sys.argv[1], os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], flush=True)
if sys.argv[1] == "pretrain":
    def save(*_):
        (run / f"saved-{os.environ['RANK']}").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    run.mkdir(exist_ok=True)
    (run / f"new-{os.environ['RANK']}").write_text(str(os.getppid()))
    (run / f"new-{os.environ['RANK']}").replace(run / f"waits-{os.environ['RANK']}")
    # As in a real run, which writes its configuration when all processes have met.
    while len(list(run.glob("waits-*"))) < 2:
        time.sleep(0.05)
    (run / "config.json").touch()
    while os.environ["RANK"] == "0" or not (run / "saved-0").exists():
        time.sleep(0.05)
    save()
"""


def wait_until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_a_requeued_job_saves_and_resumes_with_one_log_a_process(tmp_path):
    import submitit

    (tmp_path / "stand_in.py").write_text(STAND_IN)
    run, logs = tmp_path / "run", tmp_path / "logs"
    program = (sys.executable, str(tmp_path / "stand_in.py"))
    executor = make_executor(LaunchConfig("submitit", gpus=0, processes=2), logs)
    job = executor.submit(Command(program, ["pretrain", str(run)], run))
    wait_until((run / "config.json").exists)
    # What SLURM sends to every task before it takes the machines away.
    for rank in (1, 0):
        os.kill(int((run / f"waits-{rank}").read_text()), signal.SIGUSR2)
    wait_until(job.done)
    assert (run / "saved-0").exists()
    # The local executor does not queue the job again: what it would have started is started here.
    requeued = submitit.core.utils.DelayedSubmission.load(job.paths.submitted_pickle)
    again = executor.submit(requeued.function)
    again.results()
    for rank in (0, 1):
        for one, command in ((job, "pretrain"), (again, "resume")):
            assert f"{command} {rank} of 2 {rank}" in one.task(rank).paths.stdout.read_text()


def test_sbatch_is_given_what_the_options_say(tmp_path, monkeypatch, capsys):
    recorded = tmp_path / "recorded.sh"
    for name, text in {"srun": "", "sbatch": f"cp $1 {recorded}; echo Submitted batch job 77"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    options = "--launch slurm --launch.nodes 4 --launch.gpus 8 --launch.partition vision --launch.hours 24 --launch.job"
    cli.main(["pretrain", "demo", "--seed", "3", *options.split(), "slurm_account=me", "--out", "runs/a"])
    printed = "".join(capsys.readouterr().out.split())
    assert f"Submittedjob77.Thelogofthefirstprocess:{tmp_path}/runs/a-logs/77_0_log.out" in printed
    lines = recorded.read_text()
    for wanted in (
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "time=1440",
        "partition=vision",
        "account=me",
        "signal=USR2@180",
    ):
        assert f"#SBATCH --{wanted}\n" in lines
    assert not Path("runs/a").exists()
    import submitit

    (pickled,) = Path("runs/a-logs").glob("77_submitted.pkl")
    command = submitit.core.utils.DelayedSubmission.load(pickled).function
    assert command.run == tmp_path / "runs" / "a"
    # The job trains at once, with the demo's own options, instead of submitting another job.
    trained = []
    result = TrainResult(command.run, 6, 6, 0.5, None)
    monkeypatch.setattr("stop_mim.training.pretrain.train", lambda config, **_: trained.append(config) or result)
    cli.main(command.arguments)
    assert [(config.seed, config.out) for config in trained] == [(3, str(command.run))]


def test_the_job_of_a_command_is_the_command_itself(tmp_path, monkeypatch):
    submitted = []
    job = SimpleNamespace(job_id="1", num_tasks=0)
    executor = SimpleNamespace(submit=lambda command: submitted.append(command) or job)
    monkeypatch.setattr("stop_mim.launch.make_executor", lambda *_: executor)
    submit(["evaluate", "--launch", "slurm", "--task", "knn", "--", "run"], LaunchConfig("slurm"), tmp_path, None)
    options = ["evaluate", "--launch", "slurm", "--task", "knn", "--launch", "local"]
    assert submitted[0].arguments == [*options, "--", "run"]


@pytest.mark.parametrize("requeued", [False, True])
def test_a_resume_has_its_own_options_until_it_is_requeued(tmp_path, monkeypatch, requeued):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr("stop_mim.launch.rank_environment", dict)
    program = (
        sys.executable,
        "-c",
        f"import sys; open({str(tmp_path / 'given')!r}, 'w').write(' '.join(sys.argv[1:]))",
    )
    Command(program, ["resume", str(tmp_path), "--data", "photos"], tmp_path, requeued)()
    assert (tmp_path / "given").read_text() == f"resume {tmp_path} {'--or-older' if requeued else '--data photos'}"


def test_a_failed_command_is_a_failed_job(monkeypatch):
    monkeypatch.setattr("stop_mim.launch.rank_environment", dict)
    with pytest.raises(RuntimeError, match="exit code 7"):
        Command((sys.executable, "-c", "raise SystemExit(7)"), ["pretrain"], None)()
    Command((sys.executable, "-c", "raise SystemExit(143)"), ["pretrain"], None)()


def test_without_a_cluster_slurm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="sbatch"):
        make_executor(LaunchConfig("slurm"), tmp_path)
    with pytest.raises(InputError, match=r"launch\.job"):
        LaunchConfig("slurm", job=("partition",))
