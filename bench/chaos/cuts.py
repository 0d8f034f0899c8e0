"""Links that are cut between two hosts made of network namespaces; the store is on the first host's side."""

from __future__ import annotations

import subprocess
import time

from bench.chaos.campaign import Case, Result, check, go_on, replace_lost, settle
from bench.chaos.group import Group, HangError, Member, store_at
from bench.chaos.ranks import Setup
from bench.slow_network.namespaces import Host, hosts


def cut_links(count: int, size: int) -> list[Result]:
    """Cut the link ``count`` times; each time the second host's ranks are lost, and newcomers take their places."""
    results: list[Result] = []
    with hosts(2, None) as cluster, store_at(cluster[0].address, cluster[0].name) as address:
        setup = Setup(0, size, address, timeout=5.0)
        with Group(setup, size, namespaces=[host.name for host in cluster]) as group:
            settle(group, size, "the beginning")
            for number in range(count):
                results.append(_cut(group, cluster[1], size, number))
                print(results[-1].line(), flush=True)
                if results[-1].problems:
                    break
    return results


def _cut(group: Group, host: Host, size: int, number: int) -> Result:
    result = Result(number + 1, Case("dense", size, "ab"), "cut", "a link")
    far = [m for m in group.members if m.setup.namespace == host.name]
    try:
        when, step = time.monotonic(), max(m.step for m in group.members)
        _set_link(host, "down")
        go_on(group, [m for m in group.members if m not in far], (when, step), result)
        group.until("the ranks that were cut off to end", lambda: all(m.end is not None for m in far), 60.0)
        _set_link(host, "up")
        result.lost = len(far)
        result.problems += [f"rank {m.number}: {m.end}" for m in far if not _is_told(m)]
        replace_lost(group, far, result)
        settle(group, size, "newcomers")
        check(group, result)
    except HangError as error:
        result.problems.append(f"hang: {error}")
    result.problems += group.problems
    group.problems = []
    return result


def _is_told(member: Member) -> bool:
    return str(member.end).startswith("CommError")


def _set_link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", "dev", "eth0", state], check=True, timeout=20)
