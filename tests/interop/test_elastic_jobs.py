"""A job under torchrun goes on when a host is lost for good, and uses it again when it comes back; with the same bits.

`pytest -s` prints the seconds from the loss to the next step, by cause.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
import torch

from fpipe import handlers, interop
from tests.support import elastic_jobs
from tests.support.combinations import ALL
from tests.support.forked import free_port
from tests.support.hosts import Network, made
from tests.support.jobs import differences

ROOT = Path(__file__).resolve().parents[2]
SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"  # docs/hosts.md
TOTAL, SECONDS = 60, 0.3  # steps, and what each takes
PATIENCE = 90.0

pytestmark = pytest.mark.skipif(not ALL, reason="starts torchrun a dozen times: FPIPE_TESTS=all runs it")


class Agent:
    """torchrun on one of several hosts.

    Args:
        before: words of a command that runs it in a namespace.
        script: with its arguments; by default that of `elastic_jobs`.
    """

    def __init__(self, folder, endpoint, address, before=(), script=None, nodes="1:2", conf=SOON, **environment):
        script = script or [elastic_jobs.__file__, str(folder), str(TOTAL), str(SECONDS)]
        words = ["--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        words += ["--rdzv-endpoint", endpoint, "--local-addr", address, "--max-restarts", "3", "--rdzv-conf", conf]
        words += ["--monitor-interval", "0.1", *script]
        self.log = Path(folder, f"agent-{len([*Path(folder).glob('agent-*')])}")
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "torch.distributed.run", *words],
            cwd=ROOT,
            env=os.environ | variables | {"LOGLEVEL": "INFO"} | environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def kill(self):
        """End it and its workers, as when the host goes down."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [self.process.pid, *map(int, children.read_text().split())] if children.exists() else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def when(self, text, after=0.0):
        """The time of the first line of the log, after some time, that has a text."""
        for line in self.log.read_text().splitlines():
            if text in line and (stamp := re.match(r"\w(\d{4} \d\d:\d\d:\d\d\.\d+)", line)):
                seconds = datetime.strptime(f"{datetime.now().year}{stamp[1]}", "%Y%m%d %H:%M:%S.%f").timestamp()
                if seconds > after:
                    return seconds
        return None


def events(folder):
    """(time, rank/size, text) of all processes, by time."""
    lines = [line.split(" ", 2) for path in folder.glob("events-*") for line in path.read_text().splitlines()]
    return sorted((float(at), place, text) for at, place, text in lines)


def wait_for(folder, place, text, after=0.0):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if found := next((at for at, p, t in events(folder) if at > after and p == place and t.startswith(text)), None):
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {text!r} of {place}: " + "\n".join(p.read_text()[-3000:] for p in folder.glob("agent-*")))


@contextmanager
def ended(agents):
    try:
        yield
    finally:
        for agent in agents:
            agent.kill()


def by_cause(folder, agent, lost):
    """The seconds from the loss of a host to the end of the next step, on the host that stays."""
    failed = agent.when("Stopping worker group", lost)
    met = agent.when("Rendezvous complete", failed)
    after = [(at, text) for at, _, text in events(folder) if at > met]
    began, joined, chose, step = (
        next(at for at, text in after if text.startswith(word)) for word in ("began", "joined", "chose", "step")
    )
    marks = {"noticed": failed, "rendezvous": met, "Python": began, "joined": joined, "chose and loaded": chose}
    times, last = {}, lost
    for cause, at in {**marks, "first step": step}.items():
        times[cause], last = at - last, at
    return f"{step - lost:.1f} s: " + ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in times.items())


def check_end(folder, tmp_path):
    whole = elastic_jobs.train(*elastic_jobs.begin(handlers.Local(), tmp_path / "whole", total=TOTAL), until=TOTAL)
    ends = [torch.load(path) for path in sorted(folder.glob("end-*.pt"))]
    assert not differences({s: p for end in ends for s, p in end["params"].items()}, whole["params"])
    assert [end["losses"] for end in ends] == [whole["losses"]] * len(ends)


def test_a_lost_host_and_its_return(tmp_path):
    """Two agents on the loopback; one is killed with its worker, and another comes later."""
    folder, endpoint = tmp_path / "job", f"127.0.0.1:{free_port()}"
    folder.mkdir()
    agents = [Agent(folder, endpoint, "127.0.0.1")]
    with ended(agents):
        time.sleep(1)
        agents.append(Agent(folder, endpoint, "127.0.0.1"))
        wait_for(folder, "0/2", "step 3")
        agents[1].kill()
        lost = time.time()
        wait_for(folder, "0/1", "step", lost)
        print(f"\none of two agents killed, {by_cause(folder, agents[0], lost)}")
        agents.append(Agent(folder, endpoint, "127.0.0.1"))
        came = time.time()
        step = wait_for(folder, "0/2", "step", came)
        print(f"a host came back: {step - came:.1f} s to the first step with two")
        for agent in (agents[0], agents[2]):
            assert agent.process.wait(PATIENCE) == 0, agent.log.read_text()[-3000:]
    check_end(folder, tmp_path)
    texts = [text for _, place, text in events(folder) if text.startswith("chose") and place.startswith("0/")]
    assert [text.split(":")[0] for text in texts] == ["chose 2 ranks", "chose 1 rank", "chose 2 ranks"]
    assert "before: 2 processes" in texts[1]
    assert "before: 1 process" in texts[2]


def test_a_job_with_more_processes_than_stages_ends_well(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", elastic_jobs.__file__]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, str(tmp_path), "3", "0", "2"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0.pt", "end-1.pt"]
    assert any("1 process with no stage: there are 2" in text for _, _, text in events(tmp_path))


@pytest.fixture
def network():
    yield from made(Network)


def two_hosts(network, folder, conf=SOON, script=None):
    """An agent on each; torchrun does not know the first by its address."""
    folder.mkdir()
    agents = []
    for host, address, is_host in zip(network.hosts, ("10.0.0.1", "10.0.0.2"), (1, 0), strict=True):
        inside = ("ip", "netns", "exec", host)
        own = f"{conf},is_host={is_host}"
        agents.append(Agent(folder, "10.0.0.1:29400", address, inside, script, conf=own, GLOO_SOCKET_IFNAME="eth0"))
    return agents


@pytest.mark.parametrize("conf", [SOON, "join_timeout=600"], ids=["short limits", "torchrun's own limits"])
def test_a_host_that_is_cut_off_for_good(network, tmp_path, conf):
    folder = tmp_path / "job"
    agents = two_hosts(network, folder, conf)
    with ended(agents):
        wait_for(folder, "0/2", "step 3")
        network.unplug()
        lost = time.time()
        wait_for(folder, "0/1", "step", lost)
        print(f"\ncut off, {by_cause(folder, agents[0], lost)}")
        assert agents[0].process.wait(PATIENCE) == 0, agents[0].log.read_text()[-3000:]
    check_end(folder, tmp_path)


def test_a_job_on_two_hosts_that_loses_a_rank(network, tmp_path):
    """Both hosts stay: their agents start the workers again."""
    folder = tmp_path / "job"
    agents = two_hosts(network, folder)
    with ended(agents):
        for at in (3, 8):
            wait_for(folder, "1/2", f"step {at}")
            pid = max(folder.glob("events-*"), key=lambda path: path.stat().st_mtime).name.split("-")[-1]
            os.kill(int(pid), signal.SIGKILL)
            lost = time.time()
            wait_for(folder, "0/2", "chose", lost)
            wait_for(folder, "0/2", "step", lost + 1)
            print(f"\na process killed, both hosts stay, {by_cause(folder, agents[0], lost)}")
        assert [agent.process.wait(PATIENCE) for agent in agents] == [0, 0]
    check_end(folder, tmp_path)


def test_the_host_of_the_endpoint_is_the_one_that_must_stay(network, tmp_path):
    folder = tmp_path / "job"
    agents = two_hosts(network, folder)
    with ended(agents):
        wait_for(folder, "0/2", "step 3")
        agents[0].kill()
        assert agents[1].process.wait(PATIENCE) != 0
        text = agents[1].log.read_text()
        assert "RendezvousConnectionError: The connection to the C10d store has failed" in text


def test_the_example_goes_on_when_one_of_two_hosts_goes_down(network, tmp_path):
    """`examples/train_gpt.py` as docs/hosts.md starts it; the end has the bits of a run in one process."""
    folder = tmp_path / "job"
    sizes = "--stages 2 --layers 2 --width 32 --context 16 --batch 8 --microbatches 4 --steps 60 --every 1000"
    paths = ["--text", str(ROOT / "CHANGELOG.md"), "--logdir", str(tmp_path / "runs")]
    script = [str(ROOT / "examples/train_gpt.py"), *sizes.split(), *paths, "--save-every", "5", "--checkpoints"]
    agents = two_hosts(network, folder, script=[*script, str(folder)])
    with ended(agents):
        saved = until_there(folder, "*-step-10", agents)
        agents[1].kill()
        start = time.time()
        assert agents[0].process.wait(PATIENCE) == 0, agents[0].log.read_text()[-3000:]
        print(f"\nthe example: {time.time() - start:.1f} s from the loss of a host to its end, by the one that stays")
    log = agents[0].log.read_text()
    assert "1 rank: " in log
    _, lost, after = log.partition("; before: 2 processes")
    assert lost
    assert "step 54/60" in after
    assert "step 0/60" not in after
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, str(tmp_path / "whole")]
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=PATIENCE)
    ends = []
    for run in (folder, tmp_path / "whole"):
        (last,) = run.glob("*-step-60")
        interop.export_safetensors(last, tmp_path / f"{run.name}.safetensors")
        ends.append((tmp_path / f"{run.name}.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert saved.name < last.name


def until_there(folder, pattern, agents):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if found := next(folder.glob(pattern), None):
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {pattern}: " + "\n".join(agent.log.read_text()[-3000:] for agent in agents))
