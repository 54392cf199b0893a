"""Judges what was found on the machines: each check returns findings with the sentence that a person needs.

BROKEN: the ranks cannot run together. CHANGE: they can, slower or less safely than they could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from sparkdraft.bridges.cluster.nccl import judge_variables
from sparkdraft.bridges.cluster.network import judge_errors, judge_interfaces, judge_rdma
from sparkdraft.bridges.cluster.survey import Seen
from sparkdraft.operate.doctor.finding import Finding, Status

MOST_SKEW = 1.0  # seconds
LEAST_DISK = 1 << 30
GIB = 1 << 30
SAME = {  # packages that must agree, and how bad it is if they do not
    "vllm": ("vLLM", Status.BROKEN, "ranks of two versions do not understand each other"),
    "torch": ("torch", Status.BROKEN, "ranks of two versions do not understand each other"),
    "nvidia-nccl-cu13": ("NCCL", Status.CHANGE, "ranks of two versions may hang"),
    "nvidia-nccl-cu12": ("NCCL", Status.CHANGE, "ranks of two versions may hang"),
    "sparkdraft": ("sparkdraft", Status.CHANGE, "its vLLM plugin runs in every rank"),
}


def judge(seen: Sequence[Seen], memory_fraction: float = 0.0) -> list[Finding]:
    """All findings, machine by machine. memory_fraction: of the configuration; 0: not known."""
    found: list[Finding] = []
    head = next((each for each in seen if each.facts), None)
    for each in seen:
        if each.problem:
            found.append(_finding(each, "machine", each.problem, Status.BROKEN))
            continue
        assert head
        for check in EACH:
            found += check(each, head)
        found += judge_memory(each, memory_fraction)
        found += [*judge_interfaces(each), *judge_rdma(each), *judge_errors(each), *judge_variables(each, seen)]
    return found


def judge_versions(seen: Seen, head: Seen) -> Iterator[Finding]:
    """vLLM and what it runs on must be the same everywhere."""
    own, first = seen.facts["vllm"], head.facts["vllm"]
    if problem := own.get("problem"):
        advice = "install vLLM there, or name its path as `vllm` in the hosts file"
        yield _finding(seen, "vLLM", problem, Status.BROKEN, advice)
        return
    shown = ", ".join(f"{name} {own[name]}" for name in SAME if name in own)
    yield _finding(seen, "versions", shown)
    for name, (title, status, why) in SAME.items():
        a, b = own.get(name), first.get(name)
        if a != b and "problem" not in first:
            value = f"{title} is {a or 'not installed'} on {seen.host.label} and {b or 'not installed'} on "
            install = f"install {name}=={b} on {seen.host.label}" if b else f"install {name}=={a} on {head.host.label}"
            yield _finding(seen, title, f"{value}{head.host.label}: {why}", status, install)


def judge_gpus(seen: Seen, head: Seen) -> Iterator[Finding]:
    own, first = (each.facts["gpus"] for each in (seen, head))
    if not own and not first:
        yield _finding(seen, "GPU", "nvidia-smi finds none: ranks run on the CPU", Status.NOTE)
    elif bool(own) != bool(first):
        without = seen if not own else head
        value, advice = f"nvidia-smi finds none on {without.host.label}", "mend its driver: `nvidia-smi` must list it"
        yield _finding(seen, "GPU", value, Status.BROKEN, advice)
    else:
        yield _finding(seen, "GPU", f"{own[0]['name']}, driver {own[0]['driver']}")
        if own[0]["driver"] != first[0]["driver"]:
            value = f"{own[0]['driver']} on {seen.host.label} and {first[0]['driver']} on {head.host.label}"
            yield _finding(seen, "driver", value, Status.CHANGE, "update the older one: mixed drivers may hang")


def judge_clock(seen: Seen, head: Seen) -> Iterator[Finding]:
    """Against this machine's; as far as it can be known over ssh."""
    sure = abs(seen.skew) - seen.skew_error
    if sure > MOST_SKEW:
        value = f"{abs(seen.skew):.1f} s {'ahead of' if seen.skew > 0 else 'behind'} this machine's"
        advice = "turn time synchronisation on (timedatectl set-ntp true): lines of the logs cannot be compared"
        yield _finding(seen, "clock", value, Status.CHANGE, advice)
    else:
        yield _finding(seen, "clock", f"agrees within {abs(seen.skew) + seen.skew_error:.1f} s")


def judge_disk(seen: Seen, head: Seen) -> Iterator[Finding]:
    disk, folder = seen.facts["disk"], seen.host.run_folder
    if disk["problem"]:
        advice = "free some space, or name another `folder` in the hosts file"
        yield _finding(seen, "logs", f"{folder} cannot be written: {disk['problem']}", Status.BROKEN, advice)
    elif disk["free"] < LEAST_DISK:
        value = f"{disk['free'] / GIB:.2f} GiB are free for {folder}"
        yield _finding(seen, "logs", value, Status.CHANGE, "free some space: a log ends where the disk is full")


def judge_ports(seen: Seen, head: Seen) -> Iterator[Finding]:
    for port, problem in seen.facts["ports"].items():
        if problem:
            advice = f"`ss -ltnp | grep {port}` says by whom; end it, or choose another port"
            yield _finding(seen, f"port {port}", problem, Status.BROKEN, advice)


def judge_reach(seen: Seen, head: Seen) -> Iterator[Finding]:
    if why := seen.facts["reach"]:
        value = f"{seen.host.label} does not reach the first machine on the fast network ({why})"
        yield _finding(seen, "network", value, Status.BROKEN, "check cable, addresses (`ip addr`) and firewalls")


def judge_files(seen: Seen, head: Seen) -> Iterator[Finding]:
    for path in seen.facts["missing"]:
        plain = PurePosixPath(path)  # with a slash at its end rsync would copy what is in the folder, not the folder
        advice = f"copy it: rsync -a {plain} {seen.host.spec.address}:{plain.parent}/"
        yield _finding(seen, "files", f"{path} is not there, and every rank reads it", Status.BROKEN, advice)


def judge_memory(seen: Seen, fraction: float) -> Iterator[Finding]:
    """A GPU that shares the system's memory takes its part from it."""
    total, free = (seen.facts["memory"][name] for name in ("total", "available"))
    shares = any("GB10" in each["name"] for each in seen.facts["gpus"])
    if shares and fraction * total > free:
        value = f"{free / GIB:.0f} of {total / GIB:.0f} GiB are available, and --memory-fraction {fraction:g} takes "
        advice = "end other programs (echo 1 > /proc/sys/vm/drop_caches frees the rest), or lower --memory-fraction"
        yield _finding(seen, "memory", f"{value}{fraction * total / GIB:.0f}", Status.CHANGE, advice)
    else:
        yield _finding(seen, "memory", f"{free / GIB:.0f} of {total / GIB:.0f} GiB are available")


Check = Callable[[Seen, Seen], Iterator[Finding]]
EACH: tuple[Check, ...] = (
    *(judge_versions, judge_gpus, judge_clock, judge_disk),
    *(judge_ports, judge_reach, judge_files),
)


def _finding(seen: Seen, name: str, value: str, status: Status = Status.FINE, advice: str = "") -> Finding:
    return Finding(seen.host.label, name, value, status, advice)
