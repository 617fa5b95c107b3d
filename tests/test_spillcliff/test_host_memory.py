"""A container's memory is what its groups allow, and a mapped file is neither a process's own nor free twice."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from helpers.made import ROOT, make_plan, there

from probe.grid.run import GridOptions, _limit
from probe.tasks.worker import _is_memory_short
from spillcliff.hardware import host_memory
from spillcliff.hardware.device import device_facts
from spillcliff.hardware.host_memory import CgroupLevel, HostMemory, cgroup_levels, mapped_data_bytes, own_bytes, within
from spillcliff.hardware.usage import free_bytes
from trainer.run.preflight_facts import gather
from trainer.run_folder import RunFolder

GB = 10**9
UNLIMITED = "9223372036854771712"
V2 = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = ("30 25 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
      "31 25 0:27 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup c rw,memory\n")


def tree(root, cgroup, mounts, files):
    """A recorded /proc and /sys."""
    named = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts} | {
        f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in named.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_of_version_2_sees_its_limit_at_the_top(tmp_path):
    root = tree(tmp_path, "0::/\n", V2, {
        "memory.max": "1500000000\n", "memory.high": "max\n", "memory.current": "900000000\n",
        "memory.stat": "anon 500000000\nfile 400000000\ninactive_file 300000000\nactive_file 100000000\n"})
    assert list(cgroup_levels(root)) == [CgroupLevel(1_500_000_000, 900_000_000, 300_000_000)]
    memory = host_memory.host_memory(root)
    assert memory.total_bytes == 1_500_000_000
    assert memory.free_bytes <= 900_000_000


def test_the_smallest_limit_on_the_path_holds_and_the_fullest_group_decides_what_is_free(tmp_path):
    """A service within a slice within another: each its own, of which the middle one is the tightest."""
    root = tree(tmp_path, "1:name=systemd:/a\n0::/user.slice/job.scope/leaf\n", V2, {
        "user.slice/memory.max": "8000000000", "user.slice/memory.current": "7900000000", "user.slice/memory.high": "max",
        "user.slice/memory.stat": "inactive_file 0",
        "user.slice/job.scope/memory.max": "max", "user.slice/job.scope/memory.high": "4000000000",
        "user.slice/job.scope/memory.current": "1000000000", "user.slice/job.scope/memory.stat": "inactive_file 1",
        "user.slice/job.scope/leaf/memory.max": "max", "user.slice/job.scope/leaf/memory.current": "1000000000"})
    levels = list(cgroup_levels(root))
    assert [level.limit_bytes for level in levels] == [4 * GB, 8 * GB]
    assert within(HostMemory(25 * GB, 20 * GB), levels) == HostMemory(4 * GB, GB // 10)


@pytest.mark.parametrize(("mount_root", "path"), [
    ("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/../abc"), ("/docker/abc", "/elsewhere")])
def test_version_1_is_read_whatever_the_container_calls_its_group(tmp_path, mount_root, path):
    root = tree(tmp_path, f"9:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n", V1.format(root=mount_root), {
        "memory/memory.limit_in_bytes": "1500000000", "memory/memory.usage_in_bytes": "700000000",
        "memory/memory.stat": "cache 1\nhierarchical_memory_limit 2000000000\ninactive_file 5\n"
                              "total_inactive_file 200000000"})
    assert list(cgroup_levels(root)) == [CgroupLevel(1_500_000_000, 700_000_000, 200_000_000)]


def test_a_limit_above_what_is_mounted_is_told_by_the_hierarchy(tmp_path):
    root = tree(tmp_path, "4:memory:/docker/abc\n", V1.format(root="/docker/abc"), {
        "memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": "100",
        "memory/memory.stat": "hierarchical_memory_limit 1500000000"})
    assert [level.limit_bytes for level in cgroup_levels(root)] == [1_500_000_000]


@pytest.mark.parametrize("files", [
    {"memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": "5000000000"},
    {"memory/memory.limit_in_bytes": "", "memory/memory.usage_in_bytes": "x"}, {"memory/memory.limit_in_bytes": "0"}, {}])
def test_without_a_limit_the_machine_is_all_there_is(tmp_path, files):
    """Unlimited is written as a number of its own in version 1; what can't be read is no limit either."""
    root = tree(tmp_path, "4:memory:/\n", V1.format(root="/"), files)
    assert within(HostMemory(25 * GB, 20 * GB), list(cgroup_levels(root))) == HostMemory(25 * GB, 20 * GB)
    assert list(cgroup_levels(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(("cgroup", "mounts"), [
    ("", ""), ("\n::\nx\n0\n", "x\n - \n30 - cgroup2 a b\n"),
    ("4:memory:../..\n0::relative\n", V1.format(root="/a\\040b") + V2), ("0::/a\n" * 3, V2 * 2)])
def test_odd_lines_are_no_limit(tmp_path, cgroup, mounts):
    assert list(cgroup_levels(tree(tmp_path, cgroup, mounts, {}))) == []


@pytest.mark.parametrize(("machine", "level", "free"), [
    (HostMemory(25 * GB, 29 * GB), None, 25 * GB), (HostMemory(25 * GB, GB), CgroupLevel(2 * GB, 0, 0), GB),
    (HostMemory(25 * GB, 20 * GB), CgroupLevel(2 * GB, 3 * GB, 0), 0),
    (HostMemory(25 * GB, 20 * GB), CgroupLevel(2 * GB, 2 * GB, GB), GB)])
def test_what_is_free_is_never_more_than_there_is_nor_less_than_nothing(machine, level, free):
    assert within(machine, [level] if level else []).free_bytes == free


SMAPS = """7f00-7f01 r--s 00000000 08:01 11                         /data/tokens train.bin
Rss:              500000 kB
Anonymous:             0 kB
VmFlags: rd mr me sd
7f01-7f02 r--p 00000000 08:01 12                         /lib/libtorch.so
Rss:              200000 kB
7f02-7f03 r-xp 00000000 08:01 12                         /lib/libtorch.so
Rss:              100000 kB
7f03-7f04 rw-p 00000000 08:01 13                         /data/weights
Rss:               90000 kB
Anonymous:         60000 kB
7f04-7f05 rw-s 00000000 00:17 14                         /dev/shm/torch_1 (deleted)
Rss:               70000 kB
7f05-7f06 rw-p 00000000 00:00 0                          [heap]
Rss:              800000 kB
7f06-7f07 rw-s 00000000 00:01 15                         /memfd:x (deleted)
Rss:               70000 kB"""


def test_only_pages_as_they_are_on_the_disk_are_taken_off():
    """Not libraries, not shared memory, not what was written to."""
    assert mapped_data_bytes(SMAPS.splitlines()) == (500_000 + 90_000 - 60_000) * 1024


def test_a_container_of_1500_mb_is_told_as_such_by_limit_audit_and_records(monkeypatch, tmp_path):
    """A machine of 25 GB was told, and the kernel ended what believed it."""
    cpu, level = torch.device("cpu"), CgroupLevel(1_500_000_000, 100_000_000, 0)
    monkeypatch.setattr(host_memory, "cgroup_levels", lambda root: [level])
    assert device_facts(cpu).total_bytes == 1_500_000_000
    in_records = free_bytes(cpu, "")
    assert GB < there(in_records) <= 1_400_000_000
    limit_bytes, words = _limit("cpu", GridOptions(seconds=1), None) or (0, "")
    assert 0.9 * GB < limit_bytes <= 0.9 * 1_400_000_000
    assert "of 1.5 GB" in words
    facts = gather(make_plan(), cpu, RunFolder(tmp_path / "run"))
    assert facts.total_bytes == 1_500_000_000
    assert there(facts.free_bytes) <= 1_500_000_000
    full = CgroupLevel(1_500_000_000, 1_450_000_000, 0)
    for levels, is_short in (([level], False), ([full], True), ([full._replace(cache_bytes=500_000_000)], False)):
        monkeypatch.setattr(host_memory, "cgroup_levels", lambda root, levels=levels: levels)
        assert _is_memory_short() is is_short


@pytest.mark.parametrize(("answer", "free"), [(lambda device: (5 * GB, 16 * GB), 5 * GB), (None, None)])
def test_the_machine_s_memory_is_never_taken_for_a_card_s(monkeypatch, answer, free):
    """Intel's cards are asked themselves; where they don't tell, nobody knows."""
    if answer:
        monkeypatch.setattr(torch.xpu, "mem_get_info", answer)
    assert free_bytes(torch.device("xpu"), "") == free
    assert free_bytes(torch.device("cuda"), "") is None


MAPS = """
import json, sys
import numpy
from spillcliff.hardware.host_memory import host_memory, own_bytes, resident_peak_bytes
before = resident_peak_bytes(), own_bytes()
mapped = numpy.memmap(sys.argv[1], dtype="u1", mode="r")
total = int(mapped[::4096].sum())
with_file = resident_peak_bytes(), own_bytes()
taken = numpy.ones(60_000_000, "u1")
print(json.dumps([before, with_file, [resident_peak_bytes(), own_bytes()]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapped_file_is_not_the_process_s_own(tmp_path):
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(200_000_000))
    done = subprocess.run([sys.executable, "-c", MAPS, str(file)], cwd=ROOT, capture_output=True, text=True, check=True)
    before, with_file, with_array = json.loads(done.stdout)
    for i in range(2):
        assert with_file[i] - before[i] < 20_000_000
        assert with_array[i] - before[i] > 50_000_000
    assert own_bytes() < psutil.Process().memory_info().rss
