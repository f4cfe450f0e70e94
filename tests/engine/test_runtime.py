"""What the environment may say, and what it may not."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from alltokens.engine.config import TrainConfig
from alltokens.engine.runtime import _refuse_contradictions, first_host, join_slurm, meet_anew
from alltokens.errors import UserError


@pytest.mark.parametrize(
    ("said", "config", "named"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, TrainConfig(precision="bf16"), "train.precision"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, TrainConfig(), "train.compile"),
        ({"ACCELERATE_USE_FSDP": "true"}, TrainConfig(strategy="ddp"), "train.strategy"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, TrainConfig(accumulate=2), "train.accumulate"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, TrainConfig(), "DeepSpeed"),
        ({"ACCELERATE_USE_CPU": "true"}, TrainConfig(device="cuda"), "train.device"),
    ],
)
def test_an_environment_that_contradicts_the_recipe_is_refused(said, config, named):
    with pytest.raises(UserError, match=named):
        _refuse_contradictions(config, dict(said))


def test_what_accelerate_launch_always_says_is_no_contradiction():
    environment = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "True"}
    _refuse_contradictions(TrainConfig(precision="bf16", compile="on"), environment)
    assert environment == {"ACCELERATE_USE_CPU": "True"}


def test_srun_is_understood_and_a_launcher_has_precedence():
    slurm = {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456",
    }  # fmt: skip
    environment = dict(slurm)
    join_slurm(environment)
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": "23456"}
    assert {name: environment[name] for name in expected} == expected
    for untouched in ({**slurm, "RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}):
        environment = dict(untouched)
        join_slurm(environment)
        assert environment == untouched


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[07-09,12],login1", "gpu07"), ("gpu7", "gpu7"), ("a,b[1-2]", "a"), ("n[3,5].site", "n3.site"), ("", "")],
)
def test_the_first_host_of_slurms_list(nodes, host):
    assert first_host(nodes) == host


def test_after_a_restart_processes_meet_at_a_store_of_their_own():
    """What the launcher's store says of the attempt before must not be found."""
    wait = timedelta(seconds=30)
    launchers = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    said = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(launchers.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [{**said, "RANK": str(rank)} for rank in range(2)]
    for rank in ranks:
        meet_anew(rank, wait)
        assert rank["MASTER_PORT"] == said["MASTER_PORT"]  # the first attempt
        rank["TORCHELASTIC_RESTART_COUNT"] = "1"
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rank: meet_anew(rank, wait), reversed(ranks)))
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"] != said["MASTER_PORT"]
    assert {rank["TORCHELASTIC_USE_AGENT_STORE"] for rank in ranks} == {"False"}
