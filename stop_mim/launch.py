"""Commands as cluster jobs, through submitit: one task and one log per process; jobs are requeued and resumed automatically.

    stop-mim pretrain stop-vitl16 --data … --launch slurm --launch.nodes 4 --launch.gpus 8 --launch.hours 24

A job that is pre-empted or near its time limit saves, is requeued, and resumes from the checkpoint.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, Checked
from stop_mim.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import submitit

PROGRAM = (sys.executable, "-m", "stop_mim")
POLL_SECONDS = 0.2
# Time to save before the job's time limit.
SIGNAL_SECONDS = 180
EXIT_OF_SIGNALS = 128


@dataclass(frozen=True)
class LaunchConfig(Checked, group="launch"):
    """Where a command runs."""

    on: Annotated[Literal["local", "slurm", "submitit"], arg(name="launch", prefix_name=False)] = "local"
    """local: here; slurm: as a job of SLURM; submitit: SLURM where there is one, otherwise in the background here."""
    nodes: Annotated[int, ABOVE_ZERO] = 1
    """Machines of a job."""
    gpus: Annotated[int, AT_LEAST_ZERO] = 1
    """GPUs on each machine."""
    processes: Annotated[int | None, ABOVE_ZERO] = None
    """Processes on each machine; not given: one per GPU."""
    cpus: Annotated[int | None, ABOVE_ZERO] = None
    """CPU cores of each process; not given: the cluster's default."""
    hours: Annotated[float, ABOVE_ZERO] = 24.0
    """Time limit; an unfinished run saves before the limit and is requeued."""
    partition: str | None = None
    """Partition of SLURM."""
    requeues: Annotated[int, AT_LEAST_ZERO] = 100
    """How often a job that reaches its time limit continues; pre-emptions do not count."""
    job: Annotated[tuple[str, ...], arg(aliases=("--job",))] = ()
    """Other parameters of submitit, such as slurm_account=vision slurm_constraint=h100."""
    logs: Path | None = None
    """Directory of the logs; not given: OUT-logs next to the run (evaluate: stop-mim-logs; sweep: OUT/logs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("job", all("=" in one for one in self.job), "give NAME=VALUE")

    @property
    def is_job(self) -> bool:
        return self.on != "local"

    def parameters(self) -> dict[str, Any]:
        """Return what submitit is given."""
        given = dict(one.split("=", 1) for one in self.job)
        parameters = {
            "nodes": self.nodes,
            "tasks_per_node": self.processes or max(1, self.gpus),
            "gpus_per_node": self.gpus,
            "cpus_per_task": self.cpus,
            "timeout_min": max(1, round(60 * self.hours)),
            "stderr_to_stdout": True,
            "slurm_partition": self.partition,
            "slurm_signal_delay_s": SIGNAL_SECONDS,
            **{name: int(value) if value.isdecimal() else value for name, value in given.items()},
        }
        return {name: value for name, value in parameters.items() if value is not None}


def make_executor(config: LaunchConfig, logs: Path, name: str = "stop-mim") -> "submitit.AutoExecutor":
    """Return submitit's executor with the parameters of the jobs."""
    try:
        import submitit
    except ImportError as error:
        raise MissingExtra(f"--launch {config.on}", "submitit", "submitit") from error
    if config.on == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise InputError("launch is slurm, and sbatch or srun is not found: run this on a login node of the cluster.")
    cluster = "slurm" if config.on == "slurm" else None
    executor = submitit.AutoExecutor(folder=logs, cluster=cluster, slurm_max_num_timeout=config.requeues)
    try:
        executor.update_parameters(name=name, **config.parameters())
    except (ValueError, NameError, TypeError) as error:
        raise InputError(f"submitit rejects the launch options ({error}): change them.") from error
    return executor


def submit(arguments: Sequence[str], config: LaunchConfig, logs: Path, run: Path | None) -> tuple[str, list[Path]]:
    """Submit a command of `stop-mim`; return the job's number and the log of every process.

    `run` is the run that the command trains: once it has begun, a requeued job resumes it.
    """
    executor = make_executor(config, logs, f"stop-mim {arguments[0]}")
    # The job runs the command itself. Of an option that is given twice the last value counts; after "--" nothing is one.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    job = executor.submit(Command(PROGRAM, [*arguments[:end], "--launch", "local", *arguments[end:]], run))
    return job.job_id, [task.paths.stdout for task in [job.task(number) for number in range(job.num_tasks)]]


class Command:
    """A command as one task of a job, in a subprocess; `checkpoint` lets it save before a requeue."""

    def __init__(
        self, program: Sequence[str], arguments: Sequence[str], run: Path | None, requeued: bool = False
    ) -> None:
        self.program, self.arguments, self.run, self.requeued = program, arguments, run, requeued
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Run the command, or resume the run that it began; raise RuntimeError if it fails."""
        begun = self.run is not None and (self.run / "config.json").exists()
        # A resume has options of its own the first time; a later one must not go back to its --checkpoint.
        repeats = begun and (self.requeued or self.arguments[0] != "resume")
        arguments = ["resume", str(self.run), "--or-older"] if repeats else self.arguments
        self._process = subprocess.Popen([*self.program, *arguments], env={**os.environ, **rank_environment()})
        code = self._wait()
        # A process that was stopped by a signal has saved.
        if 0 < code < EXIT_OF_SIGNALS:
            raise RuntimeError(f"stop-mim {arguments[0]} ended with exit code {code}: its last lines say why.")

    def checkpoint(self) -> Any:
        """Let the process save, and return what the requeued job does; submitit calls it in the first task."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            self._wait()
        return DelayedSubmission(Command(self.program, self.arguments, self.run, requeued=True))

    def _wait(self) -> int:
        # Not Popen.wait: a signal may call `checkpoint` while it waits, which would then wait for itself.
        assert self._process is not None
        while (code := self._process.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code


def rank_environment() -> Mapping[str, str]:
    """Return the variables that tell torch.distributed which task of a job this is; none if it is the only one."""
    import submitit

    if submitit.JobEnvironment().num_tasks == 1:
        return {}
    task = submitit.helpers.TorchDistributedEnvironment()
    names = ("master_addr", "master_port", "rank", "world_size", "local_rank", "local_world_size")
    return {name.upper(): str(getattr(task, name)) for name in names}
